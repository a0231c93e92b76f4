"""Check that a request that fails, ends early or has bad logits costs no other request and leaves no bad block."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cache_calls import allocate, hit, make, run_step, started
from mambacache.cache import prefix_cache
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import SamplingParams
from mambacache.plan import NOT_FINITE, Transfer
from mambacache.report import Hit, Wait
from mambacache.scheduler.request import Request
from mambacache.scheduler.scheduler import Scheduler
from symbolic import text
from watched_cache import all_free, refused, under_way, view, watched

MARKS = (64, 128, 192)


# --- a step that fails after it was issued ---


@pytest.mark.parametrize("then", ["free", "preempt and free"])
@pytest.mark.parametrize("finished", [False, True])
def test_a_failed_step_leaves_nothing_of_a_freed_request(then: str, finished: bool) -> None:
    cache = watched()
    started(cache, "a", text(200), checkpoint_at=MARKS)  # type: ignore[arg-type]
    steps = under_way(cache, "issued")
    if then != "free":
        cache.preempt("a")
    cache.free("a", finished=finished)
    assert hit(cache, text(201)) == 192 and cache.under_way(steps[0])
    cache.cancel(steps)
    assert hit(cache, text(201)) == 0 and not cache.under_way(steps[0])
    all_free(cache)


def test_a_failed_step_leaves_nothing_of_a_request_that_the_step_before_ended() -> None:
    cache = watched()
    started(cache, "a", text(126))
    before = under_way(cache, "issued", 126)
    (step,) = cache.plan([allocate(cache, "a", 1)]).steps
    cache.issued([step])
    cache.accept(before, {"a": [5]})
    (behind,) = cache.plan([allocate(cache, "a", 1)]).steps
    cache.issued([behind])
    cache.accept([step], {"a": [6]})  # a stop token
    cache.free("a", finished=True)
    assert hit(cache, [*text(126), 5, 6, 7]) == 128
    cache.cancel([behind])
    assert hit(cache, [*text(126), 5, 6, 7]) == 64
    all_free(cache)


def test_requests_that_resumed_from_a_failed_step_of_a_freed_request_are_preempted() -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "issued")
    cache.free("a", finished=False)
    cache.add("b", text(250))
    assert isinstance(found := cache.admit("b"), Hit) and found.num_tokens == 192
    cache.cancel(steps)
    assert not cache.runs("b") and cache.admit("b").num_tokens == 0  # type: ignore[union-attr]
    all_free(cache)


def test_an_accepted_row_of_a_freed_request_is_forgotten_and_its_blocks_stay() -> None:
    cache = watched()
    started(cache, "a", text(200))
    steps = under_way(cache, "issued")
    cache.free("a", finished=False)
    cache.accept(steps, {})
    assert not cache.under_way(steps[0]) and not cache._admission.rows.freed
    cache.cancel(steps)  # too late: it was accepted
    assert hit(cache, text(201)) == 192
    all_free(cache)


def test_rows_of_freed_requests_are_bounded_where_a_host_never_accepts_them() -> None:
    cache = watched(num_state_blocks=3, num_log_slots=2)
    for i in range(100):
        cache.add("a", text(10, i))
        cache.admit("a")
        under_way(cache, "issued", 10)
        cache.free("a", finished=False)
    assert len(cache._admission.rows.freed) == 4 * (3 + 2)
    all_free(cache)


@pytest.mark.parametrize("ends", ["abort", "answer"])
def test_the_scheduler_tells_the_cache_of_a_failed_step_of_an_ended_request(ends: str) -> None:
    cache = make()
    scheduler = Scheduler(cache, max_num_batched_tokens=300, max_num_seqs=4)
    scheduler.add(Request("a", text(126), SamplingParams(max_tokens=3)))
    plans = [plan for _ in range(3) if (plan := scheduler.schedule()) is not None and not scheduler.issued(plan)]
    if ends == "answer":
        scheduler.requests["a"].params = SamplingParams(max_tokens=2)
        for plan, token in zip(plans[:2], (5, 6), strict=True):
            scheduler.update(plan, [[token]])
        del plans[:2]
    else:
        scheduler.abort("a")
    assert not scheduler.requests
    for plan in plans:
        scheduler.failed(plan, RuntimeError("the device failed"))
    assert hit(cache, [*text(126), 5, 6, 7]) == (64 if ends == "answer" else 0)
    assert not cache._admission.rows.freed and not cache._admission.rows


# --- logits that are NaN ---


@pytest.mark.parametrize("finite_before", [False, True])
def test_bad_logits_of_an_aborted_request_drop_the_blocks_behind_its_last_finite_logits(finite_before: bool) -> None:
    cache = watched()
    started(cache, "a", text(126))
    steps = under_way(cache, "issued", 126)
    if finite_before:
        cache.accept(steps, {"a": [5]})
        steps = [*under_way(cache, "accepted", 1, 6), *under_way(cache, "issued", 1)]
    prompt = [*text(126), 5, 6, 7]
    cache.free("a", finished=False)
    cache.accept(steps, {}, not_finite=["a"])
    assert hit(cache, prompt) == (64 if finite_before else 0)
    all_free(cache)


def test_the_scheduler_tells_the_cache_of_bad_logits_of_an_aborted_request() -> None:
    cache = make()
    scheduler = Scheduler(cache, max_num_batched_tokens=300, max_num_seqs=4)
    for name, seed in (("a", 0), ("b", 1)):
        scheduler.add(Request(name, text(200, seed), SamplingParams(max_tokens=3)))
    plans = [plan for _ in range(2) if (plan := scheduler.schedule()) is not None and not scheduler.issued(plan)]
    scheduler.abort("a")
    for plan in plans:
        scheduler.update(plan, [[NOT_FINITE if step.request_id == "a" else 5] * step.samples for step in plan.steps])
    assert (hit(cache, text(201)), hit(cache, text(201, 1))) == (0, 192)


def test_bad_logits_after_a_hit_leave_the_blocks_of_others() -> None:
    cache = watched()
    started(cache, "a", text(130), checkpoint_at=MARKS)  # type: ignore[arg-type]
    under_way(cache, "accepted", 130)
    started(cache, "b", text(260), checkpoint_at=(64, 128, 192, 256))  # type: ignore[arg-type]
    step = allocate(cache, "b", 260 - 128)
    cache.plan([step])
    cache.issued([step])
    assert hit(cache, text(300)) == 256
    assert [block.state > 0 for block in cache.suspects("b")] == [True, True]
    cache.free("b", finished=False, wrong_from=0)
    assert hit(cache, text(300)) == 128, "a's blocks stay, b's blocks are gone"
    all_free(cache)


def test_a_request_with_bad_logits_that_runs_on_stores_nothing_more() -> None:
    cache = watched()
    started(cache, "a", text(126))
    run_step(cache, "a", 126, 5)
    assert cache.progress("a").proven == 126
    steps = under_way(cache, "issued", 1)
    cache.accept(steps, {"a": [0]}, not_finite=["a"])
    assert cache.progress("a").proven == 126
    for _ in range(70):
        steps = under_way(cache, "accepted", 1, 0)
    assert hit(cache, [*text(126), 5, *[0] * 80]) == 64
    all_free(cache)


def test_a_hit_is_no_suspect_once_finite_logits_followed_it() -> None:
    cache = watched()
    started(cache, "a", text(130))
    run_step(cache, "a", 130, 1)
    started(cache, "b", text(200))
    size = len(cache.suspects("b"))
    run_step(cache, "b", 72, 1)
    assert size == 2 and cache.suspects("b") == cache.suspects("a") == []
    all_free(cache)


def test_invalidated_blocks_are_not_hit() -> None:
    cache = watched()
    started(cache, "a", text(200), checkpoint_at=MARKS)  # type: ignore[arg-type]
    run_step(cache, "a", 200, 1)
    started(cache, "b", text(200))
    deepest, middle, first = cache.suspects("b")
    assert deepest._replace(state=0).page == deepest.page > 0
    cache.invalidate([middle.block_hash])
    assert hit(cache, text(200)) == 64 and cache.suspects("b") == [deepest, first]
    cache.invalidate([first.block_hash, b"unknown"])
    assert hit(cache, text(200)) == 0
    all_free(cache)


def test_bad_logits_of_a_request_end_no_transfer_of_another() -> None:
    room = {"num_host_states": 8, "num_host_pages": 16, "num_state_blocks": 4, "num_kv_blocks": 14}
    cache = watched(**room)
    for name in "ab":
        started(cache, name, text(130, ord(name)))
        run_step(cache, name, 130, 1)
        cache.free(name, finished=True)
    moving = _until_moving(cache)
    started(cache, "bad", text(130, 7))
    run_step(cache, "bad", 130)
    cache.free("bad", finished=False, wrong_from=0)
    for transfer in moving:
        cache.transferred(transfer)
    host = cache.stats.host_states["committed"], cache.stats.host_pages["committed"]
    assert host == (sum(len(t.states) for t in moving), sum(len(t.pages) for t in moving)) and any(host)
    all_free(cache)


def _until_moving(cache: PrefixCache) -> tuple[Transfer, ...]:
    for seed in range(20, 40):
        if moving := cache.transfers():
            return moving
        started(cache, "more", text(130, seed))
        run_step(cache, "more", 130, 1)
        cache.free("more", finished=True)
    raise AssertionError("nothing is copied to the host")


# --- pages that others wrote ---


@pytest.mark.parametrize("decode", [False, True])
def test_no_row_writes_into_a_page_of_others(decode: bool) -> None:
    """All pages of the prompt are cached, but not its last state. The prompt resumes before its last page."""
    cache = watched()
    started(cache, "a", text(128), checkpoint_at=(64,))  # type: ignore[arg-type]
    run_step(cache, "a", 128, 1)
    cache.add("b", text(128))
    assert cache.admit("b").num_tokens == 64  # type: ignore[union-attr]
    run_step(cache, "b", 63)
    step = cache.allocate("b", 1, decode=decode)
    assert step is not None and step.prefill is not decode
    plan = cache.plan([step])
    assert plan.arrays["kv_slot"].tolist() == [-1] and plan.arrays["kv_len"].tolist() == [128]
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"b": [1]})
    plan = run_step(cache, "b", 1, 2)
    assert plan.arrays["kv_slot"][0] >= 0, "the next token has a page of its own"
    all_free(cache)


# --- waits ---


def test_a_request_waits_while_the_kv_before_a_cached_state_is_computed() -> None:
    """The state at 128 is cached. Another request computes the KV before it."""
    cache = make(num_kv_blocks=8)
    started(cache, "a", text(129))
    run_step(cache, "a", 129, 1)
    cache.free("a", finished=True)
    page = cache._admission.pages.pool
    first = next(event.block_hash for event in cache.take_events() if event.kind == "kv" and event.num_tokens == 64)
    page.drop(first)  # an eviction that the state survives
    assert cache._admission.pool.num_committed == 1
    started(cache, "writer", text(200))
    cache.add("b", text(150))
    for _ in range(3):
        assert isinstance(wait := cache.admit("b"), Wait) and wait.reason == "prefix"
        assert cache.waits("b"), "a host would ask again in every step"
    run_step(cache, "writer", 200, 1)
    assert not cache.waits("b") and cache.admit("b").num_tokens == 128  # type: ignore[union-attr]


def test_a_request_waits_where_the_host_s_kv_ends_before_a_cached_state() -> None:
    cache = make(num_kv_blocks=0)
    for name in ("a", "writer"):
        cache.add(name, text(200), checkpoint_at=MARKS)
        cache.admit(name, kv_tokens=0)
        if name == "a":
            run_step(cache, name, 200, 1)
            cache.free(name, finished=True)
    cache.add("b", text(200))
    assert isinstance(cache.admit("b", kv_tokens=0), Wait) and cache.waits("b")
    run_step(cache, "writer", 200, 1)
    assert not cache.waits("b") and cache.admit("b", kv_tokens=192).num_tokens == 192  # type: ignore[union-attr]


# --- arguments ---


class Hostile:
    """Raise on every use."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of a hostile argument")

    def __bool__(self) -> bool:
        raise RuntimeError("the truth of a hostile argument")

    def __len__(self) -> int:
        raise RuntimeError("the length of a hostile argument")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("the items of a hostile argument")

    def __index__(self) -> int:
        raise RuntimeError("the value of a hostile argument")

    __hash__ = None  # type: ignore[assignment]


