"""Define requests, residencies and rows."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mambacache.cache.ledger import Trace
from mambacache.cache.pool import Lease
from mambacache.cache.retention import Turn, Wish
from mambacache.checks import MAX_TOKEN, accepted_tokens, check_integer, token_array, tree_parents
from mambacache.plan import FOLD, NO_GUESS, PLACEHOLDER, Guess, SequenceStep
from mambacache.report import RequestReport

ALWAYS_EXACT = 1 << 62


@dataclass(slots=True, eq=False)
class CachedRequest:
    """Holds a request's tokens and prefix hashes."""

    request_id: str
    block_size: int
    tokens: array[int]  # prompt and answer
    prompt_len: int
    salt: str
    keys: dict[int, bytes]  # block -> digest of extra keys
    marks: tuple[int, ...]
    read: bool
    store: bool
    chain: list[bytes]  # root, then one hash a block
    number: int
    report: RequestReport | None = None
    residency: Residency | None = None
    waits: tuple[Residency, int] | None = None  # until this position
    load: Load | None = None
    may_load: bool = True  # False after a load, until admission
    may_read: bool = True  # the same for files
    hit_before: int | None = None  # blocks, without any load
    held_before: int | None = None  # blocks, without files
    lined: int = 0  # blocks that `Lookup` counts
    issued: list[Row] = field(default_factory=list)  # not accepted, oldest first
    in_flight: int = 0  # issued rows that give tokens
    leaving: Row | None = None  # planned, of an ended residency
    turn: Turn | None = None
    sound: int = 0  # tokens before its last finite logits
    resumed: int = 0  # tokens of its hit
    stale: bool = False  # from before a reset: commits nothing

    def loaded(self, hit: int) -> tuple[int, int]:
        """Return a hit's tokens from host memory and from files."""
        before = hit if self.hit_before is None else self.hit_before
        held = hit if self.held_before is None else max(self.held_before, before)
        from_files = max(hit - held, 0)
        return (max(hit - before, 0) - from_files) * self.block_size, from_files * self.block_size

    def loads_anew(self) -> None:
        self.may_load = self.may_read = True
        self.hit_before = self.held_before = None

    def token_bytes(self, start: int, end: int) -> bytes:
        """Return tokens as int32; a key changes its block."""
        if not self.keys:
            return self.tokens[start:end].tobytes()
        tokens = np.array(self.tokens[:end], dtype=np.int32)
        for block, key in self.keys.items():
            tokens[block * self.block_size : (block + 1) * self.block_size] ^= int.from_bytes(key[:3], "big")
        return tokens[start:].tobytes()


@dataclass(slots=True, eq=False)
class Residency:
    """Holds blocks and progress of an admitted request."""

    number: int
    request: CachedRequest
    admitted_at: int  # rows issued before
    hit: int  # tokens
    computed: int  # tokens, without unverified drafts
    prefill_end: int  # tokens known at admission
    trace: Trace
    inexact_from: int = ALWAYS_EXACT  # later blocks are inexact
    state: Lease | None = None  # None: fresh
    log_slot: int = 0  # 0 until it decodes
    log_start: int = 0  # log entry after `state`
    reserve: Lease | None = None  # for the next dst
    drafted: list[Row] = field(default_factory=list)  # unverified or late
    kept: tuple[int, ...] = ()  # positions for `keep_paths`
    pages: array[int] = field(default_factory=lambda: array("i"))
    shared_pages: int = 0  # leading, written by others
    copy_page: Lease | None = None  # source of the first own page
    published: int = 0  # leading blocks computed and known
    written: int = 0  # blocks computed
    announced: int = 0  # blocks that `Lookup` expects
    wishes: dict[int, Wish] = field(default_factory=dict)
    marks: frozenset[int] = frozenset()
    pending: list[Commit] = field(default_factory=list)  # in order
    checkpoint: tuple[int, bytes] | None = None  # last commit's position and hash
    row: Row | None = None  # allocated, not issued
    report: RequestReport | None = None
    ran: bool = False
    ended: bool = False
    void: bool = False  # failed: its tokens do not count


class Commit(NamedTuple):
    known: int  # tokens
    position: int
    lease: Lease


