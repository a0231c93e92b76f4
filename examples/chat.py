"""A conversation: each turn hits all whole blocks of the turns before. `python examples/chat.py [MODEL]`."""

import sys

from mambacache import LLM, SamplingParams
from mambacache.demo import MODEL

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else MODEL, max_num_batched_tokens=2048)
document = "Ada went to Oslo . Max went to Rome . Ada went to Lima . " * 20
messages = [{"role": "user", "content": f"{document}where is Ada ?"}]
for question in ("where is Max ?", "where is Ada ?", None):
    output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=2))[0]
    answer = output.outputs[0].text
    print(f"{messages[-1]['content'][-14:]} {answer}  ({output.cache.hit} of {output.cache.prompt} tokens hit)")
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
