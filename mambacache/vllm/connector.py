"""Cut a KV connector's answers to positions with a state, and find failed loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class External:
    """Asks the connector before a state is chosen, and tells vLLM of the tokens up to the state.

    It replaces a method of the instance: vLLM knows connectors by class.
    """

    def __init__(self, connector: Any) -> None:
        self._ask, connector.get_num_new_matched_tokens = connector.get_num_new_matched_tokens, self._answer
        self._answers: dict[str, tuple[int | None, bool]] = {}  # of this schedule()
        self.failed: set[str] = set()  # these ask no more: loads could fail for ever
        self._loads: dict[int, list[tuple[str, Sequence[int]]]] = {}  # requests' pages, by id() of the loading output

    def start_over(self) -> None:
        self._answers.clear()

    def ask(self, request: Any, local: int) -> int | None:
        """Return the tokens that it has after `local` tokens; None: ask later."""
        answer: tuple[int | None, bool] = 0, False
        if request.request_id not in self.failed and not request.skip_reading_prefix_cache:
            answer = self._ask(request, local)
        self._answers[request.request_id] = answer
        return answer[0] if answer[0] is None else max(answer[0], 0)

    def take(self, name: str, count: int) -> None:
        """Have the connector load `count` tokens."""
        self._answers[name] = count, self._answers[name][1] and count > 0

    def _answer(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._answers[request.request_id]

    def sent(self, output: Any, manager: Any) -> None:
        """Note pages that are loaded before this step."""
        loading = [name for name, (count, _) in self._answers.items() if count and name in output.num_scheduled_tokens]
        if loading:
            self._loads[id(output)] = [(name, manager.get_block_ids(name)[0]) for name in loading]

    def leaves(self, name: str, manager: Any) -> None:
        """Note the pages of a request that may have read pages of unfinished loads."""
        for held in self._loads.values():
            held.append((name, manager.get_block_ids(name)[0]))

    def bad_pages(
        self, scheduler_output: Any, bad: set[int], running: Sequence[Any], manager: Any
    ) -> dict[str, set[int]]:
        """Return the pages of requests that ran on `bad` pages, from the first on."""
        held = self._loads.pop(id(scheduler_output), [])
        if not bad:
            return {}
        held += [(request.request_id, manager.get_block_ids(request.request_id)[0]) for request in running]
        found: dict[str, set[int]] = {}
        for name, pages in held:
            first = next((i for i, page in enumerate(pages) if page in bad), None)
            if first is not None:
                found.setdefault(name, set()).update(pages[first:])
        return found
