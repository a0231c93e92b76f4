"""Check rows with a tree of drafts: accepted drafts, entries to move before the next row, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cache_calls import allocate, hit, make, run_step, started
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.plan import PLACEHOLDER, SequenceStep, StepPlan
from symbolic import answer, text
from symbolic_driver import Driver, Job, Mix

DRAFTS, PARENTS = (11, 12, 13, 21, 22, 31), (0, 1, 2, 1, 4, 0)  # 11 (12 13) (21 22), 31


def decoding(prompt: int, **options: int) -> PrefixCache:
    cache = make(**{"max_draft_tokens": 7, **options})
    started(cache, "a", text(prompt))
    run_step(cache, "a", prompt, sampled=10)
    return cache


def tree(cache: PrefixCache, parents: tuple[int, ...] = PARENTS) -> StepPlan:
    step = cache.allocate("a", 1, drafts=DRAFTS, parents=parents)
    assert step is not None
    return cache.plan([step])


@pytest.mark.parametrize(
    ("tokens", "kept"),
    [
        ([40], ()),
        ([11, 40], ()),
        ([11, 12, 13, 40], ()),
        ([11, 21, 40], (4,)),
        ([11, 21, 22, 40], (4, 5)),
        ([31, 40], (6,)),
    ],
)
def test_the_next_row_moves_the_accepted_entries(tokens: list[int], kept: tuple[int, ...]) -> None:
    cache = decoding(20)
    plan = tree(cache)
    assert plan.arrays["ancestors"].tolist() == [1, 0b11, 0b111, 0b1111, 0b10011, 0b110011, 0b1000001]
    assert plan.arrays["positions"].tolist() == [20, 21, 22, 23, 22, 23, 21]
    page = plan.arrays["block_table"][0]
    assert plan.arrays["kv_slot"].tolist() == [page * 64 + 20 + i for i in range(7)]
    assert plan.log_paths is None and plan.kv_paths is None
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": tokens})
    for _ in range(2):  # a dropped row moves nothing
        step = allocate(cache, "a", 1)
        assert (step.start, step.kept) == (20 + len(tokens), tuple(20 + place for place in kept))
        plan = cache.plan([step])
        if kept:
            first = len(tokens) - len(kept)
            rest = [-1] * (7 - len(kept))
            assert plan.log_paths.tolist() == [[step.log_slot, 4 + first, *(4 + place for place in kept), *rest]]
            assert plan.kv_paths.tolist() == [[page, 20 + first, *(20 + place for place in kept), *rest]]
        else:
            assert plan.log_paths is None and plan.kv_paths is None
        cache.drop(step)
    plan = cache.plan([allocate(cache, "a", 1)])
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [3]})
    assert allocate(cache, "a", 1).kept == ()
    cache.free("a", finished=True)
    cache.check()


@pytest.mark.parametrize("start", range(16, 33))
def test_a_tree_ends_before_its_log(start: int) -> None:
    """A tree takes one token less than its room, and so never folds. A short rest may be a chain."""
    (step,) = tree(decoding(start)).steps
    room = max(14 - start % 16, 0)
    assert step.drafts == DRAFTS[:room]
    assert step.parents == (PARENTS[:room] if room > 3 else ())
    assert bool(step.dst) == (start % 16 == 15)


def test_parents_may_describe_a_chain() -> None:
    (step,) = tree(decoding(20), (0, 1, 2, 3, 4, 5)).steps
    assert step.drafts == DRAFTS and step.parents == ()


def test_a_tree_takes_no_more_blocks_than_a_row_without_drafts() -> None:
    cache = decoding(20)
    before = cache.stats.state_blocks
    tree(cache)
    assert cache.stats.state_blocks == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafts": (1, 2), "parents": (0,)}, "has 2 drafts and 1 parents"),
        ({"drafts": (), "parents": (0,)}, "has 0 drafts and 1 parents"),
        ({"drafts": (1, PLACEHOLDER), "parents": (0, 0)}, "none of them a placeholder"),
        ({"drafts": (1, 2, 3), "parents": (0, 2, 0)}, "parent 2 of request 'a' is 2"),
        ({"drafts": (1, 2), "parents": (-1, 0)}, "parent 1 of request 'a' is -1"),
        ({"drafts": (1, 2, 3, 4), "parents": (0, 1, 0, 2)}, "not in preorder"),
        ({"drafts": (1,) * 8, "parents": (0,) * 8}, "give 7 at most"),
    ],
)
def test_bad_trees_are_refused(options: dict[str, Any], message: str) -> None:
    cache = decoding(20)
    with pytest.raises(ValueError, match=message):
        cache.allocate("a", 1, **options)
    cache.check()
    assert tree(cache).steps[0].parents == PARENTS


def test_tokens_that_leave_the_tree_are_refused() -> None:
    cache = decoding(20)
    plan = tree(cache)
    cache.issued(plan.steps)
    for wrong in ([12, 40], [11, 22, 40], [11, 12, 13, 40, 41], [31, 11, 1]):
        with pytest.raises(ValueError, match="give those that agree"):
            cache.accept(plan.steps, {"a": wrong})
    with pytest.raises(RuntimeError, match="a tree of drafts in flight"):
        cache.allocate("a", 1, drafts=(PLACEHOLDER,))
    cache.accept(plan.steps, {"a": [11, 21, 22, 40]})


@pytest.mark.parametrize("ends", ["preempt", "cancel", "free"])
def test_a_residency_that_ends_leaves_nothing_to_move(ends: str) -> None:
    cache = decoding(20)
    plan = tree(cache)
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [11, 21, 22, 40]})
    if ends == "cancel":
        cache.cancel([allocate(cache, "a", 1)])
    elif ends == "preempt":
        cache.preempt("a")
    else:
        cache.free("a", finished=True)
        cache.check()
        return
    cache.admit("a")
    plan = cache.plan([allocate(cache, "a", 25)])
    assert plan.log_paths is None and plan.steps[0].kept == ()
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [5]})
    assert allocate(cache, "a", 1).kept == ()


@pytest.mark.parametrize("drafts", [2, 4, 7])
@pytest.mark.parametrize("every", [1, 3, 1000])
def test_trees_change_no_answer_and_no_hit(drafts: int, every: int) -> None:
    """Try a boundary at every offset of a row, and a next turn after each answer."""
    prompts = [text(50 + offset, offset) for offset in range(16)]
    answers = [answer(prompt, 40, attention=True) for prompt in prompts]
    turns = [[*prompt, *given, 1, 2] for prompt, given in zip(prompts, answers, strict=True)]
    found = []
    for errors in (None, every):
        cache = {"num_state_blocks": 80, "num_kv_blocks": 90, "max_draft_tokens": drafts}
        d = Driver(Mix([Job(prompt, 40) for prompt in prompts], draft_errors=errors, trees=True, cache=cache)).run()
        requests = list(d.requests.values())
        d.mix.jobs.extend(Job(turn) for turn in turns)
        for index in range(len(prompts), 2 * len(prompts)):
            d.submit(index)
            while not d.scheduler.idle:
                d.step()
        d.check()
        found.append([d.hit(index) for index in range(2 * len(prompts))])
    assert found[0] == found[1]
    assert sum(request.num_accepted_tokens for request in requests) > (100 if every > 1 else 10)


def change_paths(how: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[StepPlan], StepPlan]:
    return lambda plan: replace(plan, log_paths=None if plan.log_paths is None else how(plan.log_paths))


CHANGES: dict[str, Callable[[StepPlan], StepPlan]] = {
    "no change": lambda plan: plan,
    "no move in logs": change_paths(lambda paths: None),
    "another entry": change_paths(lambda paths: paths + (np.arange(9) == 2)),
    "another target": change_paths(lambda paths: paths + (np.arange(9) == 1)),
    "no move in pages": lambda plan: replace(plan, kv_paths=None),
    "another token's ancestors": lambda plan: replace(plan, arrays={**plan.arrays, **flattened(plan.arrays)}),
}


def flattened(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return ancestors that make every token follow the first token alone."""
    width = int(arrays["query_start_loc"][0]) // max(len(arrays["decode_src"]), 1)
    flat = 1 | 1 << np.arange(width, dtype=np.int32)
    return {"ancestors": np.tile(flat, len(arrays["decode_src"]))} if "ancestors" in arrays else {}