@dataclass(slots=True, eq=False)
class Row:
    step: SequenceStep
    residency: Residency
    dst: Lease | None  # None without a dst of its own
    inexact_before: int  # `inexact_from`
    pages_before: int
    had_reserve: bool
    checkpoints: dict[int, Lease] = field(default_factory=dict)
    planned: bool = False
    issue: int = 0  # among all rows; 0 before


@dataclass(slots=True, eq=False)
class Load:
    """Brings a prefix to the device, or from files to the host."""

    request_id: str
    chain: Sequence[bytes]
    depth: int
    leases: list[Lease]
    waiting: set[CachedRequest] = field(default_factory=set)
    done: bool = False

    def let_go(self) -> bool:
        held, self.leases = self.leases, []
        for lease in reversed(held):
            lease.end()
        return bool(held)


class FreedRow(NamedTuple):
    issue: int  # among all rows
    writer: int  # number of its request
    unproven: Sequence[bytes]  # hashes without finite logits behind them


class Rows(dict[int, Row]):
    """Maps numbers to rows under way."""

    def __init__(self, requests: Mapping[str, CachedRequest], most_freed: int) -> None:
        super().__init__()
        self._requests = requests
        self._most_freed = most_freed
        self.freed: OrderedDict[int, FreedRow] = OrderedDict()  # until their step ends
        self.lost: set[int] = set()  # never to be issued after a rebuild

    def free(self, request: CachedRequest) -> None:
        unproven = request.chain[request.sound // request.block_size + 1 :]
        for row in request.issued:
            del self[row.step.row]
            self.freed[row.step.row] = FreedRow(row.issue, request.number, unproven)
        while len(self.freed) > self._most_freed:
            self.freed.popitem(last=False)

    def pop_freed(self, steps: Iterable[SequenceStep]) -> list[tuple[SequenceStep, FreedRow]]:
        return [(step, freed) for step in steps if (freed := self.freed.pop(step.row, None))] if self.freed else []

    def find(self, steps: Sequence[SequenceStep], ending: bool = False) -> list[Row]:
        """Return these rows, except ended rows of ended residencies."""
        get = self.get
        found = [row for step in steps if (row := get(step.row)) is not None and row.step is step]
        if len(found) == len(steps) and (len(found) == 1 or len(set(found)) == len(found)):
            return found  # fast path
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
        rows = self.find(steps)
        if len(rows) < len(steps) or any([row.residency.ended for row in rows]):
            raise RuntimeError("a request was preempted or freed after its row was allocated: plan the step without it")
        for row in rows:
            if row.planned:
                raise RuntimeError(f"{_row_of(row.step)} was planned already: plan a row once")
        return rows

    def to_issue(self, steps: Sequence[SequenceStep]) -> list[Row]:
        rows = self.find(steps)
        for row in rows:
            if row.issue or not row.planned:
                what = "issued already: issue a row once" if row.issue else "not planned: plan it first"
                raise RuntimeError(f"{_row_of(row.step)} was {what}")
        return rows

    def to_accept(
        self, steps: Sequence[SequenceStep], token_ids: Mapping[str, Sequence[int]]
    ) -> list[tuple[Row, array[int]]]:
        taken: list[tuple[Row, array[int]]] = []
        for row in self.find(steps):
            step, request = row.step, row.residency.request
            if not row.issue:
                raise RuntimeError(f"{_row_of(step)} was not issued: issue it first")
            if request.issued[0] is not row:
                raise RuntimeError(f"an earlier row of {_name(request)} was not accepted: accept it first")
            tokens = accepted_tokens(step, token_ids.get(step.request_id, ()))
            behind = len(request.tokens) - step.start - (1 if step.drafts else step.num_tokens)
            if tokens and not 0 <= behind <= step.unplaced_by:
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
    """See `PrefixCache.allocate`."""
    request, left = residency.request, residency.prefill_end - residency.computed
    if residency.row is not None:
        raise RuntimeError(f"{_name(request)} has a row that is not issued: issue, drop or cancel it first")
    if residency.drafted and residency.drafted[-1].step.unplaced_by:
        raise RuntimeError(f"{_name(request)} has drafts in flight in two steps: accept the first before the next one")
    if residency.drafted and residency.drafted[-1].step.parents:
        raise RuntimeError(f"{_name(request)} has a tree of drafts in flight: accept it before the next row")
    if num_tokens != 1 or type(num_tokens) is not int:  # fast path
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
    """See `PrefixCache.decoded`."""
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
    """See `PrefixCache.fork`."""
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
