"""Send long mixed traffic to the trained recall model.

Every answer that the model alone gives right must be right, and nothing is held when all requests have ended.

Requests are turns of conversations about documents. They come in bursts, in several salts, and some twice. They are
aborted, preempted in pools that are too small, and drafted for rightly and wrongly. Host and device stop at random.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from engine_driver import Engines, greedy
from mambacache import LLM, DraftTree, SamplingParams
from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS, answer_text, demo_document, encode, question_text
from mambacache.scheduler.request import Request

DOCUMENTS, TURNS = 6, 4
LONG, LONGEST = 66, 350  # tokens of an answer; only the first can be right or wrong
LONGEST_EACH = 5  # a few of the longest answers side by side outgrow the KV pool
UNDER_WAY = 20  # requests at a time
ABORT_EACH, RESET_EACH = 12, 35
STOP_SECONDS, STOP_CYCLES = 0.004, 4_000_000
ALONE = greedy(ANSWER_TOKENS, ignore_eos=True, read_cache=False, store_cache=False)


def conversations(seed: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield prompts and their right answers. Each turn has the turns before it in its prompt."""
    for number in range(DOCUMENTS):
        rng = random.Random(f"{seed} {number}")
        document = demo_document(rng.randrange(1 << 30), num_records=rng.randrange(20, 240), num_names=12)
        tokens, last = encode(document.text), dict(document.records)
        for name in rng.sample(sorted(last), min(TURNS, len(last))):
            prompt = tokens + encode(question_text(name))
            right = encode(answer_text(last[name]))
            yield prompt, right
            tokens = prompt + right


@dataclass
class Soak:
    """Send traffic to one engine."""

    llm: LLM
    turns: Sequence[tuple[list[int], list[int]]]
    rng: random.Random
    asked: dict[str, list[int]] = field(default_factory=dict)  # the right answers of requests in flight
    right: int = 0
    aborted: int = 0

    def run(self, requests: int) -> None:
        for number in range(requests):
            while len(self.asked) >= UNDER_WAY or (self.asked and self.rng.random() < 0.6):
                self.step()
            self.submit(number)
            self.disturb(number)
        while not self.llm.idle:
            self.step()
        assert not self.asked

    def submit(self, number: int) -> None:
        prompt, right = self.rng.choice(self.turns)
        tokens = LONGEST if number % LONGEST_EACH == 1 else self.rng.choice([ANSWER_TOKENS, ANSWER_TOKENS, LONG])
        params = SamplingParams(
            temperature=self.rng.choice([0.0, 0.0, 1.0]),
            top_k=1,
            max_tokens=tokens,
            min_tokens=self.rng.choice([0, 0, ANSWER_TOKENS]),
            ignore_eos=True,
            n=self.rng.choice([1, 1, 1, 1, 3]),
            salt=self.rng.choice(["", "", "", "other"]),
            logprobs=self.rng.choice([None, None, 2]),
            store_cache=self.rng.random() < 0.95,
        )
        self.asked[str(number)] = right
        self.llm.submit(prompt, params, str(number))

    def disturb(self, number: int) -> None:
        if number % ABORT_EACH == 0:
            name = self.rng.choice(sorted(self.asked))
            self.llm.abort(name)
            del self.asked[name]
            self.aborted += 1
        if number % RESET_EACH == RESET_EACH - 1:
            self.llm.reset_prefix_cache()
        if self.rng.random() < 0.1:
            time.sleep(self.rng.uniform(0, STOP_SECONDS))
        if self.rng.random() < 0.1 and torch.cuda.is_initialized():
            torch.cuda._sleep(self.rng.randrange(STOP_CYCLES))

    def step(self) -> None:
        for output in self.llm.step():
            right = self.asked.get(output.request_id)
            if output.finished and right is not None:
                for each in output.outputs:
                    assert list(each.token_ids[:ANSWER_TOKENS]) == right
                self.right += 1
                del self.asked[output.request_id]

    def draft(self, request: Request, limit: int) -> list[int] | DraftTree:
        """Return the right tokens, wrong tokens, a tree of both, or none."""
        right = self.asked.get(request.request_id.partition("/")[0], [])[len(request.output) :]
        if right and self.rng.random() < 0.3:
            return DraftTree([limit, *right], [0, 0, *range(2, 1 + len(right))])
        guess = right if self.rng.random() < 0.7 else [limit, limit]
        return guess if self.rng.random() < 0.8 else []


def soak(engine: Engines, requests: int, drafts: bool, seed: int = 0) -> None:
    """Run with drafts, or a step ahead, on a CPU too."""
    turns = list(conversations(seed=requests + seed))
    alone = engine(MODEL).generate([prompt for prompt, _ in turns], ALONE, use_tqdm=False)
    known = [turn for turn, output in zip(turns, alone, strict=True) if list(output.outputs[0].token_ids) == turn[1]]
    assert len(known) >= 0.8 * len(turns)
    soaks: list[Soak] = []
    llm = engine(
        MODEL,
        draft=(lambda request, limit: soaks[0].draft(request, limit)) if drafts else None,
        max_draft_tokens=3 if drafts else 0,
        max_num_seqs=8,
        max_num_batched_tokens=384,
        num_checkpoints=12,
        num_kv_blocks=28,
        max_model_len=1536,
    )
    llm._step_loop.steps_ahead = 1
    soaks.append(Soak(llm, known, random.Random(requests + seed)))
    soaks[0].run(requests)
    stats = llm.stats
    assert soaks[0].right + soaks[0].aborted == requests and soaks[0].aborted == -(-requests // ABORT_EACH)
    assert stats.hit_tokens > 0.03 * stats.prompt_tokens and stats.preemptions and stats.states_evicted
    assert not stats.state_blocks["writing"]


@pytest.mark.full
@pytest.mark.parametrize("drafts", [True, False])
def test_soak(engine: Engines, drafts: bool) -> None:
    soak(engine, 18 if engine.device == "cpu" else 25, drafts)


@pytest.mark.gpu_full
@pytest.mark.parametrize("engine", ["cuda"], indirect=True)
@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_long_soak(engine: Engines, drafts: bool, seed: int) -> None:
    """Send 5,000 requests in all."""
    soak(engine, 500, drafts, seed)
