"""Plant mistakes in a plan's arrays: each makes the symbolic runner raise, or gives other tokens.

The driver sees faults of the cache that change no token: lost hits, states that are not stored, prompts without room.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mambacache.cache.lookup import Found, Lookup
from mambacache.cache.pages import Pages
from mambacache.cache.requests import Residency
from mambacache.cache.retention import Policy
from mambacache.cache.states import States
from mambacache.plan import StepPlan
from selection import some
from symbolic import answer, text
from symbolic_driver import Driver, Job, Mix

Change = Callable[[dict[str, np.ndarray]], None]


def change(
    name: str, how: Callable[[np.ndarray], Any], when: Callable[[np.ndarray], bool] = lambda a: len(a) > 0
) -> Change:
    def planted(arrays: dict[str, np.ndarray]) -> None:
        if when(arrays[name]):
            arrays[name] = np.asarray(how(arrays[name].copy()), dtype=np.int32)

    return planted


def chunk_dst_one_early(arrays: dict[str, np.ndarray]) -> None:
    dst = arrays["chunk_dst"]
    for i in range(1, len(dst) - 1):
        if dst[i] and not dst[i - 1]:
            dst[i - 1], dst[i] = dst[i], 0


CHANGES = {
    "no change": None,
    "src of another row": change("src", lambda a: np.roll(a, 1), lambda a: len(set(a.tolist())) > 1),
    "fresh src": change("src", np.zeros_like),
    "src off by one": change("src", lambda a: a + (a > 0)),
    "decode src of another row": change("decode_src", lambda a: np.roll(a, 1), lambda a: len(a) > 1),
    "log of another row": change("log_slot", lambda a: np.roll(a, 1), lambda a: len(a) > 1),
    "log from one entry later": change("log_start", lambda a: a + 1),
    "log from entry 0": change("log_start", np.zeros_like),
    "log that is one entry longer": change("log_end", lambda a: a + 1),
    "log without its last entry": change("log_end", lambda a: a - 1),
    "one token more": change("decode_len", lambda a: a + 1),
    "one token fewer": change("decode_len", lambda a: a - 1),
    "dst of another row": change("decode_dst", lambda a: np.roll(a, 1), lambda a: len(set(a.tolist())) > 1),
    "no fold": change("decode_dst", np.zeros_like),
    "fold into the state that is read": change("decode_dst", lambda a: np.where(a > 0, a - 1, a)),
    "checkpoint one chunk early": chunk_dst_one_early,
    "slots of the next token": change("kv_slot", lambda a: np.where(a >= 0, a + 1, a)),
    "shared slots written": change("kv_slot", lambda a: np.where(a < 0, a.max() + 1, a), lambda a: bool((a < 0).any())),
    "slots not written": change("kv_slot", lambda a: np.full_like(a, -1)),
    "pages of another row": change("block_table_start", lambda a: np.append(0, a[:-1]), lambda a: len(a) > 2),
    "first page of another row": change("block_table", lambda a: np.roll(a, 1), lambda a: len(a) > 1),
    "one token of KV missing": change("kv_len", lambda a: a - 1),
    "another token": change("tokens", lambda a: (a + 1) % 40),
    "positions from 0": change("positions", lambda a: a - a.min()),
    "logits of the token before": change("logits_index", lambda a: np.maximum(a - 1, 0)),
}  # fmt: skip


def traffic(planted: Change | None) -> None:
    first = text(120)
    turn = first + answer(first, 40, attention=True) + text(30, 3)
    second = text(100) + text(150, 1)
    jobs = [Job(first, 40), Job(second, 30), Job(turn, 20, arrives=25), Job(second + text(40, 4), 5, arrives=25)]
    cache = {"num_state_blocks": 40, "num_kv_blocks": 40, "max_draft_tokens": 3}
    d = Driver(Mix(jobs, budget=300, draft_errors=4, cache=cache))
    execute = d.cache.runner.execute

    def with_mistake(plan: StepPlan, *args: Any, **options: Any) -> list[list[int]]:
        arrays = dict(plan.arrays)
        if planted is not None:
            planted(arrays)
        return execute(replace(plan, arrays=arrays), *args, **options)

    d.cache.runner.execute = with_mistake  # type: ignore[method-assign]
    d.run()


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_mistake_is_seen(name: str) -> None:
    if CHANGES[name] is None:
        traffic(None)
        return
    with pytest.raises((AssertionError, IndexError)):
        traffic(CHANGES[name])


# --- faults that change no token ---

find, coverage, wishes, begin, end = Lookup.find, Pages.coverage, Policy.wishes, States.begin, States.end


def hit_of_the_block_before(lookup: Lookup, chain: list[bytes], limit: int, *args: Any, **options: Any) -> Found:
    return find(lookup, chain, max(limit - 1, 0), *args, **options)


def hit_of_the_state_before(lookup: Lookup, chain: list[bytes], *args: Any, **options: Any) -> Found:
    found = find(lookup, chain, *args, **options)
    shallower = [depth for depth in range(1, found.hit) if lookup.usable(chain[depth])]
    return replace(found, hit=max(shallower, default=0))


def without_reserve(states: States, residency: Residency, hit_block: int) -> None:
    begin(states, residency, hit_block)
    if residency.reserve is not None:
        residency.reserve.end()
        residency.reserve = None


def states_go_with_their_request(states: States, residency: Residency, finished: bool) -> None:
    end(states, residency, finished)
    for block_hash in residency.request.chain[1:]:
        states._pool.drop(block_hash)


def wishes_without(**lost: Any) -> Callable[..., Any]:
    """Return `Policy.wishes` with some of its arguments replaced."""

    def planted(policy: Policy, named: Any, marks: Any, junction: int, lengths: Any) -> Any:
        given = {"named": named, "marks": marks, "junction": junction, "lengths": lengths}
        return wishes(policy, **given | lost)

    return planted


def one_page_is_forgotten(pages: Pages, residency: Residency) -> int:
    return max(pages._blocks(residency.prefill_end) - len(residency.pages) - 1, 0)


FAULTS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "no fault": (Lookup, "find", find),
    "one block too shallow": (Lookup, "find", hit_of_the_block_before),
    "the state before the deepest": (Lookup, "find", hit_of_the_state_before),
    "no junction is told": (Lookup, "find", lambda *args, **kw: replace(find(*args, **kw), junction=0)),
    "near states under strict_reuse": (
        Lookup, "usable", lambda lookup, block_hash: lookup._states.lookup(block_hash) is not None,
    ),
    "near pages under strict_reuse": (Pages, "coverage", lambda pages, chain, strict: coverage(pages, chain, False)),
    "no look at pages": (Pages, "has_room", lambda *args: True),
    "one page is forgotten": (Pages, "_lack", one_page_is_forgotten),
    "never much room": (Pages, "has_room", lambda pages, chain, covered, length: pages.pool.num_available > 10),
    "no block for the running state": (States, "begin", without_reserve),
    "no state at a junction": (Policy, "wishes", wishes_without(junction=0)),
    "no state at a tail": (Policy, "wishes", wishes_without(lengths=(1,))),
    "no state at a mark": (Policy, "wishes", wishes_without(named=(), marks=frozenset())),
    "no state for who waits": (Policy, "promise", lambda *args: None),
    "states go with their request": (States, "end", states_go_with_their_request),
}  # fmt: skip


def crowd(seed: int) -> Mix:
    """Return prompts that branch at many places, in roomy or tight pools."""
    rng, attention = random.Random(seed), seed % 4 > 0
    stems, jobs = [text(400, stem) for stem in range(2)], list[Job]()
    for number in range(12):
        prompt = rng.choice(stems)[: rng.choice([100, 150, 200, 300])] + text(rng.randint(1, 80), number)
        marks = (rng.choice([64, 192]),)
        if jobs and rng.random() < 0.4:  # the next turn of a chat
            before = rng.choice(jobs)
            prompt = before.prompt + answer(before.prompt, before.max_tokens, attention=attention) + text(30, number)
        jobs.append(Job(prompt, rng.choice([2, 70]), arrives=rng.choice([0, 30, 60]), marks=marks))
    cache = {
        "num_state_blocks": rng.choice([6, 40]), "num_kv_blocks": rng.choice([16, 18, 60]) * attention,
        "has_attention": attention, "strict_reuse": rng.random() < 0.5,
    }  # fmt: skip
    return Mix([job for job in jobs if len(job.prompt) < 800], budget=rng.choice([150, 600]), cache=cache)


@pytest.mark.parametrize("name", some(3, FAULTS))
def test_a_fault_that_changes_no_token_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, fault = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault)
    with nullcontext() if name == "no fault" else pytest.raises(AssertionError):
        for seed in range(50):
            Driver(crowd(seed)).run()
