"""Value the states of a pool, and find the KV that they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mambacache.cache.pool import BlockPool
from mambacache.cache.retention import SPARE, Kind, Needs, Record, Reuse, Turn


class Values:
    """Values states by their records. States with a value need the KV before them, and have an heir."""

    def __init__(self, states: BlockPool, reuse: Reuse, on_need: Callable[[bytes, bool], None]) -> None:
        self._states, self._reuse = states, reuse
        self.needs = Needs(on_need, states.set_leaf)
        states.on_valued, states.heir, states.idle.gain = self._on_valued, self._heir, self._gain

    def value(self, block: int, kind: Kind = Kind.BRANCH, turn: Turn | None = None) -> None:
        """Note a use of a state, and let its record decide on eviction."""
        chain, depth = self._states.prefix[block]
        record = self._reuse.records.get(chain[depth]) or Record(kind, turn or Turn(depth), self._reuse.now)
        self._states.promote(block, self._reuse.group(record) + self.needs.has_below(chain[depth]))

    def _on_valued(self, block: int, valued: bool) -> None:
        chain, depth = self._states.prefix[block]
        if valued:
            self.needs.add(chain, depth)
            self._states.set_leaf(chain[depth], not self.needs.has_below(chain[depth]))
        else:
            self.needs.remove(chain, depth)

    def _gain(self, block: int) -> int:
        return self.needs.gain(*self._states.prefix[block])

    def _heir(self, block: int) -> int | None:
        chain, depth = self._states.prefix[block]
        above = depth - self.needs.gain(chain, depth)
        return self._states.lookup(chain[above]) if above else None

    def check(self, pages: BlockPool) -> None:
        states = self._states
        valued = {h: block for block, h in enumerate(states.hashes) if h is not None and states.group[block] != SPARE}
        counts, inner = Counter[bytes](), set[bytes]()
        for block in valued.values():
            chain, depth = states.prefix[block]
            above = next((d for d in range(depth - 1, 0, -1) if chain[d] in valued), 0)
            counts.update(chain[above + 1 : depth + 1])
            inner.add(chain[above])
        assert counts == self.needs.counts, "the KV that states need"
        assert all(states.group[block] % 2 == (h in inner) for h, block in valued.items()), "states above others"
        held = {h: pages.group[block] for block, h in enumerate(pages.hashes) if h is not None}
        assert held == {h: self.needs.group(h) for h in held}, "pages that states need"
