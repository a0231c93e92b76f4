"""What the cache knows of one request, of its life while it runs, and of its rows under way: pure data."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mambacache.accounting.ledger import Trace
from mambacache.cache.chains import Rank, Turn
from mambacache.cache.policy import Wish
from mambacache.cache.pool import Lease
from mambacache.plan import SequenceStep
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
    life: Life | None = None  # None while it waits
    waits: tuple[Life, int] | None = None  # the life that computes a prefix of it, and the position that it waits for
    load: Load | None = None  # the load from host memory or files that it waits for
    may_load: bool = True  # False after a load from host memory, until it runs
    may_read: bool = True  # False after a load from files, until it runs
    hit_before: int | None = None  # after how many blocks it could have resumed without the loads that it waited for
    held_before: int | None = None  # the same with what the host's memory had, without files
    lined: int = 0  # leading blocks of the chain that `Lookup` counts as waited for
    issued: list[Row] = field(default_factory=list)  # rows whose tokens have not been read, oldest first
    in_flight: int = 0  # how many of them will give a token
    leaving: Row | None = None  # planned in a life that ended, and neither issued nor given up
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
class Life:
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
    life: Life
    dst: Lease | None  # None where a decode row has no dst, or writes its running state in place
    near_before: int  # the life's `inexact_from` and its number of pages before the row
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
