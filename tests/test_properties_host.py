"""Run random host engines on `PrefixCache` alone: any split of a prompt, any order of rows, KV of their own."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mambacache.config import CacheConfig
from mambacache.plan import SequenceStep, StepPlan
from mambacache.report import Hit
from mixes import mixes
from symbolic import VOCAB, answer, text
from symbolic_driver import CheckedCache

ANSWER = 30


class Host:
    """Run requests to their end, and choose at random where a host may choose."""

    def __init__(self, seed: int, config: CacheConfig, ahead: bool) -> None:
        self.rng = random.Random(seed)
        self.cache = CheckedCache(config)
        self.config, self.ahead = config, ahead
        self.keeps_kv = config.has_attention and not config.num_kv_blocks
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.expected: dict[str, list[int]] = {}
        self.running: list[str] = []
        self.in_flight: dict[str, int] = {}
        self.plans: deque[tuple[StepPlan, list[list[int]]]] = deque()

    def run(self, count: int) -> None:
        stem = text(250)
        for i in range(count):
            prompt = stem[: self.rng.choice([0, 64, 128, 150, 200])] + text(self.rng.randint(1, 80), i)
            self.prompts[str(i)], self.answers[str(i)] = prompt, []
            self.expected[str(i)] = answer(prompt, ANSWER, attention=self.config.num_kv_blocks > 0)
            self.cache.add(str(i), prompt, salt=self.rng.choice(["", "", "tenant"]))
        steps = 0
        while self.prompts:
            steps += 1
            assert steps < 5000
            self.step()
        while self.plans:
            self.read()
        self.cache.check_no_leak()
        self.cache.check_contents()

    def step(self) -> None:
        for request_id in self.prompts:
            if request_id not in self.running and self.rng.random() < 0.6:
                self.admit(request_id)
        chosen = self.rng.sample(self.running, self.rng.randint(0, len(self.running)))
        steps = [step for request_id in chosen if (step := self.row(request_id)) is not None]
        if not steps:
            for request_id in self.running[1:] if self.rng.random() < 0.1 else ():
                self.preempt(request_id)
            if self.plans:
                self.read()
            return
        plan = self.cache.plan(steps)
        if self.rng.random() < 0.02:
            self.cache.cancel(plan.steps)
            for step in steps:
                self.running.remove(step.request_id)
            return
        outputs = self.cache.runner.execute(plan, [int(step.samples) for step in plan.steps])
        self.cache.issued(plan.steps)
        for step in steps:
            self.in_flight[step.request_id] = self.in_flight.get(step.request_id, 0) + step.samples
        self.plans.append((plan, outputs))
        if len(self.plans) > self.ahead:
            self.read()

    def admit(self, request_id: str) -> None:
        covered = self.rng.randint(0, 300) if self.keeps_kv else None
        if isinstance(self.cache.admit(request_id, kv_tokens=covered), Hit):
            self.running.append(request_id)

    def row(self, request_id: str) -> SequenceStep | None:
        progress = self.cache.progress(request_id)
        left = progress.prefill_end - progress.computed
        if left > 0:
            return self.cache.allocate(request_id, self.rng.choice([left, self.rng.randint(1, left), min(left, 64)]))
        room = ANSWER - len(self.answers[request_id]) - self.in_flight.get(request_id, 0)
        if room <= 0:
            return None
        drafts = self.rng.randint(0, min(self.config.max_draft_tokens, room - 1))
        done = len(self.answers[request_id])
        right = self.expected[request_id][done : done + drafts]
        guesses = [token if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for token in right]
        return self.cache.allocate(request_id, 1, drafts=guesses)

    def preempt(self, request_id: str) -> None:
        self.cache.preempt(request_id)
        self.running.remove(request_id)

    def read(self) -> None:
        plan, outputs = self.plans.popleft()
        accepted: dict[str, list[int]] = {}
        for step, sampled in zip(plan.steps, outputs, strict=True):
            if step.samples:
                taken = [sampled[0]]
                for draft, token in zip(step.drafts, sampled[1:], strict=False):
                    if draft != taken[-1]:
                        break
                    taken.append(token)
                accepted[step.request_id] = taken
        self.cache.accept(plan.steps, accepted)
        for request_id, taken in accepted.items():
            self.in_flight[request_id] -= 1
            self.answers[request_id] += taken
            assert self.answers[request_id] == self.expected[request_id][: len(self.answers[request_id])]
            if len(self.answers[request_id]) == ANSWER:
                self.cache.free(request_id, finished=True)
                del self.prompts[request_id]
                if request_id in self.running:
                    self.running.remove(request_id)


@st.composite
def hosts(draw: st.DrawFn) -> tuple[int, CacheConfig, bool]:
    drafts = draw(st.sampled_from([0, 0, 1, 4, 7]))
    kind: dict[str, Any] = draw(
        st.sampled_from([{"num_kv_blocks": 0}, {"num_kv_blocks": 6}, {"num_kv_blocks": 20}, {"has_attention": False}])
    )
    config = CacheConfig(
        num_state_blocks=draw(st.sampled_from([2, 3, drafts + 3, 30])),
        max_draft_tokens=drafts,
        checkpoint_interval=draw(st.sampled_from([0, 0, 64])),
        max_checkpoints=draw(st.sampled_from([None, None, 2])),
        strict_reuse=draw(st.sampled_from([False, False, True])),
        **kind,
    )
    return draw(st.integers(0, 1 << 30)), config, not drafts and draw(st.booleans())


@mixes(300)
@given(hosts())
def test_any_host(host: tuple[int, CacheConfig, bool]) -> None:
    Host(*host).run(5)
