"""Define the cache's results."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Loss(StrEnum):
    """Names reasons to compute tokens again."""

    GRANULARITY = "granularity"  # behind the last whole shared block
    NO_STATE = "no state there"
    EVICTED = "evicted"
    NO_CAPACITY = "no capacity"  # no block was free for a wanted checkpoint
    ONLY_NEAR = "only near"  # strict_reuse rejects inexact blocks
    NOT_ASKED = "not asked for"  # the cache is off, or read_cache is False

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class RequestReport:
    """Reports on one prompt, in tokens."""

    prompt: int
    hit: int
    ceiling: int  # longest prefix computed before, at most `prompt - 1`
    losses: dict[Loss, int]  # `ceiling - hit` in total
    from_host: int = 0  # part of the hit
    from_disk: int = 0  # part of the hit


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """Tells a router of a block stored or removed.

    After a gap in `number`, events are lost: start from an empty view.
    """

    number: int
    action: str  # "stored" or "removed"
    kind: str  # "state" or "kv"
    block_hash: bytes
    num_tokens: int  # of the prefix; 0 if removed or copied
    request_id: str  # that stored the block; "" if removed or copied
    on_host: bool


class CachedBlock(NamedTuple):
    """Holds the state and KV page of a prefix hash, 0 if not on the device."""

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
    disk_hit_tokens: int = 0  # another part
    bytes_to_disk: int = 0
    bytes_from_disk: int = 0
    failed_transfers: int = 0
    state_blocks: dict[str, int] = field(default_factory=dict)  # by status
    log_slots: dict[str, int] = field(default_factory=dict)  # by status
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
    """Describes the prefix hit of a prompt, in tokens."""

    num_tokens: int  # whole blocks
    junction: int  # end of the prefix that others computed; 0 if not behind the hit
    exact: bool | None  # None if the host engine keeps the KV
    waits_for: str | None  # running request that will compute a longer common prefix
    losses: dict[Loss, int]


@dataclass(frozen=True, slots=True)
class Wait:
    """Tells why a request cannot run now; it allocated nothing.

    Attributes:
        reason: "no room" for states or KV, "prefix" (another request computes it), "loading" (from host memory or
            files) or "in flight" (tokens of an issued step are not read yet).
    """

    reason: str
    on: str | None = None  # request that computes the prefix, or began the load
    until: int = 0  # end of the prefix or load, in tokens


class Progress(NamedTuple):
    """Holds positions of a running request, in tokens."""

    computed: int  # by issued steps
    prefill_end: int  # fixed at admission
    in_flight: int  # tokens that issued steps will return
    proven: int  # no other request uses blocks behind it
