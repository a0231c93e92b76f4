"""Check the drafts that are taken from a draft source, and the calls that it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from mambacache import SamplingParams
from mambacache.plan import Guess
from mambacache.scheduler.drafts import DeviceDrafts, Drafts, DraftTree, on_copies, one_by_one
from mambacache.scheduler.request import Request
from symbolic import text
from symbolic_driver import Driver
from symbolic_jobs import Job, Mix

REQUESTS = [Request(name, [1, 2], SamplingParams()) for name in "abc"]
LIMITS = dict(zip(REQUESTS, (2, 3, 2), strict=True))


def raising(*_: Any) -> Any:
    raise RuntimeError("planted")


def breaking_off(limits: Mapping[Request, int]) -> Iterable[Sequence[int]]:
    yield [7]
    raise RuntimeError("planted")


class Endless:
    """Give a token at every index, without an end."""

    def __getitem__(self, index: int) -> int:
        return 5


GIVEN: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "all": (lambda limits: [[1], [2, 3], [4, 5]], [(1,), (2, 3), (4, 5)]),
    "more than was asked for": (lambda limits: [[1] * 9] * 9, [(1,) * 2, (1,) * 3, (1,) * 2]),
    "guesses without an end": (lambda limits: [iter(int, 1), Endless(), [1]], [(0,) * 2, (5,) * 3, (1,)]),
    "fewer guesses than requests": (lambda limits: iter([[1], []]), [(1,), (), None]),
    "no tokens": (lambda limits: [[1, 10], [1.0], [9]], [None, None, (9,)]),
    "no sequence": (lambda limits: [[1], 5, [2]], [(1,), None, (2,)]),
    "nothing": (lambda limits: None, [None] * 3),
    "an error": (raising, [None] * 3),
    "an error after one": (breaking_off, [(7,), None, None]),
    "an error for one": (
        one_by_one(lambda request, limit: raising() if request is REQUESTS[1] else [limit]),
        [(2,), None, (2,)],
    ),
}


@pytest.mark.parametrize("case", GIVEN)
def test_a_bad_guess_costs_no_other_guess(case: str, caplog: pytest.LogCaptureFixture) -> None:
    source, expected = GIVEN[case]
    drafts = Drafts(source, vocab_size=10)
    for _ in range(2):
        found = map(drafts.propose(LIMITS).get, REQUESTS)
        assert [guess and guess.drafts for guess in found] == expected
    assert caplog.text.count("said once") == (None in expected)


TREES: dict[str, tuple[DraftTree, Guess | None]] = {
    "in preorder": (DraftTree([1, 2, 3], [0, 1, 0]), Guess((1, 2, 3), (0, 1, 0))),
    "level by level": (DraftTree([1, 2, 3, 4], [0, 0, 1, 2]), Guess((1, 3, 2, 4), (0, 1, 0, 3))),
    "more than asked for": (DraftTree([1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 1]), Guess((1, 3, 5, 2, 4), (0, 1, 2, 0, 4))),
    "a chain": (DraftTree([1, 2], [0, 1]), Guess((1, 2), (0, 1))),
    "nothing": (DraftTree([], []), Guess()),
    "no parents": (DraftTree([1, 2], []), None),
    "a token that comes before its parent": (DraftTree([1, 2], [2, 0]), None),
    "a parent that is none": (DraftTree([1], [-1]), None),
    "no numbers": (DraftTree([1], ["0"]), None),  # type: ignore[list-item]
    "no tokens": (DraftTree([1, 10], [0, 0]), None),
    "nothing to be counted": (DraftTree(5, [0]), None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", TREES)
def test_trees_are_taken_in_preorder(case: str) -> None:
    given, expected = TREES[case]
    limits = {REQUESTS[0]: 5, REQUESTS[1]: 2}
    found = Drafts(lambda _: [given, [7]], vocab_size=10).propose(limits)
    assert (found.get(REQUESTS[0]), found[REQUESTS[1]].drafts) == (expected, (7,))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_of_a_draft_source_propagates(error: type[BaseException]) -> None:
    def interrupted(limits: Mapping[Request, int]) -> Iterable[Sequence[int]]:
        raise error

    with pytest.raises(error):
        Drafts(interrupted, vocab_size=10).propose(LIMITS)


def test_a_draft_function_may_change_its_request() -> None:
    request = Request("a", [1, 2], SamplingParams(), output=[3])

    def spending(request: Request, limit: int) -> Sequence[int]:
        request.prompt += request.output  # type: ignore[operator]
        return [request.output.pop()] * limit

    for _ in range(2):
        assert Drafts(one_by_one(on_copies(spending)), 10).propose({request: 2}) == {request: Guess((3, 3))}
    assert (request.prompt, request.output) == ([1, 2], [3])


def test_every_row_gets_its_token_before_any_row_gets_drafts() -> None:
    d = Driver(Mix([Job(text(3, seed), 60) for seed in range(4)], draft_errors=3, budget=12, cache={
        "num_state_blocks": 40, "num_kv_blocks": 20, "max_draft_tokens": 3,
    }))  # fmt: skip
    schedule, all_four = d.scheduler.schedule, []

    def scheduling() -> Any:
        progress = [d.scheduler.cache.progress(request.request_id) for request in d.scheduler._running]
        plan = schedule()
        if len(progress) == 4 and all(each.computed >= each.prefill_end for each in progress):
            all_four.append(plan)
        return plan

    d.scheduler.schedule = scheduling  # type: ignore[method-assign]
    d.run()
    assert any(row.drafts for plan in all_four for row in plan.steps)
    assert {len(plan.steps) for plan in all_four} == {4}


@pytest.mark.parametrize("errors", [2, 5, 1000])
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_no_step_is_planned_while_drafts_of_two_steps_are_unread(ahead: int, errors: int) -> None:
    jobs = [Job(text(40 + seed, seed), 30) for seed in range(3)]
    d = Driver(Mix(jobs, ahead=ahead, draft_errors=errors, cache={
        "num_state_blocks": 40, "num_kv_blocks": 40, "max_draft_tokens": 3,
    }))  # fmt: skip
    d.scheduler._drafts = DeviceDrafts()

    def propose(request_id: str, position: int, limit: int) -> list[int]:
        done = position - len(d.scheduler.requests[request_id].prompt)
        right = d._expected[request_id][done : done + limit]
        return d.mix.drafts([*right, *[0] * (limit - len(right))], done)  # type: ignore[return-value]

    d.cache.runner.propose = propose
    schedule, unread = d.scheduler.schedule, []

    def scheduling() -> Any:
        plan = schedule()
        if plan is not None:
            unread.append(len(d.plans))
        return plan

    d.scheduler.schedule = scheduling  # type: ignore[method-assign]
    d.run()
    assert d.cache.stats.preemptions == 0 and max(unread) == min(ahead, 2)
    assert all(request.num_accepted_tokens > 0 for request in d.requests.values())
    if errors == 1000:  # no draft is wrong
        assert all(request.num_accepted_tokens == request.num_draft_tokens for request in d.requests.values())


def test_a_source_is_not_asked_for_0_drafts() -> None:
    drafts = Drafts(raising, vocab_size=10)
    assert drafts.propose({}) == {} == drafts.propose(dict.fromkeys(REQUESTS, 0))
    assert not drafts._failed
    asked: list[Mapping[Request, int]] = []
    Drafts(lambda limits: asked.append(limits) or [], 10).propose({REQUESTS[0]: 0, REQUESTS[1]: 1, REQUESTS[2]: -1})
    assert asked == [{REQUESTS[1]: 1}]


def test_a_step_asks_its_source_once_for_all_decode_rows() -> None:
    d = Driver(Mix([Job(text(20, seed), 12) for seed in range(4)], draft_errors=3, budget=40, cache={
        "num_state_blocks": 40, "num_kv_blocks": 20, "max_draft_tokens": 3,
    }))  # fmt: skip
    source, asked, plans = d.scheduler._drafts._source, [], []  # type: ignore[union-attr]
    schedule = d.scheduler.schedule

    def asking(limits: Mapping[Request, int]) -> Iterable[Sequence[int]]:
        asked.append((len(plans), {request.request_id for request in limits}))
        return source(limits)

    def scheduling() -> Any:
        plans.append(schedule())
        return plans[-1]

    d.scheduler._drafts._source = asking  # type: ignore[union-attr]
    d.scheduler.schedule = scheduling  # type: ignore[method-assign]
    d.run()
    assert len({step for step, _ in asked}) == len(asked) > 3
    assert max(len(ids) for _, ids in asked) == 4
    for step, ids in asked:
        assert ids >= {row.request_id for row in plans[step].steps if row.drafts}
