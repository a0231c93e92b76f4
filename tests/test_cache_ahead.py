"""Plan rows before the drafts of the row before them are verified: only the device knows where they begin.

A host of its own runs them in pipelined order, on the symbolic model.
"""

from __future__ import annotations

import random

import pytest

from cache_calls import allocate, hit, make, run_step, started
from mambacache.config import CacheConfig
from mambacache.plan import PLACEHOLDER, StepPlan
from mambacache.report import Hit, Wait
from symbolic import VOCAB, answer, text
from symbolic_driver import CheckedCache

ANSWER = 70
UNKNOWN = (PLACEHOLDER,) * 7


class Pipeline:
    """Keep a step on the device, and launch the next step before its tokens are read.

    Args:
        right: the probability that a draft is right.
    """

    def __init__(self, config: CacheConfig, prompts: dict[str, list[int]], seed: int, right: float) -> None:
        self.rng, self.cache, self.right = random.Random(seed), CheckedCache(config), right
        self.cache.runner.propose = self.propose
        self.prompts = prompts
        self.said = {
            name: answer(prompt, ANSWER + 30, attention=config.num_kv_blocks > 0) for name, prompt in prompts.items()
        }
        self.out: list[tuple[StepPlan, dict[str, list[int]]]] = []
        self.late = 0
        for name, prompt in prompts.items():
            self.cache.add(name, prompt)

    def propose(self, name: str, position: int, count: int) -> list[int]:
        guesses = self.said[name][position - len(self.prompts[name]) :][:count]
        guesses = [token if self.rng.random() < self.right else self.rng.randrange(VOCAB) for token in guesses]
        return guesses + [0] * (count - len(guesses))

    def answered(self, name: str) -> int:
        return len(self.cache.tokens(name)) - len(self.prompts[name])

    def step(self) -> None:
        cache, rows = self.cache, []
        for name in cache.request_ids:
            if not cache.runs(name) and isinstance(cache.admit(name), Wait):
                continue
            at = cache.progress(name)
            if self.rng.random() < 0.1 or self.answered(name) + at.in_flight > ANSWER:
                continue
            left = at.prefill_end - at.computed
            drafts = UNKNOWN[: self.rng.randint(0, cache.config.max_draft_tokens)] if left <= 0 else ()
            row = cache.allocate(name, cache.next_tokens(name, 100) if left > 1 else 1, drafts=drafts, decode=left == 1)
            if row is not None:
                rows.append(row)
                self.late += row.unplaced_by > 0
        plan = cache.plan(rows) if rows else None
        if self.rng.random() < 0.2:
            self.read()
        if plan is not None:
            outputs = cache.runner.execute(plan, [int(step.samples) for step in plan.steps])
            cache.issued(plan.steps)
            self.out.append((plan, {step.request_id: out for step, out in zip(plan.steps, outputs, strict=True)}))
        if len(self.out) > 1 or plan is None:
            self.read()
        self.disturb()

    def read(self) -> None:
        if not self.out:
            return
        plan, outputs = self.out.pop(0)
        stops = {name for name in outputs if self.rng.random() < 0.05}
        given = {name: out[: self.rng.randint(0, len(out))] if name in stops else out for name, out in outputs.items()}
        self.cache.accept(plan.steps, {name: out for name, out in given.items() if self.cache.knows(name)})
        for name in outputs:
            if self.cache.knows(name):
                said = list(self.cache.tokens(name))[len(self.prompts[name]) :]
                assert said == self.said[name][: len(said)]
                if name in stops or (len(said) > ANSWER and not self.cache._admission.requests[name].issued):
                    self.cache.free(name, finished=True)  # its next row may be in flight

    def disturb(self) -> None:
        running = [name for name in self.cache.request_ids if self.cache.runs(name)]
        if running and self.rng.random() < 0.05:
            name = self.rng.choice(running)
            if self.rng.random() < 0.7:
                self.cache.preempt(name)
            else:
                self.cache.free(name, finished=False)

    def run(self) -> None:
        for _ in range(3000):
            if not self.cache.request_ids and not self.out:
                break
            self.step()
        assert not self.cache.request_ids
        self.cache.check_no_leak()
        self.cache.check_contents()


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("drafts", [1, 3, 7])
def test_a_step_ahead_of_drafts_changes_no_token(drafts: int, attention: bool) -> None:
    late = 0
    for seed in range(12):
        rng = random.Random(seed)
        prompts = {str(i): text(rng.randint(1, 140), rng.randrange(3)) for i in range(5)}
        kind = {"num_kv_blocks": 24} if attention else {"has_attention": False}
        config = CacheConfig(num_state_blocks=rng.choice([6, 30]), max_draft_tokens=drafts, **kind)
        host = Pipeline(config, prompts, seed, right=rng.choice([0.0, 0.7, 1.0]))
        host.run()
        late += host.late
    assert late > 300


