"""Text as it comes, and two streams that take turns: `python examples/stream.py [MODEL]`."""

import sys

from mambacache import LLM, SamplingParams
from mambacache.demo import MODEL

document = "Ada went to Oslo . Max went to Rome . Ada went to Lima . " * 20
llm = LLM(sys.argv[1] if len(sys.argv) > 1 else MODEL, max_num_batched_tokens=2048)
params = SamplingParams(temperature=0, max_tokens=2)

for output in llm.stream(f"{document}where is Ada ?", params):
    print(output.outputs[0].delta, end="", flush=True)
print(f"  ({output.cache.hit} of {output.cache.prompt} tokens hit)")

streams = [llm.stream(f"{document}where is {name} ?", params) for name in ("Ada", "Max")]
for outputs in zip(*streams, strict=True):  # each step brings on both
    print([output.outputs[0].text for output in outputs])
