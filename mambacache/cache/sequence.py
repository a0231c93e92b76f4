"""What the cache knows of one request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from mambacache.cache.report import RequestReport
from mambacache.cache.retention import Wish

ALWAYS_EXACT = 1 << 62


@dataclass(frozen=True, slots=True)
class Promise:
    """A running request, in one of its lives, is about to compute a prefix that others wait for."""

    writer: CachedSequence
    epoch: int
    boundary: int


@dataclass(slots=True, eq=False)
class CachedSequence:
    """One request: its tokens, their hash chain and, while it runs, the blocks it holds by reference."""

    request_id: str
    tokens: array[int]  # all that the host knows: prompt and answer
    prompt_len: int
    salt: str
    marks: tuple[int, ...]
    read: bool
    store: bool
    chain: list[bytes]  # the root, then the hash of each whole block of known tokens
    report: RequestReport | None = None  # made at the first admission
    waits: Promise | None = None
    in_flight: int = 0  # issued steps whose tokens have not been read
    epoch: int = 0  # counts the lives that ended by preemption or release
    stale: bool = False  # holds blocks from before a reset: commits nothing more

    # while running
    running: bool = False
    row: int = 0  # of the block table
    computed: int = 0  # tokens consumed by issued steps
    prefill_end: int = 0  # tokens known at admission: these run in the prefill kernels
    near_from: int = ALWAYS_EXACT  # states at later positions, and KV blocks that end later, are near
    state: int = 0
    conv: int = 0  # the block that holds the conv window; another one than `state` only after drafts
    conv_offset: int = 0
    reserve: int = 0  # taken at admission: the first step's dst
    drafted: tuple[int, ...] = ()  # dst blocks of a step with drafts whose acceptance is not known yet
    kv: list[int] = field(default_factory=list)
    kv_shared: int = 0  # leading KV blocks that others wrote
    kv_source: int = 0  # the page to copy to the one after these before the next step; held until that is issued
    advanced: int = 0  # leading blocks whose KV was committed and whose tokens went into the record
    wishes: dict[int, Wish] = field(default_factory=dict)
    pending: list[tuple[int, int]] = field(default_factory=list)  # (position, block): commits that wait for tokens
    checkpoint: tuple[int, bytes] | None = None  # the last state committed where a step ended, and its hash

    def begin(self, row: int) -> None:
        """A life begins: at admission or by fork."""
        self.running, self.row = True, row
        self.waits = None
        self.prefill_end = len(self.tokens)

    def end(self) -> None:
        """A life ends: its blocks were released."""
        self.running = False
        self.epoch += 1
        self.computed = self.prefill_end = self.kv_shared = self.advanced = 0
        self.state = self.conv = self.conv_offset = self.reserve = 0
        self.near_from = ALWAYS_EXACT
        self.drafted = ()
        self.kv, self.kv_source = [], 0
        self.wishes = {}
        self.pending = []
        self.checkpoint = None