def _breaks_off() -> Iterator[Any]:
    yield b"x"
    raise RuntimeError("a generator broke off")


BAD: list[Callable[[], Any]] = [
    lambda: None, lambda: -65, lambda: 1.5, lambda: 1 << 70, lambda: "x", lambda: b"x", lambda: object(), lambda: [],
    lambda: {}, lambda: np.zeros(3), lambda: [[1]], lambda: [None], lambda: {"a": None}, lambda: {"a": [None]},
    lambda: np.zeros((2, 2)), lambda: float("nan"), lambda: (1, 2, 3), lambda: _breaks_off(), Hostile,
]  # fmt: skip

CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "add",
        dict(request_id="new", token_ids=[1], salt="", extra_keys=(), checkpoint_at=(), read=True, store=True),
    ),
    ("match", {"request_id": "waits", "kv_tokens": None, "max_tokens": None}),
    ("admit", {"request_id": "waits", "kv_tokens": None, "max_tokens": None}),
    ("waits", {"request_id": "waits"}),
    ("withdraw", {"request_id": "prefills"}),
    ("fork", {"request_id": "decodes", "children": {"child": 1}, "max_running": None}),
    ("preempt", {"request_id": "decodes"}),
    ("free", {"request_id": "decodes", "finished": False, "wrong_from": None}),
    ("suspects", {"request_id": "decodes"}),
    ("invalidate", {"hashes": []}),
    ("progress", {"request_id": "decodes"}),
    ("next_tokens", {"request_id": "prefills", "budget": 64}),
    ("allocate", {"request_id": "decodes", "num_tokens": 1, "drafts": (), "parents": (), "decode": False}),
    ("drop", {"step": None}),
    ("plan_rows", {"steps": None}),
    ("plan", {"steps": None}),
    ("issued", {"steps": None}),
    ("accept", {"steps": None, "token_ids": {}, "not_finite": ()}),
    ("decoded", {"request_id": "decodes", "token_ids": [1]}),
    ("under_way", {"step": None}),
    ("is_live", {"step": None}),
    ("cancel", {"steps": None}),
    ("transfers", {"flush": False}),
    ("transferred", {"transfer": None, "failed": False}),
    ("knows", {"request_id": "decodes"}),
    ("tokens", {"request_id": "decodes"}),
    ("runs", {"request_id": "decodes"}),
    ("report", {"request_id": "decodes"}),
    ("kv_evicted", {"hashes": []}),
    ("kv_stored", {"hashes": []}),
    ("kv_released", {"request_id": "decodes", "pages": {1: 64}}),
    ("kv_unused", {"pages": [1]}),
    ("kv_used", {"page": 1}),
    ("kv_dropped", {"pages": [1]}),
    ("evict_kv", {"count": 1}),
]  # fmt: skip


