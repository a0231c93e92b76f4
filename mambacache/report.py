"""Define the cache's results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Loss(StrEnum):
    """Names why tokens were computed again."""

    GRANULARITY = "granularity"  # behind the last whole shared block
    NO_STATE = "no state there"
    EVICTED = "evicted"
    NO_CAPACITY = "no capacity"  # no block was free for a wanted checkpoint
    ONLY_NEAR = "only near"  # strict_reuse rejects blocks not computed as in a cold prefill
    NOT_ASKED = "not asked for"  # the cache is off, or read_cache is False

    def __repr__(self) -> str:
        """Return the repr of the plain string."""
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Reports on one prompt, in tokens.

    Attributes:
        ceiling: Longest prefix shared with anything computed so far, at most `prompt - 1`.
        losses: Tokens by reason, `ceiling - hit` in total.
        from_host: Part of the hit loaded from host memory.
        from_disk: Part of the hit read from files.
    """

    prompt: int
    hit: int
    ceiling: int
    losses: dict[Loss, int]
    from_host: int = 0
    from_disk: int = 0


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Tells a router of a block stored on the device or removed.

    A gap in `number` means lost events: start from an empty view.
    """

    number: int
    action: str  # "stored" or "removed"
    kind: str  # "state" or "kv"
    block_hash: bytes
    num_tokens: int  # length of the prefix; 0 if removed
    request_id: str  # request that stored the block; "" if removed


class CachedBlock(NamedTuple):
    """Holds the ids of a prefix hash's state and KV page, 0 if not cached on the device."""

    block_hash: bytes
    state: int
    page: int


@dataclass(slots=True)
class CacheStats:
    """Counts totals since the cache was created."""

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
    host_hit_tokens: int = 0  # part of `hit_tokens`
    loads: int = 0
    bytes_to_host: int = 0
    bytes_from_host: int = 0
    disk_hit_tokens: int = 0  # part of `hit_tokens`, not of `host_hit_tokens`
    bytes_to_disk: int = 0
    bytes_from_disk: int = 0
    failed_transfers: int = 0
    state_blocks: dict[str, int] = field(default_factory=dict)  # by status, see `BlockPool.counts`
    log_slots: dict[str, int] = field(default_factory=dict)  # free, and held by decoding requests
    kv_blocks: dict[str, int] = field(default_factory=dict)  # empty without KV pages
    host_states: dict[str, int] = field(default_factory=dict)  # empty without a host tier
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
    """Describes the prefix hit of a prompt.

    Attributes:
        num_tokens: Prompt tokens not computed, a multiple of the block size.
        junction: End of the prefix that others computed, in tokens; 0 if not behind the hit.
        exact: Whether a cold prefill computes the same state and KV; None if the host engine keeps the KV.
        waits_for: Running request that will compute a longer common prefix, or None.
    """

    num_tokens: int
    junction: int
    exact: bool | None
    waits_for: str | None
    losses: dict[Loss, int]


@dataclass(frozen=True, slots=True)
class Wait:
    """Tells why a request cannot run now; it allocated nothing.

    Attributes:
        reason: "no room" for states or KV, "prefix" (another request computes it), "loading" (from host memory or
            files) or "in flight" (tokens of an issued step are not read yet).
        on: Request that computes the prefix, or request that the load began for.
        until: Position where the prefix or load ends.
    """

    reason: str
    on: str | None = None
    until: int = 0


class Progress(NamedTuple):
    """Holds positions of a running request, in tokens."""

    computed: int  # end of tokens that issued steps compute
    prefill_end: int  # end of the prefill, fixed at admission
    in_flight: int  # tokens that issued steps will return
    proven: int  # behind it only this request uses its blocks, until finite logits follow
