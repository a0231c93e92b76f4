"""What became of prompts: the ceiling, the hit, the loss between them by reason; counters; events for routers.

It only watches: with `accounting` off, nothing that is cached changes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mambacache.accounting.record import Branch, TokenRecord
from mambacache.report import CacheEvent, CacheStats, Loss, RequestReport

MAX_EVENTS = 1 << 16


@dataclass(slots=True, eq=False)
class Trace:
    """What one running request computes, for the record.

    `read(start, end)` gives its known tokens there as int32 bytes; `root` is where its hash chain begins.
    """

    root: bytes
    read: Callable[[int, int], bytes]
    computed: int = 0
    recorded: int = 0  # tokens that the record has of it, and the branch where they end
    branch: Branch | None = None


class Ledger:
    """Observes commits, evictions and hits.

    Args:
        block_size: tokens in a block.
        record_tokens: tokens remembered for ceilings.
        on: False to note nothing but how much was hit.
    """

    def __init__(self, block_size: int, record_tokens: int, on: bool) -> None:
        self._block_size = block_size
        self._record_tokens = record_tokens
        self.on = on
        self._stats = CacheStats()
        self._events: deque[CacheEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self.start_over()

    def start_over(self) -> None:
        """The books were rebuilt: what is known of blocks is gone, and readers of events see a gap."""
        self._record = TokenRecord(self._record_tokens)
        self._unrecorded: dict[Trace, None] = {}
        self._fates: OrderedDict[bytes, Loss] = OrderedDict()
        self._num_events += 1

    # --- what happens ---

    def stored(self, kind: str, block_hash: bytes, position: int, request_id: str) -> None:
        if not self.on:
            return
        self._event("stored", kind, block_hash, position, request_id)
        if kind == "state":
            self._fates.pop(block_hash, None)
            self._stats.states_stored += 1

    def loaded(self, kind: str, block_hash: bytes, position: int, request_id: str) -> None:
        """A block came back from the host's memory."""
        if self.on:
            self._event("stored", kind, block_hash, position, request_id)
            self._fates.pop(block_hash, None)

    def removed(self, kind: str, block_hash: bytes, evicted: bool) -> None:
        if not self.on:
            return
        self._event("removed", kind, block_hash, 0, "")
        if evicted:
            self._set_fate(block_hash, Loss.EVICTED)
            if kind == "state":
                self._stats.states_evicted += 1
            else:
                self._stats.kv_evicted += 1

    def refused(self, block_hash: bytes) -> None:
        """A state was wanted there and there was no block for it."""
        if self.on:
            self._set_fate(block_hash, Loss.NO_CAPACITY)

    def computed(self, trace: Trace, num_tokens: int) -> None:
        """So many tokens are computed by now. They are recorded when somebody asks, or when that ends."""
        if self.on:
            trace.computed = num_tokens
            self._unrecorded[trace] = None

    def ended(self, trace: Trace) -> None:
        if self._unrecorded.pop(trace, 0) is None:
            self._add_to_record(trace)

    def loads(self) -> None:
        self._stats.loads += self.on

    def transferred(self, to_host: bool, num_bytes: int, failed: bool, files: bool) -> None:
        """So much was copied between device and host, or between host and files; or that failed."""
        if not self.on:
            return
        if failed:
            self._stats.failed_transfers += 1
        elif files and to_host:
            self._stats.bytes_from_disk += num_bytes
        elif files:
            self._stats.bytes_to_disk += num_bytes
        elif to_host:
            self._stats.bytes_to_host += num_bytes
        else:
            self._stats.bytes_from_host += num_bytes

    def waited(self) -> None:
        self._stats.waits += self.on

    def preempted(self) -> None:
        self._stats.preemptions += self.on

    def ran(self, report: RequestReport) -> None:
        """A request ran for the first time."""
        if self.on:
            self._stats.add(report)

    # --- what is asked ---

    def longest_computed(self, root: bytes, tokens: bytes) -> int:
        """Tokens at the beginning of `tokens` (int32) that were ever computed under this root, just now ones too."""
        for trace in self._unrecorded:
            self._add_to_record(trace)
        self._unrecorded.clear()
        return self._record.longest(root, tokens) if self.on else 0

    def fate(self, block_hash: bytes) -> Loss | None:
        """Why there is no state at this prefix; None if none was ever put there."""
        return self._fates.get(block_hash)

    def stats(self) -> CacheStats:
        """A snapshot of the totals."""
        return replace(self._stats, losses=dict(self._stats.losses))

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, oldest first; the latest 65,536 are kept."""
        events = list(self._events)
        self._events.clear()
        return events

    def _add_to_record(self, trace: Trace) -> None:
        known = trace.branch if trace.branch is not None and trace.branch.end == trace.recorded else None
        tokens = trace.read(trace.recorded if known is not None else 0, trace.computed)
        if tokens:
            trace.branch = self._record.add(trace.root, tokens, known)
            trace.recorded = trace.branch.end

    def _event(self, action: str, kind: str, block_hash: bytes, num_tokens: int, request_id: str) -> None:
        self._num_events += 1
        self._events.append(CacheEvent(self._num_events, action, kind, block_hash, num_tokens, request_id))

    def _set_fate(self, block_hash: bytes, fate: Loss) -> None:
        self._fates[block_hash] = fate
        self._fates.move_to_end(block_hash)
        if len(self._fates) * self._block_size > self._record_tokens:
            self._fates.popitem(last=False)


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
