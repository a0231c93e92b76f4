"""Why a hit is not longer."""

from __future__ import annotations

from mambacache.accounting.ledger import Ledger, partition_loss
from mambacache.cache.lookup import Found
from mambacache.cache.pages import Pages
from mambacache.cache.pool import BlockPool
from mambacache.cache.request import ALWAYS_EXACT, CachedRequest
from mambacache.report import Hit, Loss


class Explainer:
    """Says what a look-up found in tokens, and why not more."""

    def __init__(self, states: BlockPool, pages: Pages, ledger: Ledger, host_kv: bool) -> None:
        self._states = states
        self._pages = pages
        self._ledger = ledger
        self._host_kv = host_kv

    def near_from(self, request: CachedRequest, found: Found) -> int:
        """The position from which states and KV computed after this hit are near."""
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
        exact = None if self._host_kv and hit else self.near_from(request, found) >= hit
        writer = found.writer.request.request_id if found.writer is not None else None
        return Hit(hit, found.junction * size, exact, writer, losses)

    def _cause(self, request: CachedRequest, found: Found, depth: int) -> Loss | None:
        """Why a request does not resume after `depth` blocks; None if nothing was ever put there."""
        if self._states.lookup(request.chain[depth]) is None:
            return self._ledger.fate(request.chain[depth])
        if depth <= found.coverage:
            return Loss.ONLY_NEAR
        # The state is there, but not all KV before it.
        gone = not self._pages.holds(request.chain[found.coverage + 1])
        return Loss.EVICTED if gone else Loss.ONLY_NEAR
