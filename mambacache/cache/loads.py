"""What requests wait for: blocks that come back from the host's memory to the device, and to there from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mambacache.accounting.ledger import Ledger
from mambacache.cache.chains import Rank
from mambacache.cache.files import Files
from mambacache.cache.lookup import Found
from mambacache.cache.moves import Arrival, Move
from mambacache.cache.pages import Pages
from mambacache.cache.pool import BlockPool, Lease
from mambacache.cache.request import CachedRequest, Load
from mambacache.cache.states import States
from mambacache.config import CacheConfig
from mambacache.plan import BlockFile, Transfer
from mambacache.report import Wait


class Loads:
    """Two stages: what files alone have is read into the host's slots, and is held there until the requests that wait
    for it ask again; what the device lacks then goes on from there.

    Args:
        device: the device's states, and `pages` its KV pages.
        host: the host's pools, by kind.
        begin: numbers a move and names it as under way.
    """

    def __init__(
        self, config: CacheConfig, device: States, states: BlockPool, pages: Pages, host: dict[str, BlockPool],
        files: Files, ledger: Ledger, begin: Callable[[Move], None],
    ) -> None:  # fmt: skip
        self._config, self._size = config, config.block_size
        self._device, self._states, self._pages = device, states, pages
        self._host, self._files, self._ledger, self._begin = host, files, ledger, begin
        self._on_device = {"state": states, "kv": pages.pool}
        self._bytes = {"state": config.state_bytes, "kv": config.page_bytes}
        self._coming: dict[bytes, Load] = {}  # by the hashes of the blocks that are being loaded
        self._arrived: dict[Load, None] = {}  # which still hold blocks

    def fetch(self, request: CachedRequest, found: Found, limit: int) -> Wait | None:
        """Begins to load a longer prefix than was found, at most `limit` blocks, or joins who does. None if there is
        none, it is not worth it, there is no room, or the request's own loads have ended."""
        stored = self._files.present or any(pool.num_committed for pool in self._host.values())
        if not stored or self._config.max_checkpoints == 0:
            return None
        held = self._depth(request.chain, found, limit)
        load = self._read(request, found, held, limit) if self._files.present else None
        if load is None and held > max(found.hit, found.promised):
            load = self._load(request, found, held)
        if load is None:
            return None
        load.waiting.add(request)
        request.load = load
        if request.hit_before is None:
            request.hit_before = found.hit
        return self.wait(load)

    def wait(self, load: Load) -> Wait:
        """What a request is told that waits for a load."""
        return Wait("loading", load.request_id, load.depth * self._size)

    def held(self, block_hash: bytes, *pools: BlockPool) -> int:
        """The block of this hash that may be reused, in the first of these pools that has one; 0 for none."""
        for pool in pools:
            block = pool.lookup(block_hash)
            if block is not None and (pool.exact[block] or not self._config.strict_reuse):
                return block
        return 0

    def _there(self, kind: str, block_hash: bytes, filed: bool = False) -> bool:
        """Whether device or host has such a block, or else a file."""
        if self.held(block_hash, self._on_device[kind], self._host[kind]):
            return True
        exact = self._files.exact(kind, block_hash) if filed else None
        return exact is not None and (exact or not self._config.strict_reuse)

    def _depth(self, chain: Sequence[bytes], found: Found, limit: int, filed: bool = False) -> int:
        """After how many blocks, at most `limit`, a request resumes with what device and host have together, and
        files."""
        depth = min(found.coverage, limit)
        while depth < limit and self._there("kv", chain[depth + 1], filed):
            depth += 1
        while depth > found.hit and not self._there("state", chain[depth], filed):
            depth -= 1
        return depth

    # --- from the host to the device ---

    def _load(self, request: CachedRequest, found: Found, depth: int) -> Load | None:
        """Who loads so many blocks, be it now or since before; None without need, or room."""
        chain = request.chain
        depths = range(1, depth + 1) if self._pages.present else ()
        lacks = [i for i in depths if not self.held(chain[i], self._pages.pool)]
        lacks_state = not self.held(chain[depth], self._states)
        lacking = [chain[i] for i in lacks] + [chain[depth]] * lacks_state
        load = next((self._coming[h] for h in lacking if h in self._coming), None)
        moved = lacks_state * self._config.state_bytes + len(lacks) * self._config.page_bytes
        worth = moved <= self._config.host_bytes_per_token * (depth - found.hit) * self._size
        if load is None and request.may_load and worth:
            return self._begin_load(request, depth, lacks, lacks_state)
        return load

    def _begin_load(self, request: CachedRequest, depth: int, lacks: Sequence[int], lacks_state: bool) -> Load | None:
        """Takes blocks on the device, evicting others if it must; None without room for the request."""
        chain, states, pages = request.chain, self._states, self._pages.pool
        if not self._pages.has_room(chain, depth, len(request.tokens)):
            return None
        slots = [self._host["kv"].share(self.held(chain[i], self._host["kv"])) for i in lacks]
        kept = {i: pages.share(page) for i in range(1, depth + 1) if (page := self.held(chain[i], pages))}
        if lacks_state:
            slots.append(self._host["state"].share(self.held(chain[depth], self._host["state"])))
        else:
            kept[depth + 1] = states.share(self.held(chain[depth], states))
        room = states.num_available > lacks_state
        own = [Lease(states, block) for block in states.take(int(room and lacks_state))]  # which may come from pages
        if not room or pages.num_available < len(lacks):
            for lease in [*own, *slots, *kept.values()]:
                lease.end()
            return None
        fresh = [Lease(pages, page) for page in pages.take(len(lacks))] + own
        places = [*lacks, depth + 1] if lacks_state else lacks
        blocks = kept | dict(zip(places, fresh, strict=True))
        load = Load(request.request_id, chain, depth, [blocks[i] for i in sorted(blocks)])
        move = Move(Transfer(0, False, (), ()), load=load)
        for place, lease, slot in zip(places, fresh, slots, strict=True):
            move.arrivals.append(Arrival.copied(slot, lease, chain[min(place, depth)], min(place, depth)))
            move.leases += [lease, slot]
        request.may_load = False
        self._ledger.loads()
        return self._under_way(load, move)

    # --- from files to the host ---

    def _read(self, request: CachedRequest, found: Found, held: int, limit: int) -> Load | None:
        """Who reads a longer prefix than what device and host have; None without such a one, or room."""
        chain, depth = request.chain, self._depth(request.chain, found, limit, filed=True)
        if depth <= max(held, found.promised):
            return None
        depths = range(depth, 0, -1) if self._pages.present else ()
        places = [("state", depth), *(("kv", i) for i in depths)]  # what is read last is what is evicted last
        lacks = [(kind, i) for kind, i in places if not self._there(kind, chain[i])]
        load = next((self._coming[chain[i]] for _, i in lacks if chain[i] in self._coming), None)
        read = sum(self._bytes[kind] for kind, _ in lacks)
        worth = read <= self._config.disk_bytes_per_token * (depth - held) * self._size
        if load is None and request.may_read and worth:
            load = self._begin_read(request, depth, places, lacks)
        if load is not None and request.held_before is None:
            request.held_before = held
        return load

    def _begin_read(
        self, request: CachedRequest, depth: int, places: Sequence[tuple[str, int]], lacks: Sequence[tuple[str, int]]
    ) -> Load | None:
        """Takes slots of the host, evicting others if it must; what is there already of the prefix stays."""
        chain = request.chain
        there = {(kind, i): self.held(chain[i], self._host[kind]) for kind, i in places}
        slots = {(kind, i): self._host[kind].share(slot) for (kind, i), slot in there.items() if slot}
        counts = {kind: sum(each == kind for each, _ in lacks) for kind in self._host}
        if any(self._host[kind].num_available < count for kind, count in counts.items()):
            for lease in slots.values():
                lease.end()
            return None
        fresh = {kind: iter(self._host[kind].take(count)) for kind, count in counts.items()}
        slots |= {(kind, i): Lease(self._host[kind], next(fresh[kind])) for kind, i in lacks}
        load = Load(request.request_id, chain, depth, [slots[place] for place in reversed(places) if place in slots])
        move, files = Move(Transfer(0, True, (), ()), load=load), []
        for kind, i in lacks:
            slot, exact = slots[kind, i], bool(self._files.exact(kind, chain[i]))
            move.arrivals.append(Arrival(slot.pool, slot.block, chain[i], exact, Rank.FIRST, 0, 0, i))
            files.append(BlockFile(kind, slot.block, chain[i], exact, 0))
        move.transfer = move.transfer._replace(files=tuple(files))
        request.may_read = False
        return self._under_way(load, move)

    # --- the end ---

    def _under_way(self, load: Load, move: Move) -> Load:
        self._coming.update((arrival.block_hash, load) for arrival in move.arrivals)
        self._begin(move)
        return load

    def done(self, load: Load) -> None:
        """Nobody waits for a load any more."""
        load.done = True
        for block_hash in [each for each in load.chain[1:] if self._coming.get(each) is load]:
            del self._coming[block_hash]

    def ended(self, load: Load, arrivals: Sequence[Arrival]) -> None:
        """Its transfer is over: these have arrived, or none."""
        self.done(load)
        for arrival in arrivals:
            self._arrive(arrival, load)
        if arrivals and load.waiting:
            self._arrived[load] = None
        else:
            load.let_go()

    def _arrive(self, arrival: Arrival, load: Load) -> None:
        if arrival.pool in self._host.values():
            arrival.name()
            return
        kind = "kv" if arrival.pool is self._pages.pool else "state"
        new = arrival.pool.lookup(arrival.block_hash) is None
        if kind == "state" and new and not self._device.checkpoints.has_room(asked=True):
            return
        if arrival.name():
            if kind == "state":
                self._device.prefix[arrival.block] = load.chain, arrival.depth
            self._ledger.loaded(kind, arrival.block_hash, arrival.depth * self._size, load.request_id)

    def leave(self, request: CachedRequest) -> None:
        """A request waits for its load no more: that has ended and the request is admitted, or it is gone."""
        load, request.load = request.load, None
        if load is not None:
            load.waiting.discard(request)
            if load in self._arrived and not load.waiting:
                del self._arrived[load]
                load.let_go()

    def let_go(self) -> bool:
        """Room is needed more than what loads brought whose requests have not come yet; whether that makes any."""
        arrived, self._arrived = self._arrived, {}
        return any([load.let_go() for load in arrived])

    # --- the books ---

    @property
    def arrived(self) -> list[Load]:
        """Those that hold blocks though their transfers are over."""
        return list(self._arrived)

    def check(self, moves: Sequence[Move], requests: Sequence[CachedRequest]) -> None:
        """Raises AssertionError unless these transfers and requests are those that loads know."""
        loads = [move.load for move in moves if move.load is not None and not move.load.done]
        assert {id(load) for load in self._coming.values()} == set(map(id, loads)), "what is being loaded"
        waiting = {request for load in [*loads, *self._arrived] for request in load.waiting}
        assert waiting <= set(requests) and all(request.load is not None for request in waiting), "who waits for a load"
