"""Check that `decoded` leaves the same cache as rows do. It takes tokens that only went to token logs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import pytest

from cache_calls import run_step, started
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.plan import FOLD
from mambacache.report import Hit
from symbolic import text
from watched_cache import all_free, refused, under_way, view, watched


def host(**options: Any) -> PrefixCache:
    """Return a cache for a host that keeps its own KV, if it has any."""
    return watched(num_kv_blocks=0, has_attention=False, **options)


def decode(cache: PrefixCache, name: str, answer: list[int], at_once: Callable[[int], int]) -> None:
    """Give these tokens; `at_once` maps the room before the next fold to a number of tokens for `decoded`."""
    while answer:
        room = FOLD - 1 - cache.progress(name).computed % FOLD
        count = min(at_once(room), room, len(answer))
        if count:
            cache.decoded(name, answer[:count])
            del answer[:count]
        else:
            run_step(cache, name, 1, answer.pop(0))


@pytest.mark.parametrize("seed", range(20))
def test_decoded_leaves_the_same_cache_as_single_rows(seed: int) -> None:
    rng, views, events = random.Random(seed), [], []
    lengths = {name: (rng.choice([1, 50, 64, 200]), rng.randrange(1, 150)) for name in "abc"}
    finished = {name: rng.random() < 0.5 for name in lengths}
    for at_once in (lambda room: 0, lambda room: room, lambda room: rng.randrange(room + 1)):
        cache, seen = host(num_state_blocks=8, checkpoint_interval=128), []
        for number, (name, (prompt, answer)) in enumerate(lengths.items()):
            started(cache, name, text(prompt, number % 2))
            run_step(cache, name, prompt - cache.progress(name).computed, 5)
            run_step(cache, name, 1, 6)
            decode(cache, name, text(answer, 3 + number), at_once)
            seen.append(view(cache))
            cache.free(name, finished=finished[name])
        for number, (prompt, answer) in enumerate(lengths.values()):
            cache.add("next", [*text(prompt, number % 2), 5, 6, *text(answer, 3 + number), 1])
            seen.append(cache.match("next"))
            cache.free("next", finished=False)
        events.append(cache.take_events())
        views.append(seen)
        all_free(cache)
    assert views[1] == views[0] == views[2] and events[1] == events[0] == events[2]


class Interrupt:
    """Raises KeyboardInterrupt once, at the line of mambacache with the number `lines`."""

    def __init__(self, lines: int) -> None:
        self.lines = lines

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and "/mambacache/" in frame.f_code.co_filename:
            self.lines -= 1
            if self.lines == 0:
                raise KeyboardInterrupt
        return self

    def during(self, call: Callable[[], object]) -> bool:
        """Call, and return whether the line was reached."""
        sys.settrace(self)
        with suppress(KeyboardInterrupt):
            call()
        sys.settrace(None)
        return self.lines <= 0


def test_an_interrupt_on_any_line_leaves_all_tokens_or_none() -> None:
    for after in count(1):
        cache = decoding()
        run_step(cache, "a", 1, 2)
        known = list(cache.tokens("a"))
        reached = Interrupt(after).during(partial(PrefixCache.decoded, cache, "a", [3, 4, 5]))
        now = list(cache.tokens("a"))
        assert now in (known, [*known, 3, 4, 5])
        assert cache.runs("a") or isinstance(cache.admit("a"), Hit)
        run_step(cache, "a", len(now) - cache.progress("a").computed, 6)
        assert list(cache.tokens("a")) == [*now, 6]
        all_free(cache)
        if not reached:
            break
    assert after > 30


def test_an_interrupt_on_any_line_of_a_rebuild_loses_no_row() -> None:
    for after in count(1):
        cache = watched()
        for name in "ab":
            started(cache, name, text(200, ord(name)))
        steps = under_way(cache, "issued", 200)
        allocated = cache.allocate("b", 100)
        cache._admission.torn = True
        issued = cache._kept.states.num_issued
        reached = Interrupt(after).during(partial(getattr, cache, "_admission"))
        assert len(cache._admission.requests["a"].issued) == 1 and cache._kept.states.num_issued == issued > 0
        cache.accept(steps, {"a": [7]})
        assert list(cache.tokens("a"))[200:] == [7] and not cache._admission.rows
        with pytest.raises(RuntimeError, match="cancel its step"):
            cache.plan([allocated])
        cache.check()
        if not reached:
            break
    assert after > 100


def decoding() -> PrefixCache:
    cache = host()
    started(cache, "a", text(64))
    run_step(cache, "a", 64, 1)
    return cache


def test_bad_calls_of_decoded_are_refused() -> None:
    cache = decoding()
    with refused(cache, RuntimeError, "request 'a' has a row under way, or decodes not yet: only what follows is"):
        cache.decoded("a", [2])
    run_step(cache, "a", 1, 2)
    for tokens in ([3] * FOLD, [3] * (FOLD - 1)):
        with refused(cache, ValueError, "request 'a' needs a block or a page for these tokens: allocate their rows"):
            cache.decoded("a", tokens)
    with refused(cache, ValueError, "tokens of request 'a'"):
        cache.decoded("a", [3, -1])
    with refused(cache, ValueError, "request 'b' is not known: add it first"):
        cache.decoded("b", [3])
    for moment in ("allocated", "planned", "issued"):
        steps = under_way(cache, moment, 1)
        with refused(cache, RuntimeError, "request 'a' has a row under way"):
            cache.decoded("a", [3])
        cache.cancel(steps) if moment == "issued" else cache.drop(steps[0])
    with refused(cache, RuntimeError, "request 'a' does not run: admit it first"):
        cache.decoded("a", [3])
    all_free(cache)


def test_log_entries_of_a_tree_need_a_row_that_moves_them() -> None:
    cache = host(max_draft_tokens=4)
    started(cache, "a", text(64))
    run_step(cache, "a", 64, 1)
    run_step(cache, "a", 1, 2)
    step = cache.allocate("a", 1, drafts=(5, 6, 7), parents=(0, 0, 2))
    assert step is not None
    steps = cache.plan([step]).steps
    cache.issued(steps)
    cache.accept(steps, {"a": [6, 7, 8]})
    with refused(cache, RuntimeError, "request 'a' has a row under way, or decodes not yet"):
        cache.decoded("a", [9])
    assert run_step(cache, "a", 1, 9).log_paths.any()
    cache.decoded("a", [10])
    all_free(cache)


def test_the_last_token_of_a_prompt_needs_a_row() -> None:
    """The row of the last prompt token folds wherever it begins. A dropped row may have left its log slot."""
    cache = host()
    started(cache, "a", text(65))
    run_step(cache, "a", 64)
    step = cache.allocate("a", 1, decode=True)
    assert step is not None and step.log_slot
    cache.drop(step)
    with refused(cache, RuntimeError, "request 'a' has a row under way, or decodes not yet"):
        cache.decoded("a", [3])
    all_free(cache)


def test_a_cache_with_kv_pages_needs_rows() -> None:
    cache = watched()
    started(cache, "a", text(64))
    run_step(cache, "a", 64, 1)
    run_step(cache, "a", 1, 2)
    with refused(cache, ValueError, "request 'a' needs a block or a page for these tokens"):
        cache.decoded("a", [3])
    all_free(cache)
