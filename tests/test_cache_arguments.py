"""Check that `PrefixCache` refuses bad arguments with one sentence and changes nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cache_calls import allocate, run_step, started
from mambacache.cache.prefix_cache import Hit, PrefixCache
from mambacache.plan import StepPlan
from symbolic import text
from watched_cache import all_free, refused, watched

TOO_BIG = 1 << 31


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    """Yield a cache: `prefills` lacks 150 prompt tokens, `decodes` has an answer token, `waits` was added."""
    cache = watched(max_draft_tokens=3)
    started(cache, "decodes", text(60))
    run_step(cache, "decodes", 60, 5)
    started(cache, "prefills", text(150, 1))
    cache.add("waits", text(30, 2))
    yield cache
    all_free(cache)


# --- prompts ---


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 0, 7], (3, 0, 7), array("q", [3, 0, 7]), np.array([3, 0, 7], dtype=np.uint8), [np.int64(3), 0, 7],
        torch.tensor([3, 0, 7]), torch.tensor([3, 0, 7], dtype=torch.int16), (token for token in [3, 0, 7]),
    ],
    ids=["list", "tuple", "array", "numpy", "list of numpy", "torch", "torch int16", "generator"],
)  # fmt: skip
def test_a_prompt_may_be_any_iterable_of_integers(tokens: Any) -> None:
    cache = watched()
    cache.add("a", tokens)
    assert cache.tokens("a") == array("i", [3, 0, 7])
    all_free(cache)


def test_a_range_and_the_largest_token_are_taken() -> None:
    cache = watched()
    cache.add("a", range(100))
    cache.add("b", [TOO_BIG - 1])
    assert list(cache.tokens("a")) == [*range(100)] and list(cache.tokens("b")) == [TOO_BIG - 1]
    all_free(cache)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "request 'a' has an empty prompt: give it at least one token"),
        (np.zeros(0, np.int32), "request 'a' has an empty prompt: give it at least one token"),
        ("words", "the prompt of request 'a' is of type str: give a sequence of token ids, which are integers"),
        (b"bytes", "the prompt of request 'a' is of type bytes: give a sequence of token ids, which are integers"),
        (bytearray(8), "the prompt of request 'a' is of type bytearray: give a sequence of token ids"),
        (memoryview(bytes(8)), "the prompt of request 'a' is of type memoryview: give a sequence of token ids"),
        ([1, -1], "the prompt of request 'a' holds what is no token id .*: give integers from 0 to 2147483647"),
        ([TOO_BIG], f"the prompt of request 'a' holds the token {TOO_BIG}: give integers from 0 to 2147483647"),
        ([1.0], "the prompt of request 'a' holds what is no token id"),
        (["1"], "the prompt of request 'a' holds what is no token id"),
        ([[1, 2]], "the prompt of request 'a' holds what is no token id"),
        (None, "the prompt of request 'a' holds what is no token id"),
        (7, "the prompt of request 'a' holds what is no token id"),
        (np.array([1.0]), "the prompt of request 'a' holds what is no token id"),
        (np.array(7), "the prompt of request 'a' holds what is no token id"),
        (torch.ones(2, 2, dtype=torch.int64), "the prompt of request 'a' holds what is no token id"),
        ([*range(1025)], "the prompt of request 'a' has 1025 tokens and the KV pool holds 1024: shorten it, or raise"),
    ],
)
def test_bad_prompts_are_refused(cache: PrefixCache, tokens: Any, message: str) -> None:
    with refused(cache, ValueError, message):
        cache.add("a", tokens)
    assert not cache.knows("a")


def test_a_prompt_may_fill_the_kv_pool_and_exceed_a_host_s_own() -> None:
    for options in ({"num_kv_blocks": 4}, {"num_kv_blocks": 0}, {"num_kv_blocks": 0, "has_attention": False}):
        cache = watched(**options)
        cache.add("a", text(256 if options.get("num_kv_blocks") else 5000))
        assert isinstance(cache.admit("a", kv_tokens=0), Hit)
        all_free(cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint_at": [64.0]}, "a position in checkpoint_at is 64.0: give an integer, 0 or more"),
        ({"checkpoint_at": [0, -64]}, "a position in checkpoint_at is -64: give an integer, 0 or more"),
        ({"checkpoint_at": [True]}, "a position in checkpoint_at is True: give an integer, 0 or more"),
        ({"checkpoint_at": "64"}, "a position in checkpoint_at is '6': give an integer, 0 or more"),
        ({"checkpoint_at": 64}, "checkpoint_at is 64: give"),
        ({"extra_keys": 5}, "extra_keys is 5: give"),
        ({"extra_keys": [5]}, r"extra_keys holds 5: give pairs \(position, key\)"),
        ({"extra_keys": [(5,)]}, r"extra_keys holds \(5,\): give pairs"),
        ({"extra_keys": [(5, "a", "b")]}, r"extra_keys holds \(5, 'a', 'b'\): give pairs"),
        ({"extra_keys": {5: "a"}}, "extra_keys holds 5: give pairs"),
        ({"extra_keys": "ab"}, "extra_keys holds 'a': give pairs"),
        ({"extra_keys": [("a", 5)]}, "a position in extra_keys is 'a': give an integer, 0 to 99"),
        ({"extra_keys": [(5.0, "a")]}, "a position in extra_keys is 5.0: give an integer, 0 to 99"),
        ({"extra_keys": [(-1, "a")]}, "a position in extra_keys is -1: give an integer, 0 to 99"),
        ({"extra_keys": [(0, "a"), (100, "a")]}, "a position in extra_keys is 100: give an integer, 0 to 99"),
    ],
)
def test_bad_options_of_a_prompt_are_refused(cache: PrefixCache, options: dict[str, Any], message: str) -> None:
    with refused(cache, ValueError, message):
        cache.add("a", text(100), **options)
    assert not cache.knows("a")


# --- numbers ---


def integers(*, below: int, above: int | None) -> list[Any]:
    """Return values that are no integers between `below` and `above`."""
    return [below, 1.5, float("nan"), True, "1", None, *([above] if above is not None else ())]


@pytest.mark.parametrize("value", [*integers(below=0, above=151), -5, 500])
def test_num_tokens_beyond_the_prompt_is_refused(cache: PrefixCache, value: Any) -> None:
    with refused(cache, ValueError, f"num_tokens is {value!r}: give an integer, 1 to 150"):
        cache.allocate("prefills", value)


@pytest.mark.parametrize("value", integers(below=0, above=2))
def test_num_tokens_of_a_decode_row_is_1(cache: PrefixCache, value: Any) -> None:
    with refused(cache, ValueError, f"num_tokens is {value!r}: give an integer, 1$"):
        cache.allocate("decodes", value)


@pytest.mark.parametrize("value", [*integers(below=0, above=None), -5])
def test_a_budget_below_1_is_refused(cache: PrefixCache, value: Any) -> None:
    for name in ("prefills", "decodes"):
        with refused(cache, ValueError, f"budget is {value!r}: give an integer, 1 or more"):
            cache.next_tokens(name, value)


@pytest.mark.parametrize("value", [-64, -1, 1.5, 64.0, True, "64"])
@pytest.mark.parametrize("bound", ["kv_tokens", "max_tokens"])
def test_bad_bounds_of_a_hit_are_refused(bound: str, value: Any) -> None:
    cache = watched(num_kv_blocks=0)
    cache.add("a", text(200))
    for ask in (cache.match, cache.admit):
        with refused(cache, ValueError, f"{bound} is {value!r}: give an integer, 0 or more"):
            ask("a", **{"kv_tokens": 0, bound: value})
    all_free(cache)


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_a_bad_max_running_is_refused(cache: PrefixCache, value: Any) -> None:
    with refused(cache, ValueError, f"max_running is {value!r}: give an integer, 0 or more"):
        cache.fork("decodes", {"b": 1}, max_running=value)


@pytest.mark.parametrize("value", [-1, 1.5, "1", None, TOO_BIG])
def test_bad_first_tokens_of_further_answers_are_refused(cache: PrefixCache, value: Any) -> None:
    with refused(cache, ValueError, f"the first token of request 'c' is {value!r}: give an integer, 0"):
        cache.fork("decodes", {"b": 1, "c": value})
    assert cache.runs("decodes") and not cache.knows("b")


def test_numpy_integers_are_taken_and_python_integers_come_back() -> None:
    cache = watched()
    started(cache, "a", text(200))
    run_step(cache, "a", 200, 1)
    cache.add("b", text(200), checkpoint_at=np.array([64]), extra_keys=[(np.int64(190), "image")])
    found = cache.admit("b", max_tokens=np.int64(64))
    assert isinstance(found, Hit) and found.num_tokens == 0  # the only cached state lies behind the image
    assert type(found.num_tokens) is int
    assert type(cache.next_tokens("b", np.int64(70))) is type(allocate(cache, "b", np.int64(64)).num_tokens) is int
    all_free(cache)


# --- drafts ---


@pytest.mark.parametrize(
    ("name", "drafts", "error", "message"),
    [
        (
            "decodes",
            [1, 2, 3, 4],
            ValueError,
            "request 'decodes' has 4 drafts: give 3 at most, or raise max_draft_tokens",
        ),
        (
            "decodes",
            [-2],
            ValueError,
            "the drafts of request 'decodes' holds what is no token id .*: give integers from 0",
        ),
        ("decodes", [1.0], ValueError, "the drafts of request 'decodes' holds what is no token id"),
        ("decodes", [TOO_BIG], ValueError, f"the drafts of request 'decodes' holds the token {TOO_BIG}"),
        ("decodes", "ab", ValueError, "the drafts of request 'decodes' is of type str: give a sequence of token ids"),
        ("prefills", [1], RuntimeError, "request 'prefills' does not know its last token yet: drafts come after it"),
    ],
)
def test_bad_drafts_are_refused(
    cache: PrefixCache, name: str, drafts: Any, error: type[Exception], message: str
) -> None:
    with refused(cache, error, message):
        cache.allocate(name, 1, drafts=drafts)


def test_drafts_before_the_last_token_is_known_are_refused(cache: PrefixCache) -> None:
    steps = cache.plan([allocate(cache, "decodes", 1)]).steps
    cache.issued(steps)
    with refused(cache, RuntimeError, "request 'decodes' does not know its last token yet: drafts come after it"):
        cache.allocate("decodes", 1, drafts=[1])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
@pytest.mark.parametrize("guesses", [[0], [7, 0]])
def test_drafts_and_answers_may_be_arrays(cache: PrefixCache, guesses: list[int], kind: Callable) -> None:
    step = cache.allocate("decodes", 1, drafts=kind(guesses))
    assert step is not None and step.drafts == tuple(guesses)
    steps = cache.plan([step]).steps
    cache.issued(steps)
    cache.accept(steps, {"decodes": kind([*guesses, 0])})
    assert list(cache.tokens("decodes")) == [*text(60), 5, *guesses, 0]


# --- answers ---


@pytest.mark.parametrize(
    ("drafts", "tokens", "message"),
    [
        ([], [1, 2], "request 'decodes' comes with 2 tokens: its row gives 1"),
        ([7], [7, 8, 9], "request 'decodes' comes with 3 tokens: its row gives 2"),
        (
            [7, 8],
            [7, 9, 1],
            r"request 'decodes' comes with tokens \[7, 9, 1\] for the drafts \[7, 8\]: give those that",
        ),
        ([], [-1], "the answer of request 'decodes' holds what is no token id .*: give integers from 0 to 2147483647"),
        ([], [1.5], "the answer of request 'decodes' holds what is no token id"),
        ([], [TOO_BIG], f"the answer of request 'decodes' holds the token {TOO_BIG}"),
        ([], b"ab", "the answer of request 'decodes' is of type bytes"),
    ],
)
def test_tokens_that_no_row_gives_are_refused(cache: PrefixCache, drafts: list[int], tokens: Any, message: str) -> None:
    plan = issue(cache, "decodes", 1, drafts)
    with refused(cache, ValueError, message):
        cache.accept(plan.steps, {"decodes": tokens})
    cache.accept(plan.steps, {"decodes": [9]})


def test_a_row_that_ends_inside_a_prompt_gives_no_token(cache: PrefixCache) -> None:
    plan = issue(cache, "prefills", 149)
    with refused(cache, ValueError, "request 'prefills' comes with 1 tokens: its row gives 0"):
        cache.accept(plan.steps, {"prefills": [1]})
    cache.accept(plan.steps, {})


def test_a_bad_answer_refuses_its_whole_step(cache: PrefixCache) -> None:
    plan = cache.plan([allocate(cache, "decodes", 1), allocate(cache, "prefills", 150)])
    cache.issued(plan.steps)
    with refused(cache, ValueError, "request 'prefills' comes with 2 tokens: its row gives 1"):
        cache.accept(plan.steps, {"decodes": [1], "prefills": [1, 2]})
    cache.accept(plan.steps, {"decodes": [1], "prefills": [1]})


def issue(cache: PrefixCache, name: str, num_tokens: int, drafts: Sequence[int] = ()) -> StepPlan:
    plan = cache.plan([allocate(cache, name, num_tokens, tuple(drafts))])
    cache.issued(plan.steps)
    return plan


# --- ids ---


@pytest.mark.parametrize(
    "call",
    [
        PrefixCache.match, PrefixCache.admit, PrefixCache.waits, PrefixCache.withdraw, PrefixCache.preempt,
        PrefixCache.progress, PrefixCache.tokens, PrefixCache.runs, PrefixCache.report,
        lambda cache, name: cache.free(name, finished=True), lambda cache, name: cache.next_tokens(name, 1),
        lambda cache, name: cache.allocate(name, 1), lambda cache, name: cache.fork(name, {"b": 1}),
    ],
)  # fmt: skip
def test_an_unknown_request_is_refused(cache: PrefixCache, call: Callable[[PrefixCache, str], object]) -> None:
    assert not cache.knows("nobody")
    with refused(cache, ValueError, "request 'nobody' is not known: add it first"):
        call(cache, "nobody")
