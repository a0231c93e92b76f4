"""Why a prompt was not reused in full: the ceiling, the hit, the loss between them by reason; counters and events."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

TOKEN_BYTES = 4


class Loss(StrEnum):
    """Why tokens that had been computed before were computed again."""

    GRANULARITY = "granularity"  # beyond the last whole block that is shared
    NO_STATE = "no state there"
    EVICTED = "evicted"
    NO_CAPACITY = "no capacity"  # a checkpoint was wanted there and there was no block for it
    ONLY_NEAR = "only near"  # strict_reuse, and what is there was not computed as a cold prompt is
    NOT_ASKED = "not asked for"  # the cache is off, or the request does not read it


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What the cache did for one prompt, in tokens. `losses` add up to `ceiling - hit`.

    `ceiling` is the longest prefix that the prompt shares with anything computed so far, at most its length - 1.
    """

    prompt: int
    hit: int
    ceiling: int
    losses: dict[Loss, int]


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A block's hash came to name a block, or ceased to: what a router needs to know where a prefix is cached."""

    action: str  # "stored" or "removed"
    kind: str  # "state" or "kv"
    block_hash: bytes
    num_tokens: int  # the prefix that the hash stands for; 0 where it was removed
    request_id: str  # who stored it; "" where it was removed


@dataclass(slots=True)
class CacheStats:
    """Totals since the cache was made."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    ceiling_tokens: int = 0
    losses: dict[Loss, int] = field(default_factory=lambda: dict.fromkeys(Loss, 0))
    preemptions: int = 0
    waits: int = 0
    states_stored: int = 0
    states_evicted: int = 0
    kv_evicted: int = 0
    state_blocks: dict[str, int] = field(default_factory=dict)  # by status, see `BlockPool.counts`
    kv_blocks: dict[str, int] = field(default_factory=dict)  # empty where the host keeps the KV, and without attention

    def add(self, report: RequestReport) -> None:
        self.requests += 1
        self.prompt_tokens += report.prompt
        self.hit_tokens += report.hit
        self.ceiling_tokens += report.ceiling
        for reason, tokens in report.losses.items():
            self.losses[reason] += tokens


class ComputedRecord:
    """A bounded memory of the token prefixes that were computed, and of what became of their states.

    Each computed block hash has the token blocks (and partial tails) that followed it, sorted as bytes: the longest
    common prefix with any of them is that with one of the two neighbours in that order.
    """

    def __init__(self, block_size: int, max_tokens: int) -> None:
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._followers: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._fates: OrderedDict[bytes, Loss] = OrderedDict()

    def add(self, parent: bytes, tokens: bytes, block_hash: bytes | None = None) -> None:
        """`tokens` (int32) were computed after the prefix `parent`; a whole block also has its hash."""
        followers = self._followers.setdefault(parent, [])
        at = bisect_left(followers, tokens)
        if not (at < len(followers) and followers[at].startswith(tokens)):
            followers.insert(at, tokens)
            self._num_tokens += len(tokens) // TOKEN_BYTES
        if block_hash is not None:
            self._followers.setdefault(block_hash, [])
        while self._num_tokens > self._max_tokens:
            _, dropped = self._followers.popitem(last=False)
            self._num_tokens -= sum(map(len, dropped)) // TOKEN_BYTES

    def touch(self, chain: Sequence[bytes]) -> None:
        """Makes a chain the last to be dropped, its beginning last of all."""
        for block_hash in reversed(chain):
            if block_hash in self._followers:
                self._followers.move_to_end(block_hash)

    def longest(self, chain: Sequence[bytes], tokens: bytes) -> int:
        """Tokens at the beginning of `tokens` that were computed before; `chain` is the root and the block hashes."""
        if chain[0] not in self._followers:
            return 0
        depth = 0
        while depth + 1 < len(chain) and chain[depth + 1] in self._followers:
            depth += 1
        block = self._block_size * TOKEN_BYTES
        rest = tokens[depth * block : (depth + 1) * block]
        followers = self._followers[chain[depth]]
        at = bisect_left(followers, rest)
        common = max((common_tokens(other, rest) for other in followers[max(at - 1, 0) : at + 1]), default=0)
        return depth * self._block_size + common

    def set_fate(self, block_hash: bytes, fate: Loss) -> None:
        """A state is not at this prefix, and this is why."""
        self._fates[block_hash] = fate
        self._fates.move_to_end(block_hash)
        if len(self._fates) * self._block_size > self._max_tokens:
            self._fates.popitem(last=False)

    def clear_fate(self, block_hash: bytes) -> None:
        self._fates.pop(block_hash, None)

    def fate(self, block_hash: bytes) -> Loss | None:
        return self._fates.get(block_hash)


def common_tokens(a: bytes, b: bytes) -> int:
    """How many leading tokens two strings of int32 tokens share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // TOKEN_BYTES
    low, high = 0, length  # the first low bytes are equal, the first high bytes are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low // TOKEN_BYTES


def partition_loss(
    hit: int, ceiling: int, block_size: int, causes: Sequence[Loss | None], not_asked: bool
) -> dict[Loss, int]:
    """Splits ceiling - hit by reason.

    Args:
        causes: for each boundary after the hit, in order, why no state was found there; None if none was put there.
            A block's loss goes to the cause at the nearest boundary at or above it.
    """
    losses: dict[Loss, int] = {}
    if not_asked:
        return {Loss.NOT_ASKED: ceiling} if ceiling else losses
    if ceiling % block_size:
        losses[Loss.GRANULARITY] = ceiling % block_size
    cause = Loss.NO_STATE
    for own in reversed(causes[: (ceiling - hit) // block_size]):
        cause = own or cause
        losses[cause] = losses.get(cause, 0) + block_size
    return losses
