"""Make illegal moves on a cache: any call at any time with any id, old rows included.

A call either raises one sentence and changes nothing, or leaves the cache's records sound. All tokens stay right.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambacache.config import CacheConfig
from mambacache.plan import PLACEHOLDER, SequenceStep, StepPlan
from mambacache.report import Hit
from mixes import mixes
from symbolic import VOCAB, SymbolicRunner, answer, text
from symbolic_driver import CheckedCache
from watched_cache import state_blocks

ANSWER = 20
NAMES = "abcd"


class IllegalHost:
    """Keep no order. A plan may run once, if the cache takes all its rows. Names come back, prompts do not."""

    def __init__(self, seed: int, config: CacheConfig) -> None:
        self.rng = random.Random(seed)
        self.cache = CheckedCache(config)
        self.cache.runner.propose = self.propose
        self.attention = config.num_kv_blocks > 0
        self.keeps_kv = config.has_attention and not config.num_kv_blocks
        self.allocated: list[SequenceStep] = []
        self.plans: list[StepPlan] = []
        self.sampled: dict[int, list[int]] = {}  # by row
        self.steps: list[SequenceStep] = []  # every row so far
        self.prompts: dict[str, list[int]] = {}
        self.refused = self.taken = 0
        self.done: set[str] = set()

    def run(self, moves: int) -> None:
        kinds = [self.add, self.admit, self.admit, self.allocate, self.allocate, self.plan, self.issue, self.accept]
        kinds += [self.cancel, self.drop, self.preempt, self.free, self.fork, self.withdraw, self.old, self.reset]
        kinds += [self.decoded]
        weights = [3, 6, 6, 10, 10, 9, 14, 14, 1, 1, 1, 1, 4, 1, 3, 0.2, 1]
        for move in [self.add] * 3 + self.rng.choices(kinds, weights, k=moves):
            self.attempt(move)
        self.finish()

    def attempt(self, move: Callable[[], Any]) -> None:
        before = self.snapshot()
        try:
            move()
            self.taken += 1
            self.done.add(move.__name__)
        except (ValueError, RuntimeError) as refusal:
            assert "\n" not in str(refusal) and len(str(refusal)) > 20
            assert self.snapshot() == before, f"{refusal}: but something changed"
            self.refused += 1
        self.cache.check()

    def snapshot(self) -> tuple[Any, ...]:
        cache = self.cache
        running = [name for name in cache.request_ids if cache.runs(name)]
        progress = [(name, cache.progress(name), tuple(state_blocks(cache, name))) for name in running]
        stats = cache.stats
        return cache.request_ids, progress, stats.state_blocks, stats.kv_blocks, sorted(cache._admission.rows)

    # --- moves ---

    def name(self, fits: Callable[[str], bool] = lambda name: True) -> str:
        """Return a name, mostly a name that fits if there is any."""
        fitting = [name for name in NAMES if fits(name)]
        return self.rng.choice(fitting if fitting and self.rng.random() < 0.9 else NAMES)

    def waits(self, name: str) -> bool:
        return self.cache.knows(name) and not self.cache.runs(name)

    def can_run(self, name: str) -> bool:
        return self.cache.knows(name) and self.cache.runs(name) and all(s.request_id != name for s in self.allocated)

    def add(self) -> None:
        name, length = self.name(lambda name: not self.cache.knows(name)), self.rng.choice([1, 63, 64, 65, 130, 200])
        prompt = text(self.rng.choice([0, 64, 128, 150]))[:length] + text(
            self.rng.randint(1, 60), self.rng.randrange(3)
        )
        self.cache.add(name, prompt, store=self.rng.random() < 0.9, read=self.rng.random() < 0.9)
        self.prompts[name] = prompt

    def admit(self) -> None:
        self.cache.admit(
            self.name(self.waits), kv_tokens=self.rng.choice([-10, 0, 64, 128, 200]) if self.keeps_kv else None
        )

    def allocate(self) -> None:
        rng, name = self.rng, self.name(self.can_run)
        decode, drafts, parents = rng.random() < 0.1, [], []
        progress = self.cache.progress(name)
        left = progress.prefill_end - progress.computed
        count = rng.choice([left, left, left, left, min(left, 64), rng.randint(-1, 200)])
        if left <= 0 and rng.random() < 0.9:
            count = 1
            if rng.random() < 0.5:
                right = self.right(name)[len(self.cache.tokens(name)) - len(self.prompts[name]) :]
                drafts = self.guesses(right, rng.randint(0, 3))
                if rng.random() < 0.5:
                    drafts = [PLACEHOLDER] * len(drafts)
                if rng.random() < 0.3:
                    parents = [rng.randint(max(i - 2, 0), i) for i in range(len(drafts))]  # a tree, or not
                    drafts = [token if token < 0 or rng.random() < 0.5 else rng.randrange(VOCAB) for token in drafts]
        step = self.cache.allocate(name, count, drafts=drafts, parents=parents, decode=decode)
        if step is not None:
            self.allocated.append(step)
            self.steps.append(step)

    def plan(self) -> None:
        if self.rng.random() < 0.9:
            self.allocated = [step for step in self.allocated if step.row in self.cache._admission.rows]
        rows = [step for step in self.allocated if self.rng.random() < 0.9]
        if self.steps and self.rng.random() < 0.05:
            rows.append(self.rng.choice(self.steps))
        if rows:
            self.plans.append(self.cache.plan(rows))
        self.allocated = [step for step in self.allocated if step not in rows]

    def issue(self) -> None:
        plan = self.some_plan(lambda plan: not any(step.row in self.sampled for step in plan.steps))
        rows = [row for step in plan.steps if (row := self.cache._admission.rows.get(step.row)) is not None]
        again = any(row.issue for row in rows)
        whole = len(rows) == len(plan.steps) and not again
        if rows and not whole and not again:
            return  # a row was dropped or cancelled: the plan does not run
        outputs = self.cache.runner.execute(plan, [int(step.samples) for step in plan.steps]) if whole else None
        self.cache.issued(plan.steps)
        if outputs is not None:
            self.sampled |= {step.row: output for step, output in zip(plan.steps, outputs, strict=True)}

    def accept(self) -> None:
        plan = self.some_plan(lambda plan: any(step.row in self.cache._admission.rows for step in plan.steps))
        accepted: dict[str, list[int]] = {}
        for step in plan.steps:
            sampled = self.sampled.get(step.row, [])
            known = PLACEHOLDER not in step.drafts
            accepted[step.request_id] = SymbolicRunner.accepted(step, [0, *step.drafts], sampled) if known else sampled
        if self.rng.random() < 0.05:
            accepted[self.name()] = [self.rng.randrange(VOCAB)] * self.rng.randrange(4)
            if all(accepted.get(step.request_id) == self.sampled.get(step.row) for step in plan.steps):
                return
            accepted = {name: tokens * 9 for name, tokens in accepted.items()}  # tokens that no row gives
        self.cache.accept(plan.steps, accepted)

    def cancel(self) -> None:
        self.cache.cancel(self.some_plan().steps)

    def drop(self) -> None:
        self.cache.drop(self.rng.choice(self.steps or [self.unknown_step()]))

    def preempt(self) -> None:
        self.cache.preempt(self.name())

    def free(self) -> None:
        self.cache.free(self.name(), finished=self.rng.random() < 0.5)

    def fork(self) -> None:
        name = self.name(lambda n: self.cache.knows(n) and len(self.cache.tokens(n)) == len(self.prompts[n]) + 1)
        unused = [each for each in NAMES if not self.cache.knows(each)]
        children = unused[:1] if self.rng.random() < 0.8 else self.rng.sample(NAMES, self.rng.randint(0, 2))
        known = self.cache.tokens(name)
        first = answer(self.prompts[name], 1, attention=self.attention)[0]  # the child answers as its parent does
        self.cache.fork(name, dict.fromkeys(children, first), max_running=self.rng.choice([None, 0, 1]))
        assert len(known) == len(self.prompts[name]) + 1
        self.prompts |= dict.fromkeys(children, self.prompts[name])

    def withdraw(self) -> None:
        self.cache.withdraw(self.name())

    def reset(self) -> None:
        self.cache.reset()

    def decoded(self) -> None:
        """Call `decoded` with more tokens than a log has room for."""
        self.cache.decoded(self.name(), [0] * self.rng.randint(16, 20))

    def old(self) -> None:
        """Pass a row to any call, at any moment and after its end."""
        step = self.rng.choice(self.steps or [self.unknown_step()])
        call = self.rng.choice([self.cache.issued, self.cache.plan_rows, lambda steps: self.cache.accept(steps, {})])
        if (
            call == self.cache.issued
            and (row := self.cache._admission.rows.get(step.row)) is not None
            and not row.issue
        ):
            return  # the row has not run
        if call == self.cache.plan_rows and step in self.allocated:
            return
        call([step] * self.rng.choice([1, 1, 2]))

    def some_plan(self, fits: Callable[[StepPlan], bool] = lambda plan: True) -> StepPlan:
        if not self.plans:
            raise ValueError("the host has no plan: nothing was asked of the cache")
        fitting = [plan for plan in self.plans[-6:] if fits(plan)]
        return self.rng.choice(fitting if fitting and self.rng.random() < 0.9 else self.plans[-6:])

    def unknown_step(self) -> SequenceStep:
        return SequenceStep("a", 99, 10**9, 0, 1, True, False, 0, 0, 0, (1,))

    def guesses(self, right: list[int], count: int) -> list[int]:
        return [token if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for token in right[:count]]

    def propose(self, name: str, position: int, count: int) -> list[int]:
        """Draft as a device does, from the position of the sequence."""
        guesses = self.guesses(self.right(name)[position - len(self.prompts[name]) :], count)
        return guesses + [0] * (count - len(guesses))

    def right(self, name: str) -> list[int]:
        return answer(self.prompts[name], ANSWER, attention=self.attention)

    # --- the end ---

    def finish(self) -> None:
        """Check that each remaining request gets the rest of the right answer, and that no block leaks."""
        cache = self.cache
        cache.cancel([row.step for row in list(cache._admission.rows.values())])
        cache.check()
        for name in [each for each in cache.request_ids if cache.runs(each)]:
            cache.preempt(name)
        for name in cache.request_ids:
            prompt, right = self.prompts[name], self.right(name)
            while (done := len(cache.tokens(name)) - len(prompt)) < ANSWER:
                assert list(cache.tokens(name)[len(prompt) :]) == right[:done]
                if not cache.runs(name):
                    found = cache.admit(name, kv_tokens=0 if self.keeps_kv else None)
                    assert isinstance(found, Hit), found
                progress = cache.progress(name)
                step = cache.allocate(name, max(progress.prefill_end - progress.computed, 1))
                assert step is not None
                plan = cache.plan([step])
                sampled = cache.runner.execute(plan, [int(step.samples)])
                cache.issued(plan.steps)
                cache.accept(plan.steps, {name: sampled[0]})
            cache.free(name, finished=True)
        cache.check_no_leak()
        cache.check_contents()


@st.composite
def hosts(draw: st.DrawFn) -> tuple[int, CacheConfig]:
    kind: dict[str, Any] = draw(
        st.sampled_from([{"num_kv_blocks": 0}, {"num_kv_blocks": 6}, {"num_kv_blocks": 20}, {"has_attention": False}])
    )
    config = CacheConfig(
        num_state_blocks=draw(st.sampled_from([6, 8, 30])),
        max_draft_tokens=draw(st.sampled_from([0, 3])),
        checkpoint_interval=draw(st.sampled_from([0, 64])),
        max_checkpoints=draw(st.sampled_from([None, None, 0, 2])),
        **kind,
    )
    return draw(st.integers(0, 1 << 30)), config


@mixes(200)
@given(hosts())
def test_any_illegal_host(host: tuple[int, CacheConfig]) -> None:
    IllegalHost(*host).run(200)


@pytest.mark.full
def test_an_illegal_host_makes_accepted_and_refused_moves() -> None:
    hosts = [
        IllegalHost(seed, CacheConfig(num_state_blocks=8, num_kv_blocks=20, max_draft_tokens=3)) for seed in range(30)
    ]
    for host in hosts:
        host.run(200)
    assert sum(host.refused for host in hosts) > 500 and sum(host.taken for host in hosts) > 1000
    assert sum(len(host.sampled) for host in hosts) > 300 and any("fork" in host.done for host in hosts)
