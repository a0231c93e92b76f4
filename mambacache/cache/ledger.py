"""Count totals and events; decide nothing."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mambacache.report import CacheEvent, CacheStats, Loss, RequestReport

TOKEN_BYTES = 4


class Branch:
    """Holds tokens after its parent; `end` is the token depth, -1 once dropped."""

    __slots__ = ("children", "end", "parent", "tokens")

    def __init__(self, parent: Branch | None, tokens: bytes, end: int) -> None:
        self.parent = parent
        self.tokens = bytearray(tokens)
        self.end = end
        self.children: dict[bytes, Branch] = {}  # by first token


class TokenRecord:
    """Stores token prefixes, up to `max_tokens`."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = 0
        self._roots: dict[bytes, Branch] = {}
        self._leaves: OrderedDict[Branch, None] = OrderedDict()  # least recently used first

    def longest(self, root: bytes, tokens: bytes) -> int:
        """Count leading `tokens`, int32, computed before."""
        branch = self._roots.get(root)
        if branch is None:
            return 0
        _, common, beyond = self._descend(branch, tokens, 0)
        return (common + beyond) // TOKEN_BYTES

    def add(self, root: bytes, tokens: bytes, known: Branch | None) -> Branch:
        """Record int32 tokens after `known`, an earlier result that still ends there, or the root."""
        branch = known
        if branch is None:
            branch = self._roots.get(root)
            if branch is None:
                branch = self._roots[root] = Branch(None, b"", 0)
        branch, at, beyond = self._descend(branch, tokens, 0)
        if beyond:
            branch = self._split(branch.children[tokens[at : at + TOKEN_BYTES]], beyond)
            at += beyond
        rest = tokens[at:]
        if rest and branch.parent is not None and not branch.children:
            branch.tokens += rest
            branch.end += len(rest) // TOKEN_BYTES
        elif rest:
            self._leaves.pop(branch, None)
            grown = Branch(branch, rest, branch.end + len(rest) // TOKEN_BYTES)
            branch.children[rest[:TOKEN_BYTES]] = grown
            branch = grown
        if branch.parent is not None and not branch.children:
            self._leaves[branch] = None
            self._leaves.move_to_end(branch)
        self.num_tokens += len(rest) // TOKEN_BYTES
        while self.num_tokens > self._max_tokens:
            self._cut(self.num_tokens - self._max_tokens)
        return branch

    def _descend(self, branch: Branch, tokens: bytes, at: int) -> tuple[Branch, int, int]:
        """Return the last whole match, its end in bytes, and the bytes matched beyond."""
        while True:
            child = branch.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                return branch, at, 0
            common = common_tokens(child.tokens, tokens[at : at + len(child.tokens)]) * TOKEN_BYTES
            if common < len(child.tokens):
                return branch, at, common
            branch, at = child, at + common

    def _split(self, branch: Branch, size: int) -> Branch:
        parent = branch.parent
        assert parent is not None
        upper = Branch(parent, bytes(branch.tokens[:size]), branch.end - (len(branch.tokens) - size) // TOKEN_BYTES)
        parent.children[bytes(branch.tokens[:TOKEN_BYTES])] = upper
        del branch.tokens[:size]
        branch.parent = upper
        upper.children[bytes(branch.tokens[:TOKEN_BYTES])] = branch
        return upper

    def _cut(self, count: int) -> None:
        branch = next(iter(self._leaves))
        count = min(count, len(branch.tokens) // TOKEN_BYTES)
        first = bytes(branch.tokens[:TOKEN_BYTES])
        del branch.tokens[len(branch.tokens) - count * TOKEN_BYTES :]
        branch.end -= count
        self.num_tokens -= count
        if branch.tokens:
            return
        parent = branch.parent
        assert parent is not None
        del self._leaves[branch], parent.children[first]
        branch.parent, branch.end = None, -1
        if parent.parent is not None and not parent.children:
            self._leaves[parent] = None
            self._leaves.move_to_end(parent, last=False)
        elif not parent.children:
            self._roots = {key: root for key, root in self._roots.items() if root is not parent}
            parent.end = -1


def common_tokens(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Count shared int32 tokens."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // TOKEN_BYTES
    low, high = 0, length  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low // TOKEN_BYTES


MAX_EVENTS = 1 << 16


@dataclass(slots=True, eq=False)
class Trace:
    """Tracks a residency's computed tokens; `read` returns int32 bytes."""

    root: bytes
    read: Callable[[int, int], bytes]
    computed: int = 0
    recorded: int = 0
    branch: Branch | None = None


class Ledger:
    """Observes commits, evictions and hits; records nothing unless `on`."""

    def __init__(self, block_size: int, record_tokens: int, on: bool) -> None:
        self._block_size = block_size
        self._record_tokens = record_tokens
        self.on = on
        self._stats = CacheStats()
        self._events: deque[CacheEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self.start_over()

    def start_over(self) -> None:
        """Forget all blocks, and skip an event number."""
        self._record = TokenRecord(self._record_tokens)
        self._unrecorded: dict[Trace, None] = {}
        self._fates: OrderedDict[bytes, Loss] = OrderedDict()
        self._num_events += 1

    def stored(self, kind: str, block_hash: bytes, position: int, request_id: str) -> None:
        if not self.on:
            return
        self._event("stored", kind, block_hash, position, request_id)
        if kind == "state":
            self._fates.pop(block_hash, None)
            self._stats.states_stored += 1

    def loaded(self, kind: str, block_hash: bytes, position: int, request_id: str) -> None:
        if self.on:
            self._event("stored", kind, block_hash, position, request_id)
            self._fates.pop(block_hash, None)

    def stored_on_host(self, kind: str, block_hash: bytes, position: int, request_id: str) -> None:
        if self.on:
            self._event("stored", kind, block_hash, position, request_id, on_host=True)

    def removed_from_host(self, kind: str, block_hash: bytes) -> None:
        if self.on:
            self._event("removed", kind, block_hash, 0, "", on_host=True)

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
        if self.on:
            self._set_fate(block_hash, Loss.NO_CAPACITY)

    def computed(self, trace: Trace, num_tokens: int) -> None:
        if self.on:
            trace.computed = num_tokens
            self._unrecorded[trace] = None

    def ended(self, trace: Trace) -> None:
        if self._unrecorded.pop(trace, 0) is None:
            self._add_to_record(trace)

    def loads(self) -> None:
        self._stats.loads += self.on

    def transferred(self, to_host: bool, num_bytes: int, failed: bool, files: bool) -> None:
        """Count a copy; `files`: between host and files."""
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
        if self.on:
            self._stats.add(report)

    def longest_computed(self, root: bytes, tokens: bytes) -> int:
        for trace in self._unrecorded:
            self._add_to_record(trace)
        self._unrecorded.clear()
        return self._record.longest(root, tokens) if self.on else 0

    def fate(self, block_hash: bytes) -> Loss | None:
        """Return why this state is missing; None if unknown."""
        return self._fates.get(block_hash)

    def stats(self) -> CacheStats:
        return replace(self._stats, losses=dict(self._stats.losses))

    def take_events(self) -> list[CacheEvent]:
        events = list(self._events)
        self._events.clear()
        return events

    def _add_to_record(self, trace: Trace) -> None:
        known = trace.branch if trace.branch is not None and trace.branch.end == trace.recorded else None
        tokens = trace.read(trace.recorded if known is not None else 0, trace.computed)
        if tokens:
            trace.branch = self._record.add(trace.root, tokens, known)
            trace.recorded = trace.branch.end

    def _event(
        self, action: str, kind: str, block_hash: bytes, num_tokens: int, request_id: str, on_host: bool = False
    ) -> None:
        self._num_events += 1
        self._events.append(CacheEvent(self._num_events, action, kind, block_hash, num_tokens, request_id, on_host))

    def _set_fate(self, block_hash: bytes, fate: Loss) -> None:
        self._fates[block_hash] = fate
        self._fates.move_to_end(block_hash)
        if len(self._fates) * self._block_size > self._record_tokens:
            self._fates.popitem(last=False)


def partition_loss(
    hit: int, ceiling: int, block_size: int, causes: Sequence[Loss | None], not_asked: bool
) -> dict[Loss, int]:
    """Split `ceiling - hit` tokens by reason: a block's is the first cause at or after its boundary."""
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
