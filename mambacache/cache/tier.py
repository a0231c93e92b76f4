"""The tier in host memory: copies of what the device is about to evict, and their way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from math import inf

from mambacache.accounting.ledger import Ledger
from mambacache.cache.chains import Chains
from mambacache.cache.lookup import Found
from mambacache.cache.moves import Arrival, Move
from mambacache.cache.pages import Pages
from mambacache.cache.pool import BlockPool, Lease, RemovedCallback
from mambacache.cache.request import CachedRequest, Load
from mambacache.cache.states import States
from mambacache.config import CacheConfig
from mambacache.plan import Transfer
from mambacache.report import Wait

AHEAD, LEAST = 4, (16, 128)
"""Copied ahead is what would be lost with the blocks that go first, one in so many of a pool's, but at least so many
states and pages: more than a few steps of 8,192 tokens evict."""

STATES_A_TRANSFER, PAGES_A_TRANSFER = 8, 512
"""Blocks that one transfer takes to the host at most: while it lasts, nobody else can take them. A chain is best taken
whole, since it may be the next to go."""


class Tier:
    """Slots in host memory, found by the hashes that name blocks on the device.

    A request resumes where its state and all KV before it are, each on the device or here; what only the host has is
    loaded first. So a page here keeps the state of its block alive, on either side, as one on the device does. Without
    slots no call does anything.

    Args:
        pool, states, pages: the device's.
        on_page_removed: called as a `BlockPool` does when a page here is lost.
        numbers: of transfers.
        under_way: transfers that nobody wants any more, and that may yet read and write the blocks that they name.
    """

    def __init__(
        self, config: CacheConfig, pool: BlockPool, states: States, pages: Pages, chains: Chains, ledger: Ledger,
        on_page_removed: RemovedCallback, numbers: count[int], under_way: Iterable[Transfer],
    ) -> None:  # fmt: skip
        self.present = config.num_host_states > 0
        self._config, self._size = config, config.block_size
        self._states, self._device, self._pages = pool, states, pages
        self._ledger, self._chains, self._numbers = ledger, chains, numbers
        self.states = BlockPool(config.num_host_states, lambda *_: None, chains)
        self.pages = BlockPool(config.num_host_pages, on_page_removed, chains)
        self._slots = {pool: self.states, pages.pool: self.pages}  # of what the device's pools hold
        self.moves: dict[int, Move] = {}
        self._loading: dict[bytes, Load] = {}  # by the hashes of the blocks that the device lacks
        self._arrived: dict[Load, None] = {}  # which still hold blocks
        least = {each: min(each.num_blocks, few) for each, few in zip(self._slots, LEAST, strict=True)}
        self._ahead = {each: max(each.num_blocks // AHEAD, few) for each, few in least.items()}
        self._within = max(chains.blocks // AHEAD, LEAST[1])  # the same, as time
        self._seen = (-1, 0)  # when there was a look at what to copy: nothing else makes a block due
        for transfer in under_way:
            self.moves[transfer.number] = move = Move(transfer, void=True)
            for (device, host), pairs in zip(self._slots.items(), (transfer.states, transfer.pages), strict=True):
                move.leases += [side.seize(b) for pair in pairs for side, b in zip((device, host), pair, strict=True)]

    # --- to the host ---

    def transfers(self) -> tuple[Transfer, ...]:
        """All that are under way; one more to the host is begun if there is need and none is on its way."""
        seen = (self._chains.now, self._states.num_available) if self.present else self._seen
        if seen != self._seen and not any([move.load is None for move in self.moves.values()]):
            self._seen = seen
            self._copy_out()
        return tuple([move.transfer for move in self.moves.values()])

    def _copy_out(self) -> None:
        """Begins to copy the states that would be lost first, by their own eviction or by that of the KV before them:
        what is as cold as the pages that go first has pages among them."""
        states = self._states
        limit = min(self._limits())
        left = min(STATES_A_TRANSFER, states.num_available // 2) if limit < inf else 0
        move = Move(Transfer(0, True, (), ()))
        while left > 0 and (state := states.idle.coldest(limit, self._within)) is not None:
            missing = self._missing_pages(move, state)
            if missing is None:
                states.lend(state).end()  # not to be looked at again before it was used
                continue
            room = self._room_for_pages(move)
            self._copy(move, self._pages.pool, missing[:room])
            if len(missing) > room:
                break  # the rest goes with the next transfer
            left -= 1
            if self._restore(state):
                states.lend(state).end()
            else:
                self._copy(move, states, [state])
        self._begin(move)

    def _limits(self) -> tuple[float, float]:
        """How cold what goes first is: of states, and of pages; infinite while there is room."""
        states, pages = self._slots
        most = self._config.max_checkpoints
        budget = states.num_free if most is None else most - states.num_committed - self._device.unwritten
        room = min(states.num_free, budget)
        return states.idle.limit(self._ahead[states] - room), pages.idle.limit(self._ahead[pages] - pages.num_free)

    def _restore(self, state: int) -> bool:
        """Whether the host has a state, as exact as the device's; it is kept there from now on."""
        states, block_hash = self._states, self._states.hashes[state]
        slot = self.states.lookup(block_hash) if block_hash is not None else None
        if block_hash is None or slot is None or states.exact[state] > self.states.exact[slot]:
            return False
        return self.states.restore(block_hash, states.rank[state])

    def _missing_pages(self, move: Move, state: int) -> list[int] | None:
        """The device's pages before a state that are not here nor coming, the deepest first; what is here is kept from
        now on. None if one is nowhere, or the state may not be reused."""
        chain, depth = self._device.prefix[state]
        missing: list[int] = []
        if not self._held(chain[depth], self._states):
            return None
        for block_hash in chain[depth:0:-1] if self._pages.present else ():
            if block_hash in move.coming:
                continue
            if self._held(block_hash, self.pages):
                self.pages.restore(block_hash, self._states.rank[state])
                continue
            page = self._held(block_hash, self._pages.pool)
            if not page:
                return None
            missing.append(page)
        return missing

    def _room_for_pages(self, move: Move) -> int:
        """So many that half of the pages that can be taken stay so."""
        taken = len(move.coming)
        return max(min(PAGES_A_TRANSFER, (self._pages.pool.num_available + taken) // 2) - taken, 0)

    def _copy(self, move: Move, pool: BlockPool, blocks: Sequence[int]) -> None:
        """Adds blocks to a transfer to the host, as far as there are slots for them."""
        host = self._slots[pool]
        for block, number in zip(blocks, host.take(min(len(blocks), host.num_available)), strict=False):
            slot, block_hash = Lease(host, number), pool.hashes[block]
            if block_hash is None:  # the slots' pages were all that kept this state
                slot.end()
                continue
            lent = pool.lend(block)
            slot.used = lent.used
            move.leases += [lent, slot]
            if host is self.pages:
                move.coming.add(block_hash)

    def _begin(self, move: Move) -> None:
        """Numbers a transfer, if it has any blocks, and names them."""
        pairs = list(zip(move.leases[::2], move.leases[1::2], strict=True))
        if pairs:
            states, pages = (
                tuple((lease.block, slot.block) for lease, slot in pairs if lease.pool is pool) for pool in self._slots
            )
            move.transfer = Transfer(next(self._numbers), move.load is None, states, pages)
            self.moves[move.transfer.number] = move

    def hit(self, chain: Sequence[bytes], depth: int) -> None:
        """So many blocks are in use on the device: what is here of them goes first, until that is about to go."""
        for pool, first in ((self.states, depth), (self.pages, 1)):
            for slot in filter(None, map(pool.lookup, chain[first : depth + 1] if depth else ())):
                pool.demote(slot)

    # --- from the host ---

    def fetch(self, request: CachedRequest, found: Found, limit: int) -> Wait | None:
        """Begins to load a longer prefix than was found, at most `limit` blocks, or joins who does. None if there is
        none, it is not worth it, there is no room, or the request's own load has ended."""
        if not (self.states.num_committed or self.pages.num_committed) or self._config.max_checkpoints == 0:
            return None
        chain, depth = request.chain, self._depth(request.chain, found, limit)
        if depth <= max(found.hit, found.promised):
            return None
        depths = range(1, depth + 1) if self._pages.present else ()
        lacks = [i for i in depths if not self._held(chain[i], self._pages.pool)]
        lacks_state = not self._held(chain[depth], self._states)
        lacking = [chain[i] for i in lacks] + [chain[depth]] * lacks_state
        load = next((self._loading[h] for h in lacking if h in self._loading), None)
        moved = lacks_state * self._config.state_bytes + len(lacks) * self._config.page_bytes
        if load is None and request.may_load:
            worth = moved <= self._config.host_bytes_per_token * (depth - found.hit) * self._size
            load = self._load(request, depth, lacks, lacks_state) if worth else None
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

    def _held(self, block_hash: bytes, *pools: BlockPool) -> int:
        """The block of this hash that may be reused, in the first of these pools that has one; 0 for none."""
        for pool in pools:
            block = pool.lookup(block_hash)
            if block is not None and (pool.exact[block] or not self._config.strict_reuse):
                return block
        return 0

    def _depth(self, chain: Sequence[bytes], found: Found, limit: int) -> int:
        """After how many blocks, at most `limit`, a request resumes with what device and host have together."""
        depth = min(found.coverage, limit)
        while depth < limit and self._held(chain[depth + 1], self._pages.pool, self.pages):
            depth += 1
        while depth > found.hit and not self._held(chain[depth], self._states, self.states):
            depth -= 1
        return depth

    def _load(self, request: CachedRequest, depth: int, lacks: Sequence[int], lacks_state: bool) -> Load | None:
        """Takes blocks on the device, evicting others if it must; None without room for the request."""
        chain, (states, pages) = request.chain, self._slots
        if not self._pages.has_room(chain, depth, len(request.tokens)):
            return None
        slots = [self.pages.share(self._held(chain[i], self.pages)) for i in lacks]
        kept = {i: pages.share(page) for i in range(1, depth + 1) if (page := self._held(chain[i], pages))}
        state = self.states.share(self._held(chain[depth], self.states)) if lacks_state else None
        if state is None:
            kept[depth + 1] = states.share(self._held(chain[depth], states))
        else:
            slots.append(state)
        if pages.num_available < len(lacks) or states.num_available < 1 + lacks_state:
            for lease in [*slots, *kept.values()]:
                lease.end()
            return None
        fresh = [Lease(pages, page) for page in pages.take(len(lacks))]
        fresh += [Lease(states, block) for block in states.take(int(lacks_state))]
        places = [*lacks, depth + 1] if lacks_state else lacks
        held = kept | dict(zip(places, fresh, strict=True))
        load = Load(request.request_id, chain, depth, [held[i] for i in sorted(held)])
        move = Move(Transfer(0, False, (), ()), load=load)
        for place, lease, slot in zip(places, fresh, slots, strict=True):
            move.arrivals.append(Arrival.copied(slot, lease, chain[min(place, depth)], min(place, depth)))
            move.leases += [lease, slot]
            self._loading[chain[min(place, depth)]] = load
        request.may_load = False
        self._begin(move)
        self._ledger.loads()
        return load

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

    # --- the end of a transfer ---

    def transferred(self, number: int, failed: bool) -> None:
        """A transfer is done, or has failed: neither reads nor writes its blocks any more."""
        move = self.moves.pop(number)
        load, good = move.load, not (failed or move.void)
        if good and load is None:
            move.name()
        elif good and load is not None:
            for arrival in move.arrivals:
                self._arrive(arrival, load)
        for lease in move.leases if load is None else move.leases[1::2]:
            lease.end()
        if load is not None:
            self._end(load, move)
            if good and load.waiting:
                self._arrived[load] = None
            else:
                load.let_go()
        moved = (
            len(move.transfer.states) * self._config.state_bytes + len(move.transfer.pages) * self._config.page_bytes
        )
        self._ledger.transferred(move.transfer.to_host, moved, failed)

    def _arrive(self, arrival: Arrival, load: Load) -> None:
        kind = "kv" if arrival.pool is self._pages.pool else "state"
        new = arrival.pool.lookup(arrival.block_hash) is None
        if kind == "state" and new and not self._device.has_checkpoint_room(asked=True):
            return
        if arrival.name():
            if kind == "state":
                self._device.prefix[arrival.block] = load.chain, arrival.depth
            self._ledger.loaded(kind, arrival.block_hash, arrival.depth * self._size, load.request_id)

    def _end(self, load: Load, move: Move) -> None:
        """Nobody waits for a load any more."""
        load.done = True
        for arrival in move.arrivals:
            if self._loading.get(arrival.block_hash) is load:
                del self._loading[arrival.block_hash]

    # --- what is given up ---

    def void(self) -> None:
        """What is being copied is not what it was taken for: it is named by no hash, and nobody waits for it."""
        for move in self.moves.values():
            move.void = True
            if move.load is not None:
                self._end(move.load, move)

    def drop_born(self, since: int) -> None:
        """What was written by this issue or a later one is wrong."""
        self.void()
        self.states.drop_born(since)
        self.pages.drop_born(since)

    def drop(self, block_hashes: Iterable[bytes]) -> None:
        """So is what has one of these hashes."""
        self.void()
        for block_hash in block_hashes:
            self.states.drop(block_hash)
            self.pages.drop(block_hash)

    def clear(self) -> None:
        """Forgets every hash."""
        self.void()
        self.let_go()
        self.states.clear()
        self.pages.clear()

    # --- the books ---

    def held(self, pool: BlockPool) -> list[int]:
        """The blocks of a pool that transfers and loads hold, each as often as it is held."""
        moves = list(self.moves.values())
        leases = [lease for move in moves for lease in (move.leases if move.load is None else move.leases[1::2])]
        loads = [*self._arrived, *(move.load for move in moves if move.load is not None)]
        return [x.block for x in [*leases, *(x for load in loads for x in load.leases)] if x.pool is pool]

    def check(self, requests: Sequence[CachedRequest]) -> None:
        """Raises AssertionError unless the books balance."""
        self.states.check(self.held(self.states))
        self.pages.check(self.held(self.pages))
        loads = [move.load for move in self.moves.values() if move.load is not None and not move.load.done]
        assert {id(load) for load in self._loading.values()} == set(map(id, loads)), "what is being loaded"
        waiting = {request for load in [*loads, *self._arrived] for request in load.waiting}
        assert waiting <= set(requests) and all(request.load is not None for request in waiting), "who waits for a load"
