"""The requests that wait, in order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from mambacache.scheduler.request import Request


class WaitingLine:
    """Requests in order of arrival. Those that wait for another one to compute their prefix are set aside in groups,
    and cost nothing until that is done. Who does not wait any more is left out; each call is O(log n) a request."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._pushes = 0
        self._clean_at = 1024  # pushes
        self._aside: dict[tuple[str | None, int], list[Request]] = {}  # by whom they wait for, and up to where
        self._passed: deque[Request] = deque()  # whom others were let ahead of, the first one first

    def push(self, request: Request) -> None:
        request.waiting = True
        self._pushes += 1
        heappush(self._heap, (request.arrival, self._pushes, request))
        if self._pushes >= self._clean_at:
            self._heap = [entry for entry in self._heap if entry[2].waiting]
            heapify(self._heap)
            self._clean_at = self._pushes + max(len(self._heap), 1024)

    def first(self) -> Request | None:
        """Who came first of those that are not set aside."""
        while self._heap and not self._heap[0][2].waiting:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """`first` leaves the line for now."""
        heappop(self._heap)

    def set_aside(self, on: str | None, until: int, admissions: int) -> None:
        """`first` waits for a prefix, and lets others ahead."""
        request = heappop(self._heap)[2]
        self._aside.setdefault((on, until), []).append(request)
        if request.passed_at is None:
            request.passed_at = admissions
            self._passed.append(request)

    def wake(self, waits: Callable[[Request], bool]) -> None:
        """Groups whose wait is over return to their places; `waits` is asked of one of each group."""
        for key, group in list(self._aside.items()):
            while group and not group[-1].waiting:
                group.pop()
            if group and waits(group[-1]):
                continue
            del self._aside[key]
            for request in group:
                if request.waiting:
                    self.push(request)

    def longest_passed(self) -> Request | None:
        """Of those whom others were let ahead of, and who still wait, the one for whom that began first."""
        while self._passed and (not self._passed[0].waiting or self._passed[0].passed_at is None):
            self._passed.popleft()
        return self._passed[0] if self._passed else None
