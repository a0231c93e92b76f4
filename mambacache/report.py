"""What the cache tells: hits and waits, the report on a prompt, totals, events. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Loss(StrEnum):
    """Why tokens that had been computed before were computed again."""

    GRANULARITY = "granularity"  # beyond the last whole block that is shared
    NO_STATE = "no state there"
    EVICTED = "evicted"
    NO_CAPACITY = "no capacity"  # a checkpoint was wanted there and there was no block for it
    ONLY_NEAR = "only near"  # strict_reuse, and what is there was not computed as a cold prompt is
    NOT_ASKED = "not asked for"  # the cache is off, or the request does not read it

    def __repr__(self) -> str:
        """Return that of the plain string, so that `losses` print as a user would write them."""
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class RequestReport:
    """What the cache did for one prompt, in tokens. `losses` add up to `ceiling - hit`.

    `ceiling` is the longest prefix that the prompt shares with anything computed so far, at most its length - 1.
    `from_host` is how much of the hit was loaded from the tier in host memory, `from_disk` how much was read from files
    before that.
    """

    prompt: int
    hit: int
    ceiling: int
    losses: dict[Loss, int]
    from_host: int = 0
    from_disk: int = 0


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """A block's hash came to name a block on the device, or ceased to: what a router needs to know where a prefix is
    cached.

    `number` counts events; after a gap some were lost, and what the router believes is to be dropped.
    """

    number: int
    action: str  # "stored" or "removed"
    kind: str  # "state" or "kv"
    block_hash: bytes
    num_tokens: int  # the prefix that the hash stands for; 0 where it was removed
    request_id: str  # who stored it; "" where it was removed


class CachedBlock(NamedTuple):
    """The block of one prefix hash: its state and its KV page on the device, each 0 where it is not cached."""

    block_hash: bytes
    state: int
    page: int


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
    host_hit_tokens: int = 0  # of `hit_tokens`, those whose state or KV was loaded from host memory
    loads: int = 0  # begun, each for one prompt or more
    bytes_to_host: int = 0
    bytes_from_host: int = 0
    disk_hit_tokens: int = 0  # of `hit_tokens`, those whose state or KV was read from files; none of `host_hit_tokens`
    bytes_to_disk: int = 0
    bytes_from_disk: int = 0
    failed_transfers: int = 0
    state_blocks: dict[str, int] = field(default_factory=dict)  # by status, see `BlockPool.counts`
    log_slots: dict[str, int] = field(default_factory=dict)  # free, and held by requests that decode
    kv_blocks: dict[str, int] = field(default_factory=dict)  # empty where the host keeps the KV, and without attention
    host_states: dict[str, int] = field(default_factory=dict)  # slots in host memory; empty without such a tier
    host_pages: dict[str, int] = field(default_factory=dict)

    def add(self, report: RequestReport) -> None:
        self.requests += 1
        self.prompt_tokens += report.prompt
        self.hit_tokens += report.hit
        self.host_hit_tokens += report.from_host
        self.disk_hit_tokens += report.from_disk
        self.ceiling_tokens += report.ceiling
        for reason, tokens in report.losses.items():
            self.losses[reason] += tokens

    def __str__(self) -> str:
        """A table."""
        lost = {reason: tokens for reason, tokens in self.losses.items() if tokens}
        rows = [
            ("requests", f"{self.requests:,}"),
            ("prompt tokens", f"{self.prompt_tokens:,}"),
            ("hit", _share(self.hit_tokens, self.prompt_tokens)),
            ("computed before", _share(self.ceiling_tokens, self.prompt_tokens)),
            *((f"  lost: {reason}", f"{tokens:,}") for reason, tokens in lost.items()),
            ("preemptions, waits", f"{self.preemptions:,}, {self.waits:,}"),
            ("states stored, evicted", f"{self.states_stored:,}, {self.states_evicted:,}"),
            ("state blocks", _in_words(self.state_blocks)),
            ("token logs", _in_words(self.log_slots)),
            ("KV blocks", _in_words(self.kv_blocks)),
            *(self._host_rows() if self.host_states else ()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _host_rows(self) -> list[tuple[str, str]]:
        return [
            ("hit from host memory", _share(self.host_hit_tokens, self.prompt_tokens)),
            ("loads, failed transfers", f"{self.loads:,}, {self.failed_transfers:,}"),
            ("bytes to host, back", f"{self.bytes_to_host:,}, {self.bytes_from_host:,}"),
            *(self._disk_rows() if self.bytes_to_disk or self.bytes_from_disk else ()),
            ("host states", _in_words(self.host_states)),
            ("host KV blocks", _in_words(self.host_pages)),
        ]

    def _disk_rows(self) -> list[tuple[str, str]]:
        return [
            ("hit from files", _share(self.disk_hit_tokens, self.prompt_tokens)),
            ("bytes to files, back", f"{self.bytes_to_disk:,}, {self.bytes_from_disk:,}"),
        ]


def _share(tokens: int, of: int) -> str:
    return f"{tokens:,} ({tokens / of:.1%})" if of else f"{tokens:,}"


def _in_words(blocks: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {status}" for status, count in blocks.items()) or "none"


@dataclass(frozen=True, slots=True)
class Hit:
    """What a prompt finds in the cache.

    Attributes:
        num_tokens: prompt tokens that need not be computed, a multiple of the block size.
        junction: where the prompt leaves what others computed, in tokens; 0 if that is no deeper than the hit.
        exact: whether the state, and the KV before it, were computed as a cold prefill computes them; None where the
            host keeps the KV, of which the cache knows nothing.
        waits_for: a running request that is about to compute a longer common prefix, or None.
        losses: tokens that others computed and that are computed again, by reason.
    """

    num_tokens: int
    junction: int
    exact: bool | None
    waits_for: str | None
    losses: dict[Loss, int]


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request cannot run now; nothing was taken.

    Attributes:
        reason: "no room" (of states or KV), "prefix" (another request computes it), "loading" (it is being copied from
            host memory, or read from files) or "in flight" (tokens of a step issued for it have not been read).
        on: for "prefix" the request that computes it, for "loading" the one for which that began; and `until` the
            position after which it is there.
    """

    reason: str
    on: str | None = None
    until: int = 0


class Progress(NamedTuple):
    """How far a running request came, in tokens."""

    computed: int  # by issued steps
    prefill_end: int  # known at its admission: up to there it prefills
    in_flight: int  # that issued steps will give
    proven: int  # the blocks behind this position are its own, and no finite logits followed them yet
