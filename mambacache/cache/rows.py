"""The rows in flight, the rows that a caller may name, and the check of a request's next row."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mambacache.cache.request import CachedRequest, Life, Row
from mambacache.checks import MAX_TOKEN, accepted_tokens, check_integer, token_array, tree_parents
from mambacache.plan import FOLD, NO_GUESS, PLACEHOLDER, Guess, SequenceStep


class FreedRow(NamedTuple):
    """An issued row of a freed request.

    Args:
        issue: its number among all issued rows.
        writer: the number of its request.
        unproven: prefix hashes of the request's blocks that no finite logits followed.
    """

    issue: int
    writer: int
    unproven: Sequence[bytes]


class Rows(dict[int, Row]):
    """Rows by their number, from `allocate` until they are accepted, cancelled, dropped, or lost with their request.

    An issued row of a freed request stays in `freed` until its step is accepted or cancelled. A host that tells neither
    loses the oldest entries beyond `most_freed`.
    """

    def __init__(self, requests: Mapping[str, CachedRequest], most_freed: int) -> None:
        super().__init__()
        self._requests = requests
        self._most_freed = most_freed
        self.freed: OrderedDict[int, FreedRow] = OrderedDict()
        self.lost: set[int] = set()  # not issued when the books were rebuilt: never to be issued

    def free(self, request: CachedRequest) -> None:
        """Move the issued rows of a request to `freed`."""
        unproven = request.chain[request.sound // request.block_size + 1 :]
        for row in request.issued:
            del self[row.step.row]
            self.freed[row.step.row] = FreedRow(row.issue, request.number, unproven)
        while len(self.freed) > self._most_freed:
            self.freed.popitem(last=False)

    def pop_freed(self, steps: Iterable[SequenceStep]) -> list[tuple[SequenceStep, FreedRow]]:
        """Remove the freed rows of a step, which is over, and return them."""
        return [(step, freed) for step in steps if (freed := self.freed.pop(step.row, None))] if self.freed else []

    def find(self, steps: Sequence[SequenceStep], ending: bool = False) -> list[Row]:
        """The rows of these steps, without those whose life is over and for which nothing is left to do.

        Args:
            ending: they are cancelled or dropped, which is all that may be done with a lost row.

        Raises:
            ValueError: a row is given twice.
            RuntimeError: one has ended, and its request runs on; or it is lost.
        """
        get = self.get
        found = [row for step in steps if (row := get(step.row)) is not None and row.step is step]
        if len(found) == len(steps) and (len(found) == 1 or len(set(found)) == len(found)):
            return found  # as they were given out, which they nearly always are
        found.clear()
        for step in steps:
            row = self.get(step.row)
            if row is not None and row.step.life == step.life and row.step.request_id == step.request_id:
                found.append(row)
                continue
            if step.row in self.lost and not ending:
                raise RuntimeError("an exception broke off a call since this row was allocated: cancel its step")
            request = self._requests.get(step.request_id)
            runs_on = request is not None and request.life is not None and request.life.number == step.life
            if row is not None or runs_on:
                raise RuntimeError(f"{_row_of(step)} has ended: accept, cancel or drop a row once")
        if len({step.row for step in steps}) < len(steps):
            raise ValueError("a row is given twice: give each row of a step once")
        return found

    def to_plan(self, steps: Sequence[SequenceStep]) -> list[Row]:
        """Rows that may be planned together."""
        rows = self.find(steps)
        if len(rows) < len(steps) or any([row.life.ended for row in rows]):
            raise RuntimeError("a request was preempted or freed after its row was allocated: plan the step without it")
        for row in rows:
            if row.planned:
                raise RuntimeError(f"{_row_of(row.step)} was planned already: plan a row once")
        return rows

    def to_issue(self, steps: Sequence[SequenceStep]) -> list[Row]:
        """Rows that may be issued."""
        rows = self.find(steps)
        for row in rows:
            if row.issue or not row.planned:
                what = "issued already: issue a row once" if row.issue else "not planned: plan it first"
                raise RuntimeError(f"{_row_of(row.step)} was {what}")
        return rows

    def to_accept(
        self, steps: Sequence[SequenceStep], token_ids: Mapping[str, Sequence[int]]
    ) -> list[tuple[Row, array[int]]]:
        """Rows whose tokens may be taken, and these."""
        taken: list[tuple[Row, array[int]]] = []
        for row in self.find(steps):
            step, request = row.step, row.life.request
            if not row.issue:
                raise RuntimeError(f"{_row_of(step)} was not issued: issue it first")
            if request.issued[0] is not row:
                raise RuntimeError(f"an earlier row of {_name(request)} was not accepted: accept it first")
            tokens = accepted_tokens(step, token_ids.get(step.request_id, ()))
            behind = len(request.tokens) - step.start - (1 if step.drafts else step.num_tokens)
            if tokens and not 0 <= behind <= step.late:
                raise ValueError(f"{_name(request)} lacks the tokens before these: accept them first")
            taken.append((row, tokens))
        return taken


def _row_of(step: SequenceStep) -> str:
    return f"the row of request {step.request_id!r}"


def _name(request: CachedRequest) -> str:
    return f"request {request.request_id!r}"


def check_next_row(
    life: Life, num_tokens: int, drafts: Sequence[int], parents: Sequence[int], decode: bool, max_drafts: int
) -> Guess:
    """The drafts of a row that may come next in a life; raises as `PrefixCache.allocate` does."""
    request, left = life.request, life.prefill_end - life.computed
    if life.row is not None:
        raise RuntimeError(f"{_name(request)} has a row that is not issued: issue, drop or cancel it first")
    if life.drafted and life.drafted[-1].step.late:
        raise RuntimeError(f"{_name(request)} has drafts in flight in two steps: accept the first before the next one")
    if life.drafted and life.drafted[-1].step.parents:
        raise RuntimeError(f"{_name(request)} has a tree of drafts in flight: accept it before the next row")
    if num_tokens != 1 or type(num_tokens) is not int:  # else it is in bounds, as for most rows
        check_integer("num_tokens", num_tokens, 1, left if left > 1 else 1)
    if decode and num_tokens != 1:
        raise ValueError(f"{_name(request)} runs {num_tokens} tokens: decode takes one at a time, and drafts beside it")
    if left <= 0 and life.computed >= len(request.tokens) + request.in_flight:
        raise RuntimeError(f"{_name(request)} has no next token: accept what its last row gave first")
    if not len(drafts) and not len(parents):
        return NO_GUESS
    guesses = (PLACEHOLDER,) * len(drafts)
    if not isinstance(drafts, tuple) or drafts != guesses:
        mixed = isinstance(drafts, list | tuple) and PLACEHOLDER in drafts
        known = [0 if token == PLACEHOLDER else token for token in drafts] if mixed else drafts
        token_array(f"the drafts of {_name(request)}", known)
        guesses = tuple(map(int, drafts))
    if len(guesses) > max_drafts:
        raise ValueError(
            f"{_name(request)} has {len(guesses)} drafts: give {max_drafts} at most, or raise max_draft_tokens"
        )
    if left > 0 or (request.in_flight and any(token != PLACEHOLDER for token in guesses)):
        raise RuntimeError(f"{_name(request)} does not know its last token yet: drafts come after it")
    return Guess(guesses, tree_parents(_name(request), guesses, parents))


def check_decoded(life: Life, token_ids: Sequence[int], num_pages: int) -> array[int]:
    """Tokens of steps that only added to a log; raises as `PrefixCache.decoded` does."""
    request, tokens = life.request, token_array(f"tokens of {_name(life.request)}", token_ids)
    begun = life.log_slot and life.prefill_end <= life.computed == len(request.tokens) - 1
    if request.issued or life.row is not None or life.kept or not begun:
        raise RuntimeError(f"{_name(request)} has a row under way, or decodes not yet: only what follows is `decoded`")
    if num_pages or life.computed % FOLD + len(tokens) >= FOLD:
        raise ValueError(f"{_name(request)} needs a block or a page for these tokens: allocate their rows")
    return tokens


def check_fork(
    parent: CachedRequest, children: Mapping[str, int], max_running: int | None, known: Mapping[str, CachedRequest]
) -> None:
    """Raises, as `PrefixCache.fork` does, unless a request has just ended its prompt and the children are new."""
    if max_running is not None:
        check_integer("max_running", max_running, 0)
    for child_id, token in children.items():
        check_integer(f"the first token of request {child_id!r}", token, 0, MAX_TOKEN)
        if child_id in known:
            raise ValueError(f"request id {child_id!r} is in use: choose another, or free that request first")
    life = parent.life
    if len(parent.tokens) != parent.prompt_len + 1 or (life is not None and life.computed > parent.prompt_len):
        raise RuntimeError(
            f"{_name(parent)} has not just ended its prompt: fork it after its first token, before it runs on"
        )
    if parent.issued or (life is not None and life.row is not None):
        raise RuntimeError(f"{_name(parent)} has a row under way: fork it before it runs on")