def test_every_public_method_with_arguments_is_listed() -> None:
    public = {name for name, each in vars(PrefixCache).items() if not name.startswith("_") and callable(each)}
    assert public - {name for name, _ in CALLS} == {"abandon", "reset", "take_events", "check"}


@pytest.mark.parametrize(("name", "argument"), [(name, each) for name, given in CALLS for each in given])
def test_a_bad_argument_changes_nothing(name: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that raises changes nothing, and no call empties the cache."""

    def rebuilt(*_: Any) -> None:
        raise AssertionError("the cache rebuilt its records")

    monkeypatch.setattr(prefix_cache, "mend", rebuilt)
    for bad in BAD:
        cache = make(max_draft_tokens=3, num_host_states=2, num_host_pages=4)
        started(cache, "decodes", text(130))
        run_step(cache, "decodes", 130, 5)
        started(cache, "prefills", text(150, 1))
        cache.add("waits", text(30, 2))
        steps = [allocate(cache, "prefills", 100)]
        given = dict(next(given for call, given in CALLS if call == name))
        for key in given.keys() & {"step", "steps"}:
            given[key] = steps[0] if key == "step" else steps
        before = view(cache)
        try:
            getattr(cache, name)(**{**given, argument: bad()})
        except Exception:
            assert view(cache) == before
        cache.check()
        if name not in ("free", "cancel", "invalidate"):
            assert hit(cache, text(131)) == 128


@pytest.mark.parametrize("value", [-65, -1, 132, 1.5, "0", True, np.zeros(2)])
def test_bad_values_of_wrong_from_are_refused(value: Any) -> None:
    cache = watched()
    started(cache, "a", text(130))
    run_step(cache, "a", 130, 5)
    with refused(cache, ValueError, "wrong_from is .*: give an integer, 0 to 131"):
        cache.free("a", finished=False, wrong_from=value)
    all_free(cache)


@pytest.mark.parametrize("method", ["kv_evicted", "kv_stored", "invalidate"])
@pytest.mark.parametrize("hashes", [[[1]], ["text"], [None], [array("B", b"12")], 5])
def test_hashes_that_are_no_bytes_are_refused(method: str, hashes: Any) -> None:
    cache = watched()
    with refused(cache, ValueError, "hashes"):
        getattr(cache, method)(hashes)


@pytest.mark.parametrize("key", [np.arange(5000), 1.5, None, [1], {"a": 1}, True, ("a", np.arange(5000)), ("a", 0.5)])
def test_keys_of_types_with_a_lossy_repr_are_refused(key: Any) -> None:
    cache = watched()
    with refused(cache, ValueError, "a key in extra_keys is of type .*: give a str, bytes, an int, or a tuple"):
        cache.add("a", text(100), extra_keys=[(5, key)])


@pytest.mark.parametrize("keys", [("a", b"a"), (1, "1"), (("a", "b"), ("ab",)), ("x" * 5000 + "1", "x" * 5000 + "2")])
def test_different_keys_share_nothing(keys: tuple[Any, Any]) -> None:
    cache = watched()
    for key, found in zip((*keys, *keys), (0, 0, 64, 64), strict=True):
        cache.add("a", text(100), extra_keys=[(5, key)])
        assert cache.admit("a").num_tokens == found  # type: ignore[union-attr]
        under_way(cache, "accepted", 100 - found)
        cache.free("a", finished=True)
    all_free(cache)
