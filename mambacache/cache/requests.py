"""A request, its residency from one admission to the next, and its rows in flight."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mambacache.cache.ledger import Trace
from mambacache.cache.pool import Lease
from mambacache.cache.retention import Rank, Turn, Wish
from mambacache.checks import MAX_TOKEN, accepted_tokens, check_integer, token_array, tree_parents
from mambacache.plan import FOLD, NO_GUESS, PLACEHOLDER, Guess, SequenceStep
from mambacache.report import RequestReport

ALWAYS_EXACT = 1 << 62


@dataclass(slots=True, eq=False)
class CachedRequest:
    """One request: its tokens and their hash chain."""

    request_id: str
    block_size: int
    tokens: array[int]  # all that the host knows: prompt and answer
    prompt_len: int
    salt: str
    keys: dict[int, bytes]  # block -> a digest of what else enters its hash
    marks: tuple[int, ...]
    read: bool
    store: bool
    chain: list[bytes]  # the root, then the hash of each whole block of known tokens
    number: int  # unique in the cache
    report: RequestReport | None = None  # of its first run
    residency: Residency | None = None  # None while it waits
    waits: tuple[Residency, int] | None = (
        None  # the residency that computes a prefix of it, and the position that it waits for
    )
    load: Load | None = None  # the load from host memory or files that it waits for
    may_load: bool = True  # False after a load from host memory, until it runs
    may_read: bool = True  # False after a load from files, until it runs
    hit_before: int | None = None  # after how many blocks it could have resumed without the loads that it waited for
    held_before: int | None = None  # the same with what the host's memory had, without files
    lined: int = 0  # leading blocks of the chain that `Lookup` counts as waited for
    issued: list[Row] = field(default_factory=list)  # rows whose tokens have not been read, oldest first
    in_flight: int = 0  # how many of them will give a token
    leaving: Row | None = None  # planned in a residency that ended, and neither issued nor given up
    turn: Turn | None = None  # of a chain; known from the first admission on, of what is stored
    sound: int = 0  # the number of its tokens before its last finite logits
    resumed: int = 0  # tokens that its last admission hit
    stale: bool = False  # holds blocks from before a reset: commits nothing more

    @property
    def rank(self) -> Rank:
        """How often its chain went on before it."""
        return self.turn.rank if self.turn is not None else Rank.FIRST

    def loaded(self, hit: int) -> tuple[int, int]:
        """Of a hit after so many blocks, the tokens that came from the host's memory, and those that came from files
        before that."""
        before = hit if self.hit_before is None else self.hit_before
        held = hit if self.held_before is None else max(self.held_before, before)
        from_files = max(hit - held, 0)
        return (max(hit - before, 0) - from_files) * self.block_size, from_files * self.block_size

    def loads_anew(self) -> None:
        """It may load again: what it loaded so far was for an admission that is over."""
        self.may_load = self.may_read = True
        self.hit_before = self.held_before = None

    def token_bytes(self, start: int, end: int) -> bytes:
        """int32, the known tokens from `start` to `end`; those of a block with a key are changed by it, so that equal
        bytes mean equal prefixes."""
        if not self.keys:
            return self.tokens[start:end].tobytes()
        tokens = np.array(self.tokens[:end], dtype=np.int32)
        for block, key in self.keys.items():
            tokens[block * self.block_size : (block + 1) * self.block_size] ^= int.from_bytes(key[:3], "big")
        return tokens[start:].tobytes()


@dataclass(slots=True, eq=False)
class Residency:
    """From one admission to the next preemption, or to the end: what the request holds and how far it came."""

    number: int
    request: CachedRequest
    admitted_at: int  # how many rows had been issued
    hit: int  # tokens that it did not compute
    computed: int  # tokens consumed by issued steps, without drafts that may be rejected
    prefill_end: int  # tokens known at admission: these run in the prefill kernels
    trace: Trace  # for the ledger
    inexact_from: int = ALWAYS_EXACT  # states at later positions, and KV blocks that end later, are near
    state: Lease | None = None  # None: a fresh state
    log_slot: int = 0  # of its token log; 0 until it decodes
    log_start: int = 0  # the log's entry that follows on `state`
    reserve: Lease | None = None  # taken at admission: the first row's dst
    drafted: list[Row] = field(default_factory=list)  # issued with drafts that are not verified yet, and the next
    kept: tuple[int, ...] = ()  # where log and pages have the last tokens, which a tree's row left out of their places
    pages: array[int] = field(default_factory=lambda: array("i"))
    shared_pages: int = 0  # leading pages that others wrote
    copy_page: Lease | None = None  # copied to the page after the shared ones before the next row; held until then
    published: int = 0  # leading blocks whose pages were committed and whose hashes were seen
    written: int = 0  # blocks up to here are computed; those up to `announced` are known to `Lookup`
    announced: int = 0
    wishes: dict[int, Wish] = field(default_factory=dict)
    marks: frozenset[int] = frozenset()  # positions that the caller named, as far as they are marks
    pending: list[Commit] = field(default_factory=list)  # in order
    checkpoint: tuple[int, bytes] | None = None  # the last state committed where a step ended, and its hash
    row: Row | None = None  # allocated and not issued
    report: RequestReport | None = None  # of this admission
    ran: bool = False  # a row of it was issued
    ended: bool = False
    void: bool = False  # it failed on the device, or began from what did: what its rows give does not count


class Commit(NamedTuple):
    """A state that is committed when so many tokens are known."""

    known: int
    position: int
    lease: Lease


@dataclass(slots=True, eq=False)
class Row:
    """One row under way: allocated, then planned, then issued."""

    step: SequenceStep
    residency: Residency
    dst: Lease | None  # None where a decode row has no dst, or writes its running state in place
    near_before: int  # the residency's `inexact_from` and its number of pages before the row
    pages_before: int
    had_reserve: bool
    checkpoints: dict[int, Lease] = field(default_factory=dict)
    planned: bool = False
    issue: int = 0  # its number among all issued rows; 0 before


@dataclass(slots=True, eq=False)
class Load:
    """What a request waits for: the blocks of its prefix that the device lacks, or that are in files alone. Others may
    wait for it as well."""

    request_id: str
    chain: Sequence[bytes]
    depth: int  # blocks of the prefix
    leases: list[Lease]  # of its blocks where they go, old and new, until all who wait have come
    waiting: set[CachedRequest] = field(default_factory=set)
    done: bool = False

    def let_go(self) -> bool:
        """Gives back what is held, the end of the chain first; whether that was anything."""
        held, self.leases = self.leases, []
        for lease in reversed(held):
            lease.end()
        return bool(held)


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
        """The rows of these steps, without those whose residency is over and for which nothing is left to do.

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
            if row is not None and row.step.residency == step.residency and row.step.request_id == step.request_id:
                found.append(row)
                continue
            if step.row in self.lost and not ending:
                raise RuntimeError("an exception broke off a call since this row was allocated: cancel its step")
            request = self._requests.get(step.request_id)
            runs_on = (
                request is not None and request.residency is not None and request.residency.number == step.residency
            )
            if row is not None or runs_on:
                raise RuntimeError(f"{_row_of(step)} has ended: accept, cancel or drop a row once")
        if len({step.row for step in steps}) < len(steps):
            raise ValueError("a row is given twice: give each row of a step once")
        return found

    def to_plan(self, steps: Sequence[SequenceStep]) -> list[Row]:
        """Rows that may be planned together."""
        rows = self.find(steps)
        if len(rows) < len(steps) or any([row.residency.ended for row in rows]):
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
            step, request = row.step, row.residency.request
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
    residency: Residency, num_tokens: int, drafts: Sequence[int], parents: Sequence[int], decode: bool, max_drafts: int
) -> Guess:
    """The drafts of a row that may come next in a residency; raises as `PrefixCache.allocate` does."""
    request, left = residency.request, residency.prefill_end - residency.computed
    if residency.row is not None:
        raise RuntimeError(f"{_name(request)} has a row that is not issued: issue, drop or cancel it first")
    if residency.drafted and residency.drafted[-1].step.late:
        raise RuntimeError(f"{_name(request)} has drafts in flight in two steps: accept the first before the next one")
    if residency.drafted and residency.drafted[-1].step.parents:
        raise RuntimeError(f"{_name(request)} has a tree of drafts in flight: accept it before the next row")
    if num_tokens != 1 or type(num_tokens) is not int:  # else it is in bounds, as for most rows
        check_integer("num_tokens", num_tokens, 1, left if left > 1 else 1)
    if decode and num_tokens != 1:
        raise ValueError(f"{_name(request)} runs {num_tokens} tokens: decode takes one at a time, and drafts beside it")
    if left <= 0 and residency.computed >= len(request.tokens) + request.in_flight:
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


def check_decoded(residency: Residency, token_ids: Sequence[int], num_pages: int) -> array[int]:
    """Tokens of steps that only added to a log; raises as `PrefixCache.decoded` does."""
    request, tokens = residency.request, token_array(f"tokens of {_name(residency.request)}", token_ids)
    begun = residency.log_slot and residency.prefill_end <= residency.computed == len(request.tokens) - 1
    if request.issued or residency.row is not None or residency.kept or not begun:
        raise RuntimeError(f"{_name(request)} has a row under way, or decodes not yet: only what follows is `decoded`")
    if num_pages or residency.computed % FOLD + len(tokens) >= FOLD:
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
    residency = parent.residency
    if len(parent.tokens) != parent.prompt_len + 1 or (
        residency is not None and residency.computed > parent.prompt_len
    ):
        raise RuntimeError(
            f"{_name(parent)} has not just ended its prompt: fork it after its first token, before it runs on"
        )
    if parent.issued or (residency is not None and residency.row is not None):
        raise RuntimeError(f"{_name(parent)} has a row under way: fork it before it runs on")
