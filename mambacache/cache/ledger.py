"""Totals, fates of blocks, events and reports: the ledger watches the cache, decides nothing, and can be off."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mambacache.report import CacheEvent, CacheStats, Loss, RequestReport

TOKEN_BYTES = 4


class Branch:
    """Tokens that follow those of its parent, and what followed them.

    `end` is the number of tokens from the beginning to its own last one; 0 for a root, -1 for one that was dropped.
    """

    __slots__ = ("children", "end", "parent", "tokens")

    def __init__(self, parent: Branch | None, tokens: bytes, end: int) -> None:
        self.parent = parent
        self.tokens = bytearray(tokens)
        self.end = end
        self.children: dict[bytes, Branch] = {}  # by their first token


class TokenRecord:
    """A tree of token prefixes. Beyond `max_tokens` the branch that was used longest ago is cut from its end.

    It takes 4 to 5 bytes a token, and some 400 for each branch.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.num_tokens = 0
        self._roots: dict[bytes, Branch] = {}
        self._leaves: OrderedDict[Branch, None] = OrderedDict()  # longest unused first

    def longest(self, root: bytes, tokens: bytes) -> int:
        """Tokens at the beginning of `tokens` (int32) that were computed before under this root."""
        branch = self._roots.get(root)
        if branch is None:
            return 0
        _, common, beyond = self._descend(branch, tokens, 0)
        return (common + beyond) // TOKEN_BYTES

    def add(self, root: bytes, tokens: bytes, known: Branch | None) -> Branch:
        """These tokens were computed.

        Args:
            tokens: int32, from the beginning if `known` is None, else from its end.
            known: the branch at whose end they go on, as an earlier call gave it; it still ends there.

        Returns:
            The branch that ends with them.
        """
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
        """From the end of `branch` along `tokens[at:]`: the last branch that is met whole, the bytes of `tokens` up to
        its end, and the bytes that the next one shares beyond it."""
        while True:
            child = branch.children.get(tokens[at : at + TOKEN_BYTES])
            if child is None:
                return branch, at, 0
            common = common_tokens(child.tokens, tokens[at : at + len(child.tokens)]) * TOKEN_BYTES
            if common < len(child.tokens):
                return branch, at, common
            branch, at = child, at + common

    def _split(self, branch: Branch, size: int) -> Branch:
        """A new branch of the first `size` bytes of one, which keeps the rest."""
        parent = branch.parent
        assert parent is not None
        upper = Branch(parent, bytes(branch.tokens[:size]), branch.end - (len(branch.tokens) - size) // TOKEN_BYTES)
        parent.children[bytes(branch.tokens[:TOKEN_BYTES])] = upper
        del branch.tokens[:size]
        branch.parent = upper
        upper.children[bytes(branch.tokens[:TOKEN_BYTES])] = branch
        return upper

    def _cut(self, count: int) -> None:
        """Drops up to `count` tokens of the branch that was used longest ago."""
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
    """How many leading tokens two strings of int32 tokens share."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // TOKEN_BYTES
    low, high = 0, length  # the first low bytes are equal, the first high bytes are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low // TOKEN_BYTES


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