@pytest.mark.parametrize("name", CHANGES)
def test_a_planted_mistake_is_seen(name: str) -> None:
    cache = {"num_state_blocks": 40, "num_kv_blocks": 40, "max_draft_tokens": 7}
    d = Driver(Mix([Job(text(40 + i, i), 50) for i in range(4)], draft_errors=4, trees=True, cache=cache))
    execute = d.cache.runner.execute
    d.cache.runner.execute = lambda plan, *rest, **more: execute(  # type: ignore[method-assign]
        CHANGES[name](plan), *rest, **more
    )
    if name == "no change":
        d.run()
    else:
        with pytest.raises((AssertionError, IndexError)):
            d.run()


def test_a_row_gives_the_depths_of_its_tree_tokens() -> None:
    step = SequenceStep("a", 1, 1, 5, 7, False, True, 1, 0, drafts=DRAFTS, parents=PARENTS)
    assert list(step.depths()) == [0, 1, 2, 3, 2, 3, 1]
    assert [step.draft_after(*place) for place in ((0, 11), (0, 31), (0, 12), (1, 21), (4, 22), (3, 13))] == [
        1, 6, 0, 4, 5, 0
    ]  # fmt: skip


def test_a_prefix_that_a_tree_computed_is_found() -> None:
    cache = decoding(20, num_state_blocks=8)
    tokens = [*text(20), 10]
    while len(tokens) < 67:
        plan = tree(cache)
        drafts = plan.steps[0].drafts
        given = [11, 21, 22, 5] if len(drafts) > 4 else [5]
        cache.issued(plan.steps)
        cache.accept(plan.steps, {"a": given})
        tokens += given
    cache.free("a", finished=True)
    assert hit(cache, tokens) == 64
