"""Prompts that begin alike are computed once: `python examples/generate.py [MODEL]`."""

import sys

from mambacache import LLM, SamplingParams
from mambacache.demo import MODEL

document = "Ada went to Oslo . Max went to Rome . Ada went to Lima . " * 20
questions = [f"{document}where is {name} ?" for name in ("Ada", "Max")]

llm = LLM(sys.argv[1] if len(sys.argv) > 1 else MODEL, max_num_batched_tokens=2048)
for output in llm.generate(questions, SamplingParams(temperature=0, max_tokens=2)):
    cache = output.cache
    losses = ", ".join(f"{tokens} {reason}" for reason, tokens in cache.losses.items()) or "nothing"
    print(f"{output.outputs[0].text}  ({cache.hit} of {cache.prompt} tokens hit, lost: {losses})")
print(llm.stats)
