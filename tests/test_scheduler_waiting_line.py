"""Check the line of waiting requests: its order, and the groups that wait for the same prefix."""

from __future__ import annotations

import random

from mambacache.config import SamplingParams
from mambacache.scheduler.request import Request
from mambacache.scheduler.waiting_line import WaitingLine

PARAMS = SamplingParams()


def arrived(*arrivals: int) -> list[Request]:
    return [Request(str(arrival), [1], PARAMS, arrival=arrival) for arrival in arrivals]


def lined_up(*arrivals: int) -> tuple[WaitingLine, list[Request]]:
    """Return a line, and its requests in the order of their pushes."""
    line, requests = WaitingLine(), arrived(*arrivals)
    for request in requests:
        line.push(request)
    return line, requests


def drain(line: WaitingLine) -> list[int]:
    """Pop requests until the line is empty, and return their arrivals."""
    left = []
    while (request := line.first()) is not None:
        line.pop()
        request.waiting = False
        left.append(request.arrival)
    return left


def test_line_is_ordered_by_arrival() -> None:
    line, _ = lined_up(3, 1, 2)
    assert drain(line) == [1, 2, 3]
    line, (third, first, _) = lined_up(3, 1, 2)
    assert line.first() is first
    line.pop()
    assert drain(line) == [2, 3]
    for request in (third, first):
        line.push(request)
    assert drain(line) == [1, 3] and line.first() is None


def test_requests_that_no_longer_wait_are_skipped() -> None:
    line, requests = lined_up(1, 2, 3, 4)
    for request in requests[::2]:
        request.waiting = False
    assert drain(line) == [2, 4]


def test_a_request_that_is_pushed_twice_leaves_once() -> None:
    line, (first, _) = lined_up(1, 2)
    line.push(first)
    assert drain(line) == [1, 2]


def test_groups_return_to_their_places_when_their_wait_is_over() -> None:
    line, requests = lined_up(*range(6))
    for on, until in (("a", 64), ("a", 128), ("b", 64), ("a", 64)):
        line.set_aside(on, until, 0)
    assert [request.passed_at for request in requests] == [0, 0, 0, 0, None, None]
    asked: list[int] = []

    def waits(request: Request) -> bool:
        asked.append(request.arrival)
        return request.arrival == 1

    line.wake(waits)
    assert sorted(asked) == [1, 2, 3]  # a request of each group
    assert drain(line) == [0, 2, 3, 4, 5]
    line.wake(lambda request: False)
    assert drain(line) == [1]
    line.wake(waits)
    assert line.first() is None and len(asked) == 3


def test_a_member_that_left_its_group_is_not_asked_and_does_not_return() -> None:
    line, requests = lined_up(*range(4))
    for until in (64, 64, 64, 128):
        line.set_aside("a", until, 0)
    for i in (0, 2, 3):
        requests[i].waiting = False
    asked: list[int] = []
    line.wake(lambda request: bool(asked.append(request.arrival)))
    assert asked == [1] and drain(line) == [1]


def test_longest_passed_is_the_request_that_was_overtaken_first() -> None:
    line, requests = lined_up(*range(4))
    assert line.longest_passed() is None
    for i in range(3):
        line.set_aside("a", 64, i)
    assert line.longest_passed() is requests[0]
    line.wake(lambda request: False)
    assert line.longest_passed() is requests[0]  # woken, it is not served yet
    line.set_aside("b", 64, 9)
    assert requests[0].passed_at == 0  # its wait goes on
    requests[0].waiting, requests[0].passed_at = False, None
    assert line.longest_passed() is requests[1]
    requests[1].waiting = requests[2].waiting = False
    assert line.longest_passed() is None


def test_thousands_of_pushes_keep_the_order() -> None:
    rng = random.Random(0)
    arrivals = rng.sample(range(10_000), 5000)
    line, requests = (
        WaitingLine(),
        {arrival: request for arrival, request in zip(arrivals, arrived(*arrivals), strict=True)},
    )
    waiting: list[int] = []
    for arrival in arrivals:
        line.push(requests[arrival])
        waiting.append(arrival)
        if rng.random() < 0.3:
            gone = waiting.pop(rng.randrange(len(waiting)))
            requests[gone].waiting = False
        first = line.first()
        assert (first.arrival if first is not None else None) == min(waiting, default=None)
    assert drain(line) == sorted(waiting)


def test_requests_that_left_are_not_kept() -> None:
    line, _ = lined_up(0)
    for i in range(1, 20_000):
        (request,) = arrived(i)
        line.push(request)
        request.waiting = False  # without a call of `first`
    assert len(line._heap) < 2100 and drain(line) == [0]
