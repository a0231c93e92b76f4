"""Conversations side by side, and one that is ended early: `python examples/async_chat.py [MODEL]`."""

import asyncio
import sys

from mambacache import AsyncLLM, SamplingParams
from mambacache.demo import MODEL

document = "Ada went to Oslo . Max went to Rome . Ada went to Lima . " * 20


async def ask(llm: AsyncLLM, name: str) -> str:
    """Ask where somebody is, and print the answer as it comes."""
    messages = [{"role": "user", "content": f"{document}where is {name} ?"}]
    async for output in llm.chat(messages, SamplingParams(temperature=0, max_tokens=2)):
        print(f"{name}: {output.outputs[0].text}")
    return output.outputs[0].text


async def main() -> None:
    async with AsyncLLM(sys.argv[1] if len(sys.argv) > 1 else MODEL, max_num_batched_tokens=2048) as llm:
        print(await asyncio.gather(ask(llm, "Ada"), ask(llm, "Max")))
        long = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
        async for output in llm.stream(document, long, request_id="long"):
            if len(output.outputs[0].token_ids) >= 10 and not output.finished:
                await llm.abort("long")
        print(output.outputs[0].finish_reason)


asyncio.run(main())
