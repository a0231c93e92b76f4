"""Hash token blocks into chains."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mambacache.cache.ledger import Ledger, common_tokens, partition_loss
from mambacache.cache.pages import Pages
from mambacache.cache.pool import BlockPool
from mambacache.cache.requests import ALWAYS_EXACT, CachedRequest, Residency
from mambacache.config import CacheConfig
from mambacache.report import Hit, Loss

Chain = Sequence[bytes]
"""`[root, hash of block 0, ...]`: entry i stands for the prefix of i blocks."""


def root_hash(*keys: object) -> bytes:
    """Return the root of chains that may share blocks."""
    return hashlib.blake2b(repr(keys).encode(), digest_size=16).digest()


def extend_chain(
    chain: list[bytes], tokens: array[int], block_size: int, keys: Mapping[int, bytes] | None = None
) -> None:
    """Append the whole blocks of `tokens`: blake2b-128 of the hash before, token ids, and key."""
    digest, parent, data = hashlib.blake2b, chain[-1], memoryview(tokens)
    for end in range(len(chain) * block_size, len(tokens) + 1, block_size):
        block = digest(parent, digest_size=16)
        block.update(data[end - block_size : end])
        if keys and (end // block_size - 1) in keys:
            block.update(keys[end // block_size - 1])
        parent = block.digest()
        chain.append(parent)


class Prompts:
    def __init__(self) -> None:
        self._tokens, self._chain = b"", [b""]  # last prompt without keys

    def chain(self, root: bytes, tokens: array[int], block_size: int, keys: Mapping[int, bytes]) -> list[bytes]:
        chain, given = [root], tokens.tobytes()
        if not keys and self._chain[0] == root:
            chain = self._chain[: common_tokens(given, self._tokens) // block_size + 1]
        extend_chain(chain, tokens, block_size, keys)
        if not keys:
            self._tokens, self._chain = given, chain  # may grow: only hashes of `given` are reused
        return chain


@dataclass(frozen=True, slots=True)
class Found:
    """Describes a lookup result, in blocks."""

    coverage: int = 0  # leading blocks with cached KV
    hit: int = 0
    junction: int = 0  # end of the computed prefix, if beyond the hit
    writer: Residency | None = None
    promised: int = 0  # its depth


class Lookup:
    """Finds reusable states, by hash: admissions do not scan requests."""

    def __init__(self, config: CacheConfig, states: BlockPool, pages: Pages, ledger: Ledger) -> None:
        self._states = states
        self._pages = pages
        self._ledger = ledger
        self._strict = config.strict_reuse
        self._max_seen = config.max_seen_blocks
        self._host_kv = config.host_keeps_kv
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._writers: dict[bytes, dict[Residency, None]] = {}
        self._waiting: dict[bytes, int] = {}

    def add_computed(self, block_hash: bytes) -> None:
        self._seen[block_hash] = None
        self._seen.move_to_end(block_hash)
        if len(self._seen) > self._max_seen:
            self._seen.popitem(last=False)

    def forget_seen(self) -> None:
        self._seen.clear()

    def usable(self, block_hash: bytes) -> bool:
        return self._states.reusable(block_hash, self._strict) > 0

    def find(self, chain: Chain, limit: int, junction_limit: int, host_coverage: int | None, waits: bool) -> Found:
        """Look a chain up, to depth `limit`; `host_coverage` counts leading blocks in the host's KV."""
        needs_kv = self._pages.present or host_coverage is not None
        coverage = len(chain) - 1
        if host_coverage is not None:
            coverage = min(coverage, host_coverage)
        elif self._pages.present:
            coverage = self._pages.coverage(chain, self._strict)
        hit = min(limit, coverage)
        while hit and not self.usable(chain[hit]):
            hit -= 1
        junction, met = junction_limit, min(junction_limit, coverage) if needs_kv else hit
        while junction > met and chain[junction] not in self._seen:
            junction -= 1
        junction = junction if junction > hit else 0
        for depth in range(limit, hit, -1) if waits and self._writers else ():
            for residency in self._writers.get(chain[depth], ()):
                if self.may_hit(residency, depth):
                    return Found(coverage, hit, junction, residency, depth)
        return Found(coverage, hit, junction)

    def inexact_from(self, request: CachedRequest, found: Found) -> int:
        block = self._states.lookup(request.chain[found.hit]) if found.hit else None
        if block is not None and not self._states.exact[block]:
            return 0
        return self._pages.exact_until(request.chain, found.coverage) if found.coverage else ALWAYS_EXACT

    def hit(self, request: CachedRequest, found: Found) -> Hit:
        size = self._pages.block_size
        hit = found.hit * size
        longest = self._ledger.longest_computed(request.chain[0], request.token_bytes(0, len(request.tokens)))
        ceiling = max(hit, min(len(request.tokens) - 1, longest))
        losses: dict[Loss, int] = {}
        if ceiling > hit:
            causes = [self._cause(request, found, depth) for depth in range(found.hit + 1, ceiling // size + 1)]
            losses = partition_loss(hit, ceiling, size, causes, not_asked=not request.read)
        exact = None if self._host_kv and hit else self.inexact_from(request, found) >= hit
        writer = found.writer.request.request_id if found.writer is not None else None
        return Hit(hit, found.junction * size, exact, writer, losses)

    def _cause(self, request: CachedRequest, found: Found, depth: int) -> Loss | None:
        if self._states.lookup(request.chain[depth]) is None:
            return self._ledger.fate(request.chain[depth])
        if depth <= found.coverage:
            return Loss.ONLY_NEAR
        gone = self._pages.pool.lookup(request.chain[found.coverage + 1]) is None
        return Loss.EVICTED if gone else Loss.ONLY_NEAR

    def may_hit(self, residency: Residency, depth: int) -> bool:
        return not self._strict or self._pages.block_size * depth <= residency.inexact_from

    def writes(self, residency: Residency, chain: Chain) -> None:
        for depth in range(residency.announced + 1, len(chain)):
            self._writers.setdefault(chain[depth], {})[residency] = None
        residency.announced = len(chain) - 1

    def wrote(self, residency: Residency, chain: Chain, depth: int) -> None:
        for block_hash in chain[residency.written + 1 : min(depth, residency.announced) + 1]:
            residencies = self._writers[block_hash]
            if len(residencies) == 1:
                del self._writers[block_hash]
            else:
                del residencies[residency]
        residency.written = max(depth, residency.written)
        residency.announced = max(residency.announced, residency.written)

    def lengthen(self, residency: Residency) -> None:
        request, size = residency.request, self._pages.block_size
        if len(request.tokens) < len(request.chain) * size:
            return
        extend_chain(request.chain, request.tokens, size, request.keys)
        if residency.ended:
            self.wait_no_more(request)
            self.wait(request)
        elif request.store and not request.stale:
            self.writes(residency, request.chain)

    def wait(self, request: CachedRequest) -> None:
        request.lined = (len(request.tokens) - 1) // self._pages.block_size if request.read else 0
        counts = self._waiting
        for block_hash in request.chain[1 : request.lined + 1]:
            counts[block_hash] = counts.get(block_hash, 0) + 1

    def wait_no_more(self, request: CachedRequest) -> None:
        counts = self._waiting
        for block_hash in request.chain[1 : request.lined + 1]:
            left = counts[block_hash] - 1
            if left:
                counts[block_hash] = left
            else:
                del counts[block_hash]
        request.lined = 0

    def awaited(self, chain: Chain, first: int, last: int) -> list[int]:
        """Return depths where waiting requests leave this chain or end."""
        found, counts = [], self._waiting
        here = counts.get(chain[first], 0) if counts and first <= last else 0
        for depth in range(first, last + 1):
            if not here:
                break
            beyond = counts.get(chain[depth + 1], 0) if depth + 1 < len(chain) else 0
            if beyond < here:
                found.append(depth)
            here = beyond
        return found

    def check(self, requests: Sequence[CachedRequest]) -> None:
        writers: dict[bytes, int] = {}
        waiting: dict[bytes, int] = {}
        for request in requests:
            residency = request.residency
            entries = request.chain[residency.written + 1 : residency.announced + 1] if residency is not None else ()
            for block_hash in entries:
                writers[block_hash] = writers.get(block_hash, 0) + 1
            for block_hash in request.chain[1 : request.lined + 1]:
                waiting[block_hash] = waiting.get(block_hash, 0) + 1
        assert writers == {block_hash: len(residencies) for block_hash, residencies in self._writers.items()}, (
            "who writes"
        )
        assert waiting == self._waiting, "who waits"