def test_a_late_row_writes_the_dst_of_the_row_before_it() -> None:
    """Try every start of the first row, every number of drafts, and every number of accepted drafts."""
    for first in range(1, 15):
        for drafts in range(1, 8):
            for accepted in range(min(drafts, 15 - first) + 1):
                cache = make(max_draft_tokens=7, num_state_blocks=2)
                started(cache, "a", text(first))
                run_step(cache, "a", first, 1)
                before = cache.plan([allocate(cache, "a", 1, UNKNOWN[:drafts])]).steps
                cache.issued(before)
                late = cache.plan([allocate(cache, "a", 1, UNKNOWN)]).steps
                row = before[0]
                assert (late[0].start, late[0].unplaced_by) == (first + 1, row.num_tokens - 1)
                assert bool(late[0].dst) == (first + row.num_tokens + 8 >= 16)
                assert not row.dst or late[0].dst == row.dst
                cache.issued(late)
                cache.accept(before, {"a": [2] * (accepted + 1)})
                cache.check()
                start = first + accepted + 1
                assert cache.progress("a").computed == min(start + 1, start // 16 * 16 + 16)
                cache.accept(late, {"a": [3]})
                cache.check()
                after = allocate(cache, "a", 1)
                assert after.start == start + 1 and not after.unplaced_by
                folded = start == 16 or start + 1 == 16
                assert (after.src == row.src) == (not folded) and after.log_start == (0 if folded else first)


def test_a_late_row_that_is_dropped_or_cancelled_leaves_the_row_before_it() -> None:
    for end in ("drop", "cancel"):
        cache = make(max_draft_tokens=7)
        started(cache, "a", text(60))
        run_step(cache, "a", 60, 5)
        before = cache.plan([allocate(cache, "a", 1, UNKNOWN)]).steps
        cache.issued(before)
        late = allocate(cache, "a", 1, UNKNOWN)
        if end == "drop":
            cache.drop(late)
            cache.accept(before, {"a": [6, 7, 8, 9]})
            assert cache.progress("a").computed == 64 and hit(cache, [*text(60), 5, 6, 7, 8, 1]) == 64
        else:
            cache.cancel(cache.plan([late]).steps)
            assert not cache.runs("a")
            cache.accept(before, {"a": [6, 7, 8, 9]})
            assert isinstance(cache.admit("a"), Hit)
        assert list(cache.tokens("a"))[60:] == [5, 6, 7, 8, 9]
        cache.check()


def test_tokens_of_a_late_row_are_kept_when_its_request_was_preempted() -> None:
    cache = make(max_draft_tokens=3)
    started(cache, "a", text(60))
    run_step(cache, "a", 60, 5)
    plans = []
    for _ in range(2):
        plans.append(cache.plan([allocate(cache, "a", 1, UNKNOWN[:3])]).steps)
        cache.issued(plans[-1])
    cache.preempt("a")
    cache.accept(plans[0], {"a": [6, 7]})
    assert isinstance(cache.admit("a"), Wait)
    cache.accept(plans[1], {"a": [8, 9]})
    assert list(cache.tokens("a"))[60:] == [5, 6, 7, 8, 9]
    assert isinstance(cache.admit("a"), Hit)
    cache.check()
