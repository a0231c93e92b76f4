"""Run the recall model on two GPUs with data parallelism: `python idle_rank_run.py NAME DIRECTORY`.

The model has experts, so a rank without requests runs dummy steps while the other rank answers. They must change none
of its states, in its pool or its token logs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from hashlib import blake2b
from pathlib import Path
from typing import Any

import recall_run
from watched import LAST_ANSWER

from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def note_states(worker: Any, directory: Path) -> None:
    """Write a digest of all states of a rank."""
    states, digest = worker.step_context, blake2b()
    for pool in (states.pool, states.logs):
        digest.update(pool.buffer.cpu().numpy())
    (directory / str(worker.vllm_config.parallel_config.data_parallel_index)).write_text(digest.hexdigest())


async def check(directory: Path) -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(str(MODEL), data_parallel_size=2, enable_expert_parallel=True, **recall_run.OPTIONS)
    llm, params = AsyncLLM.from_engine_args(args), SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    questions = recall_run.asked()

    async def ask(number: int, rank: int) -> int:
        """Return the number of tokens that a question hits. Check its answer."""
        prompt, right = questions[number]
        async for output in llm.generate(prompt, params, f"{number} {rank}", data_parallel_rank=rank):
            last = output
        assert last.outputs[0].text.strip() == right
        return last.num_cached_tokens

    async def states() -> list[str]:
        await llm.collective_rpc(note_states, args=(directory,))
        return [(directory / rank).read_text() for rank in "01"]

    assert await ask(0, 1) == 0
    before = await states()
    hits = [await ask(number, 0) for number in range(len(questions))]
    after = await states()
    assert before[0] != after[0], "the rank that answers writes states"
    assert before[1] == after[1], "dummy steps changed a state"
    assert hits == [0] + [4096] * (len(questions) - 1) and await ask(1, 1) == 4096
    print(LAST_ANSWER, flush=True)
    llm.shutdown()


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir()
    asyncio.run(check(Path(sys.argv[2])))
