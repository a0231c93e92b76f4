"""Queue waiting requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush

from mambacache.scheduler.request import Request


class WaitingLine:
    """Queues requests by arrival; parks a request while another computes its prefix."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._pushes = 0
        self._clean_at = 1024  # pushes
        self._aside: dict[tuple[str | None, int], list[Request]] = {}  # by on, until
        self._passed: deque[Request] = deque()

    def push(self, request: Request) -> None:
        request.waiting = True
        self._pushes += 1
        heappush(self._heap, (request.arrival, self._pushes, request))
        if self._pushes >= self._clean_at:
            self._heap = [entry for entry in self._heap if entry[2].waiting]
            heapify(self._heap)
            self._clean_at = self._pushes + max(len(self._heap), 1024)

    def first(self) -> Request | None:
        """Return the oldest waiting request that is not parked."""
        while self._heap and not self._heap[0][2].waiting:
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> None:
        """Remove `first`."""
        heappop(self._heap)

    def set_aside(self, on: str | None, until: int, admissions: int) -> None:
        """Park `first`."""
        request = heappop(self._heap)[2]
        self._aside.setdefault((on, until), []).append(request)
        if request.passed_at is None:
            request.passed_at = admissions
            self._passed.append(request)

    def wake(self, waits: Callable[[Request], bool]) -> None:
        """Unpark each group unless its requests still wait."""
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
        """Return the waiting request that was parked first."""
        while self._passed and (not self._passed[0].waiting or self._passed[0].passed_at is None):
            self._passed.popleft()
        return self._passed[0] if self._passed else None
