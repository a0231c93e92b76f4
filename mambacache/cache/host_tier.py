"""Copy blocks between device, host memory and files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from mambacache.cache.ledger import Ledger
from mambacache.cache.lookup import Found
from mambacache.cache.pages import Pages
from mambacache.cache.pool import BlockPool, Lease, Prefix, RemovedCallback
from mambacache.cache.requests import CachedRequest, Load
from mambacache.cache.retention import SPARE, Chains
from mambacache.cache.states import States
from mambacache.cache.values import Values
from mambacache.config import CacheConfig
from mambacache.plan import BlockFile, Transfer
from mambacache.report import Wait


class Files(Protocol):
    """Tells which blocks are in files, by kind ("state" or "kv") and hash."""

    @property
    def present(self) -> bool:
        """Tell whether files can exist."""

    @property
    def key(self) -> object:
        """Return a part of every hash; files of other keys are never hit."""

    def exact(self, kind: str, block_hash: bytes) -> bool | None:
        """Tell whether a block is exact; None without a file."""

    def drop(self, block_hashes: Iterable[bytes], writer: int | None = None) -> None:
        """Delete the files of these hashes; given `writer`, its files alone."""

    def drop_born(self, since: int) -> None:
        """Delete files of issue `since` or later."""

    def clear(self) -> None:
        """Forget all files for good."""


class NoFiles:
    """Stands in for `Files`."""

    present = False
    key = 0

    def exact(self, kind: str, block_hash: bytes) -> None:
        return None

    def drop(self, block_hashes: Iterable[bytes], writer: int | None = None) -> None:
        """Do nothing."""

    def drop_born(self, since: int) -> None:
        """Do nothing."""

    def clear(self) -> None:
        self.key += 1


@dataclass(slots=True, eq=False)
class Arrival:
    pool: BlockPool
    block: int
    block_hash: bytes
    prefix: Prefix
    exact: bool
    born: int = 0
    writer: int = 0
    group: int = SPARE

    @classmethod
    def copied(cls, source: Lease, target: Lease, block_hash: bytes, prefix: Prefix) -> Arrival:
        pool, block = source.pool, source.block
        flags = pool.exact[block], pool.born[block], pool.writer[block], pool.group[block]
        return cls(target.pool, target.block, block_hash, prefix, *flags)

    def name(self) -> bool:
        return self.pool.commit(
            self.block, self.block_hash, exact=self.exact, group=self.group, born=self.born, writer=self.writer,
            prefix=self.prefix,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Move:
    transfer: Transfer
    leases: list[Lease] = field(default_factory=list)  # device block and slot in turn; for files, slots
    arrivals: list[Arrival] = field(default_factory=list)  # of a load
    coming: set[bytes] = field(default_factory=set)
    load: Load | None = None
    void: bool = False  # commits nothing

    def lose(self, block_hashes: Collection[bytes], writer: int | None) -> None:
        """Lose arrivals of these hashes unless another known request wrote them."""
        self.arrivals = [
            arrival
            for arrival in self.arrivals
            if arrival.block_hash not in block_hashes or (writer is not None and arrival.writer not in (0, writer))
        ]

    def copies(self) -> list[Arrival]:
        """Return copies of blocks that still have a hash."""
        pairs = zip(self.leases[::2], self.leases[1::2], strict=True)
        named = ((lent, slot, lent.pool.hashes[lent.block]) for lent, slot in pairs)
        return [Arrival.copied(lent, slot, each, lent.pool.prefix[lent.block]) for lent, slot, each in named if each]


def check_under_way(transfer: Transfer, moves: Mapping[int, Move]) -> None:
    move = moves.get(transfer.number)
    if move is None or move.transfer != transfer:
        raise RuntimeError(f"transfer {transfer.number} is not under way: end each of `transfers` once")


class Loads:
    """Loads prefixes from files into host slots, and from the host to the device."""

    def __init__(
        self, config: CacheConfig, device: States, states: BlockPool, pages: Pages, host: dict[str, BlockPool],
        values: Values, files: Files, ledger: Ledger, begin: Callable[[Move], None],
    ) -> None:  # fmt: skip
        self._config, self._size = config, config.block_size
        self._device, self._states, self._pages = device, states, pages
        self._host, self._files, self._ledger, self._begin = host, files, ledger, begin
        self._arriving = {
            states: ("state", device.values, ledger.loaded),
            pages.pool: ("kv", device.values, ledger.loaded),
            host["state"]: ("state", values, ledger.stored_on_host),
            host["kv"]: ("kv", values, ledger.stored_on_host),
        }
        self._on_device = {"state": states, "kv": pages.pool}
        self._bytes = {"state": config.state_bytes, "kv": config.page_bytes}
        self._coming: dict[bytes, Load] = {}  # by hash
        self._arrived: dict[Load, None] = {}

    def fetch(self, request: CachedRequest, found: Found, limit: int) -> Wait | None:
        """Start or join a load of a longer prefix than `found`; None without use or room, or after its own loads."""
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
        return Wait("loading", load.request_id, load.depth * self._size)

    def held(self, block_hash: bytes, *pools: BlockPool) -> int:
        """Return the first reusable block of this hash, or 0."""
        strict = self._config.strict_reuse
        return next((block for pool in pools if (block := pool.reusable(block_hash, strict))), 0)

    def _there(self, kind: str, block_hash: bytes, filed: bool = False) -> bool:
        if self.held(block_hash, self._on_device[kind], self._host[kind]):
            return True
        exact = self._files.exact(kind, block_hash) if filed else None
        return exact is not None and (exact or not self._config.strict_reuse)

    def _depth(self, chain: Sequence[bytes], found: Found, limit: int, filed: bool = False) -> int:
        """Return the longest hit on device, host and, if `filed`, files."""
        depth = min(found.coverage, limit)
        while depth < limit and self._there("kv", chain[depth + 1], filed):
            depth += 1
        while depth > found.hit and not self._there("state", chain[depth], filed):
            depth -= 1
        return depth

    def _load(self, request: CachedRequest, found: Found, depth: int) -> Load | None:
        """Join or start a load of `depth` blocks; None without use or room."""
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
        own = [Lease(states, block) for block in states.take(int(room and lacks_state))]  # may shrink `pages`
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
            at = min(place, depth)
            move.arrivals.append(Arrival.copied(slot, lease, chain[at], (chain, at)))
            move.leases += [lease, slot]
        request.may_load = False
        self._ledger.loads()
        return self._under_way(load, move)

    def _read(self, request: CachedRequest, found: Found, held: int, limit: int) -> Load | None:
        chain, depth = request.chain, self._depth(request.chain, found, limit, filed=True)
        if depth <= max(held, found.promised):
            return None
        depths = range(depth, 0, -1) if self._pages.present else ()
        places = [("state", depth), *(("kv", i) for i in depths)]  # the chain is evicted from its end
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
            move.arrivals.append(Arrival(slot.pool, slot.block, chain[i], (chain, i), exact))
            files.append(BlockFile(kind, slot.block, chain[i], exact, 0))
        move.transfer = move.transfer._replace(files=tuple(files))
        request.may_read = False
        return self._under_way(load, move)

    def _under_way(self, load: Load, move: Move) -> Load:
        self._coming.update((arrival.block_hash, load) for arrival in move.arrivals)
        self._begin(move)
        return load

    def done(self, load: Load) -> None:
        load.done = True
        for block_hash in [each for each in load.chain[1:] if self._coming.get(each) is load]:
            del self._coming[block_hash]

    def ended(self, load: Load, arrivals: Sequence[Arrival]) -> None:
        """Commit the arrivals, and hold them while requests wait."""
        self.done(load)
        names = sorted(request.request_id for request in load.waiting)
        if not names and self._config.host_keeps_kv:
            arrivals = ()  # the host engine knows their KV by a request alone
        for arrival in arrivals:
            self._arrive(arrival, names[0] if names else load.request_id)
        if arrivals and load.waiting:
            self._arrived[load] = None
        else:
            load.let_go()

    def _arrive(self, arrival: Arrival, request_id: str) -> None:
        pool = arrival.pool
        new = pool.lookup(arrival.block_hash) is None
        if pool is self._states and new and not self._device.checkpoints.has_room():
            return
        kind, values, _ = self._arriving[pool]
        if self.name(arrival, arrival.prefix[1], request_id) and kind == "state":
            values.value(arrival.block)

    def name(self, arrival: Arrival, depth: int = 0, request_id: str = "") -> bool:
        """Commit an arrival, KV as states beside it need it; return whether it is new."""
        kind, values, tell = self._arriving[arrival.pool]
        if kind == "kv":
            arrival.group = values.needs.group(arrival.block_hash)
        new = arrival.name()
        if new:
            tell(kind, arrival.block_hash, depth * self._size, request_id)
        return new

    def leave(self, request: CachedRequest) -> None:
        """Take a request off its load; the last gives back its blocks."""
        load, request.load = request.load, None
        if load is not None:
            load.waiting.discard(request)
            if load in self._arrived and not load.waiting:
                del self._arrived[load]
                load.let_go()

    def let_go(self) -> bool:
        """Give back the blocks of ended loads, if any."""
        arrived, self._arrived = self._arrived, {}
        return any([load.let_go() for load in arrived])

    @property
    def arrived(self) -> list[Load]:
        return list(self._arrived)

    def check(self, moves: Sequence[Move], requests: Sequence[CachedRequest]) -> None:
        loads = [move.load for move in moves if move.load is not None and not move.load.done]
        assert {id(load) for load in self._coming.values()} == set(map(id, loads)), "what is being loaded"
        waiting = {request for load in [*loads, *self._arrived] for request in load.waiting}
        assert waiting <= set(requests) and all(request.load is not None for request in waiting), "who waits for a load"


AHEAD, LEAST = 4, (16, 128)
"""Copy the next 1 / AHEAD of a pool to be evicted, at least LEAST (states, pages): a few steps evict fewer."""

STATES_A_TRANSFER, PAGES_A_TRANSFER = 8, 512
"""Limit transfers to the host, whose blocks cannot be taken meanwhile; a chain is best copied whole."""

FILES_A_TRANSFER = 32
"""Limit transfers to files likewise."""


class Tier:
    """Holds copies of device blocks in host slots, under the same hashes.

    A page here keeps its state alive on either side: a request resumes from both. Transfers `under_way` at a rebuild
    commit nothing, and hold their blocks until they end.
    """

    def __init__(
        self, config: CacheConfig, pool: BlockPool, states: States, pages: Pages, chains: Chains, ledger: Ledger,
        files: Files, on_page_removed: RemovedCallback, numbers: count[int], under_way: Iterable[Transfer],
    ) -> None:  # fmt: skip
        self.present = config.num_host_states > 0
        self._config, self._size = config, config.block_size
        self._states, self._device, self._pages = pool, states, pages
        self._ledger, self._chains, self._numbers, self._files = ledger, chains, numbers, files
        self.states = BlockPool(
            config.num_host_states, lambda block_hash, *_: ledger.removed_from_host("state", block_hash), chains
        )
        self.pages = BlockPool(config.num_host_pages, on_page_removed, chains)
        self.values = Values(self.states, chains.reuse, self.pages.need)
        self.pages.spill = self.states.evict_leaf
        self._slots = {pool: self.states, pages.pool: self.pages}
        self._host = {"state": self.states, "kv": self.pages}
        self.moves: dict[int, Move] = {}
        self.loads = Loads(config, states, pool, pages, self._host, self.values, files, ledger, self._begin)
        self._unwritten: dict[tuple[str, bytes], None] = {}  # host blocks without a file
        self._unflushed: list[int] | None = None  # None before a flush
        self._spare = False
        self._lacked: dict[int, int] = {}  # state being flushed -> blocks without a file
        self._writable = True
        self._least = {each: min(each.num_blocks, few) for each, few in zip(self._slots, LEAST, strict=True)}
        self._seen = (-1, 0)  # while equal, no block is due
        for transfer in under_way:
            self.moves[transfer.number] = move = Move(transfer, void=True)
            for (device, host), pairs in zip(self._slots.items(), (transfer.states, transfer.pages), strict=True):
                move.leases += [side.seize(b) for pair in pairs for side, b in zip((device, host), pair, strict=True)]
            move.leases += [self._host[file.kind].seize(file.slot) for file in transfer.files]

    def transfers(self, flush: bool) -> tuple[Transfer, ...]:
        """Start at most a transfer to the host and a transfer to files; return all under way."""
        to_host, to_files = (self._moving(files) for files in (False, True))
        seen = (self._chains.now, self._states.num_available) if self.present else self._seen
        self._unflushed, self._spare = (self._unflushed, self._spare) if flush else (None, False)
        if flush and self._files.present and self._writable and not (self._unwritten or to_files or to_host):
            self._flush()
        elif not flush and seen != self._seen and not to_host:
            self._seen = seen
            self._copy_out()
        if self._unwritten and not to_files:
            self._write_out()
        if flush and not self.moves:
            self._unflushed, self._lacked = None, {}
        return tuple([move.transfer for move in self.moves.values()])

    def _moving(self, files: bool) -> bool:
        return any([move.load is None and bool(move.transfer.files) == files for move in self.moves.values()])

    def _copy_out(self) -> None:
        """Start to copy states near eviction, or with KV near eviction."""
        states, pages, most = self._states, self._pages.pool, self._config.max_checkpoints
        budget = states.num_free if most is None else most - states.num_committed - self._device.checkpoints.unwritten
        shares = self._share(states, min(states.num_free, budget)), self._share(pages, pages.num_free)
        left = min(STATES_A_TRANSFER, states.num_available // 2) if max(shares) > 0 else 0
        move = Move(Transfer(0, True, (), ()))
        while left > 0 and (state := states.idle.due(*shares)) is not None:
            missing = self._missing_pages(move, state)
            if missing is None:
                states.lend(state).end()  # skipped until used again
                continue
            room = self._room_for_pages(move)
            self._copy(move, self._pages.pool, missing[:room])
            if len(missing) > room:
                break
            left -= 1
            if self._restore(state):
                states.lend(state).end()
            else:
                self._copy(move, states, [state])
        self._begin(move)

    def _flush(self) -> None:
        """Start to bring the next state to files, spare states last."""
        states, move = self._states, Move(Transfer(0, True, (), ()))
        self._unflushed = states.idle.in_order() if self._unflushed is None else self._unflushed
        while self._unflushed and not (move.leases or self._unwritten):
            state = self._unflushed.pop(0)
            if states.hashes[state] is None:
                continue
            self._spare = states.group[state] == SPARE
            chain, depth = states.prefix[state]
            blocks = [("kv", each) for each in chain[depth:0:-1] if self._pages.present]
            lacks = [each for each in [*blocks, ("state", chain[depth])] if self._files.exact(*each) is None]
            if lacks and len(lacks) < self._lacked.get(state, len(lacks) + 1):
                self._lacked = {state: len(lacks)}
                self._unflushed.insert(0, state)
                self._unwritten.update((each, None) for each in lacks if self._host[each[0]].lookup(each[1]))
            for kind, block_hash in lacks if not self._unwritten else ():
                pool = states if kind == "state" else self._pages.pool
                if (block := pool.lookup(block_hash)) is not None:
                    self._copy(move, pool, [block])
        self._begin(move)

    def _share(self, pool: BlockPool, room: int) -> float:
        """Return the share of a pool's valued blocks next to be evicted; at most 0 if there is room."""
        idle = pool.idle
        ahead = max(pool.num_owned // AHEAD, self._least[pool])
        return (ahead - room - idle.num_spare) / max(len(idle) - idle.num_spare, 1)

    def _restore(self, state: int) -> bool:
        """Tell whether the host has a state as exact, and take back its `evict_first`."""
        states, block_hash = self._states, self._states.hashes[state]
        slot = self.states.lookup(block_hash) if block_hash is not None else None
        if block_hash is None or slot is None or states.exact[state] > self.states.exact[slot]:
            return False
        return self.states.restore(block_hash, states.group[state])

    def _filed(self, kind: str, pool: BlockPool, block: int) -> bool:
        block_hash = pool.hashes[block]
        exact = self._files.exact(kind, block_hash) if block_hash is not None else None
        return exact is not None and exact >= pool.exact[block]

    def _missing_pages(self, move: Move, state: int) -> list[int] | None:
        """Return a state's pages that the host lacks; None if it cannot be reused."""
        chain, depth = self._states.prefix[state]
        missing: list[int] = []
        held = self.loads.held
        if not held(chain[depth], self._states):
            return None
        for block_hash in chain[depth:0:-1] if self._pages.present else ():
            if block_hash in move.coming or held(block_hash, self.pages):
                continue
            page = held(block_hash, self._pages.pool)
            if not page:
                return None
            missing.append(page)
        return missing

    def _room_for_pages(self, move: Move) -> int:
        """Leave half of the available pages available."""
        taken = len(move.coming)
        return max(min(PAGES_A_TRANSFER, (self._pages.pool.num_available + taken) // 2) - taken, 0)

    def _copy(self, move: Move, pool: BlockPool, blocks: Sequence[int]) -> None:
        host = self._slots[pool]
        for block, number in zip(blocks, host.take(min(len(blocks), host.num_available)), strict=False):
            slot, block_hash = Lease(host, number), pool.hashes[block]
            if block_hash is None:  # `take` evicted a page that kept this state
                slot.end()
                continue
            lent = pool.lend(block)
            slot.used = lent.used
            move.leases += [lent, slot]
            if host is self.pages:
                move.coming.add(block_hash)

    def _begin(self, move: Move) -> None:
        transfer, leases = move.transfer, move.leases if not move.transfer.files else []
        pairs = list(zip(leases[::2], leases[1::2], strict=True))
        if pairs or transfer.files:
            states, pages = (
                tuple((lease.block, slot.block) for lease, slot in pairs if lease.pool is pool) for pool in self._slots
            )
            move.transfer = transfer._replace(number=next(self._numbers), states=states, pages=pages)
            self.moves[move.transfer.number] = move

    def _write_out(self) -> None:
        move, files = Move(Transfer(0, False, (), ())), list[BlockFile]()
        while self._unwritten and len(files) < FILES_A_TRANSFER:
            kind, block_hash = next(iter(self._unwritten))
            del self._unwritten[kind, block_hash]
            host = self._host[kind]
            if (slot := host.lookup(block_hash)) is not None:
                move.leases.append(host.lend(slot))
                facts = host.exact[slot], host.born[slot], host.writer[slot], self._spare
                files.append(BlockFile(kind, slot, block_hash, *facts))
        move.transfer = move.transfer._replace(files=tuple(files))
        self._begin(move)

    def hit(self, block_hash: bytes) -> None:
        """Evict a hit's host state first, and KV that it alone needs, until `_copy_out` restores it."""
        if (slot := self.states.lookup(block_hash)) is not None:
            self.states.evict_first(slot)

    def transferred(self, number: int, failed: bool) -> None:
        """Release a transfer's blocks, committed unless it failed."""
        move = self.moves.pop(number)
        transfer, load, good = move.transfer, move.load, not (failed or move.void)
        if load is None and transfer.files:
            self._writable = self._writable if move.void else not failed
        elif load is None and good:
            for arrival in move.copies():
                self.loads.name(arrival)
            self._note_unwritten(move)
        for lease in move.leases if load is None else move.leases[1::2]:
            lease.end()
        if load is not None:
            self.loads.ended(load, move.arrivals if good else ())
        states = len(transfer.states) + sum(file.kind == "state" for file in transfer.files)
        pages = len(transfer.pages) + sum(file.kind == "kv" for file in transfer.files)
        moved = states * self._config.state_bytes + pages * self._config.page_bytes
        self._ledger.transferred(transfer.to_host, moved, failed, files=bool(transfer.files))

    def _note_unwritten(self, move: Move) -> None:
        for slot in move.leases[1::2] if self._files.present else ():
            kind, block_hash = "state" if slot.pool is self.states else "kv", slot.pool.hashes[slot.block]
            if block_hash is not None and not self._filed(kind, slot.pool, slot.block):
                self._unwritten[kind, block_hash] = None

    def void(self) -> None:
        """Commit nothing under way, and let no request wait for it."""
        for move in self.moves.values():
            move.void = True
            if move.load is not None:
                self.loads.done(move.load)

    def drop_born(self, since: int) -> None:
        self.void()
        self._files.drop_born(since)
        self.states.drop_born(since)
        self.pages.drop_born(since)

    def drop(self, block_hashes: Collection[bytes], writer: int | None) -> None:
        self._files.drop(block_hashes, writer)
        for block_hash in block_hashes:
            self.states.drop(block_hash, writer=writer)
            self.pages.drop(block_hash, writer=writer)
        for move in self.moves.values():
            move.lose(block_hashes, writer)

    def clear(self) -> None:
        self.void()
        self.loads.let_go()
        self._unwritten.clear()
        self.states.clear()
        self.pages.clear()

    def held(self, pool: BlockPool) -> list[int]:
        moves = list(self.moves.values())
        leases = [lease for move in moves for lease in (move.leases if move.load is None else move.leases[1::2])]
        loads = [*self.loads.arrived, *(move.load for move in moves if move.load is not None)]
        return [x.block for x in [*leases, *(x for load in loads for x in load.leases)] if x.pool is pool]

    def check(self, requests: Sequence[CachedRequest]) -> None:
        self.states.check(self.held(self.states))
        self.pages.check(self.held(self.pages))
        self.values.check(self.pages)
        self.loads.check(list(self.moves.values()), requests)
