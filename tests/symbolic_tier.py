"""Check a host memory tier on the symbolic model: transfers end late, in any order, or fail."""

from __future__ import annotations

import random
from typing import Any

from cache_model import Prefix
from mambacache.cache.host_tier import Files
from mambacache.cache.pool import BlockPool
from mambacache.cache.requests import CachedRequest
from mambacache.config import CacheConfig
from mambacache.plan import Transfer
from mambacache.report import CacheEvent, Hit, Wait
from symbolic import true_page, true_state
from symbolic_driver import CheckedCache, Driver
from symbolic_jobs import Mix


class HostMemory:
    """Hold slots of states and pages. A transfer poisons its targets when it begins, and copies when it ends."""

    def __init__(self, cache: TieredCache) -> None:
        runner, config = cache.runner, cache.config
        size = config.block_size
        self.device = [
            [runner.written, runner.states, runner.exact, runner.windows, runner.ends],
            [x.reshape(-1, size) for x in (runner.kv_written, runner.kv_tokens, runner.kv_digests, runner.kv_exact)],
        ]
        counts = config.num_host_states, config.num_host_pages
        self.slots = [
            [pool[:1].repeat(count + 1, axis=0) for pool in pools]
            for pools, count in zip(self.device, counts, strict=True)
        ]
        for pools in self.slots:
            pools[0][:] = False
        self.launched: dict[int, Transfer] = {}
        self._cache = cache

    def busy(self, kind: int) -> set[int]:
        """Return the device blocks that transfers read or write."""
        return {block for each in self.launched.values() for block, _ in (each.states, each.pages)[kind]}

    def launch(self, transfer: Transfer) -> None:
        assert transfer.states or transfer.pages
        pools = self._cache.states, self._cache._admission.pages.pool
        for kind, pairs in enumerate((transfer.states, transfer.pages)):
            target, side = (self.slots, 1) if transfer.to_host else (self.device, 0)
            assert not self.busy(kind) & {block for block, _ in pairs}, "two transfers use a block"
            for pair in pairs:
                assert all(pair), "the null block is copied"
                assert pools[kind].references[pair[0]], "a block in transfer may be taken"
                target[kind][0][pair[side]] = False
        self.launched[transfer.number] = transfer

    def end(self, number: int, failed: bool) -> bool:
        """Copy the blocks unless the transfer fails; return `failed`."""
        transfer = self.launched.pop(number)
        for kind, pairs in enumerate((transfer.states, transfer.pages) if not failed else ()):
            for device, slot in zip(self.device[kind], self.slots[kind], strict=True):
                for block, host in pairs:
                    if transfer.to_host:
                        slot[host] = device[block]
                    else:
                        device[block] = slot[host]
        return failed


class TieredCache(CheckedCache):
    """Run transfers beside the steps of a `CheckedCache`; chance decides when and how they end."""

    def __init__(
        self, config: CacheConfig, seed: int = 0, failing: float = 0.0, slow: float = 0.5, files: Files | None = None
    ) -> None:
        super().__init__(config, files)
        self.memory: HostMemory = HostMemory(self)
        self.rng = random.Random(seed)
        self.failing, self.slow = failing, slow
        self._prefixes: dict[bytes, Prefix] = {}
        self._arriving = False
        self.void = 0  # transfers that ended after the cache gave them up
        state, page = self.runner._may_write_state, self.runner._may_write_page
        self.runner._may_write_state = lambda block: state(block) and block not in self.memory.busy(0)
        self.runner._may_write_page = lambda block: page(block) and block not in self.memory.busy(1)

    def transfers(self, *, flush: bool = False) -> tuple[Transfer, ...]:
        found = super().transfers(flush=flush)
        self.sync()
        return found

    def transferred(self, transfer: Transfer, *, failed: bool = False) -> None:
        self._arriving = True
        self.void += transfer.number in self._admission.tier.moves and self._admission.tier.moves[transfer.number].void
        try:
            super().transferred(transfer, failed=failed)
            self.sync()
        finally:
            self._arriving = False
        self.quietly(self.check)

    def admit(self, request_id: str, *, kv_tokens: int | None = None, max_tokens: int | None = None) -> Hit | Wait:
        self._ready()
        s = self._admission.requests.get(request_id)
        if s is None or s.residency is not None or not s.read or self.config.max_checkpoints == 0:
            return super().admit(request_id, kv_tokens=kv_tokens, max_tokens=max_tokens)
        reach, with_files = self._reach(s, kv_tokens, False), self._reach(s, kv_tokens, True)
        loading, may_load = s.load, s.may_load and self._worth_loading(s, reach, kv_tokens)
        found = super().admit(request_id, kv_tokens=kv_tokens, max_tokens=max_tokens)
        if s.load is not None and s.load is not loading and found == Wait("loading", request_id, found.until):
            assert found.until in (reach, with_files), "a load ends where no prompt may resume"
        elif isinstance(found, Hit) and may_load:
            assert found.num_tokens >= reach, "a prefix on the host is not loaded"
        return found

    def _reach(self, s: CachedRequest, kv_tokens: int | None, with_files: bool) -> int:
        """Return the position where a request may resume with the blocks of device and host, and of files."""
        tier, size, strict, reach = self._admission.tier, self.config.block_size, self.config.strict_reuse, 0
        usable = {
            kind: {h for pool in pools for block, h in enumerate(pool.hashes) if pool.exact[block] or not strict}
            for kind, pools in (("state", (self.states, tier.states)), ("kv", (self._admission.pages.pool, tier.pages)))
        }
        for kind, block_hash in self._filed() if with_files else ():
            usable[kind].add(block_hash)
        for depth in range(1, (len(s.tokens) - 1) // size + 1):
            by_host = kv_tokens is None or depth * size <= kv_tokens
            if not (s.chain[depth] in usable["kv"] if self.kv is not None else by_host):
                break
            reach = depth * size if s.chain[depth] in usable["state"] else reach
        return reach

    def _filed(self) -> list[tuple[str, bytes]]:
        """Return kind and hash of the blocks in files that may be reused."""
        return []

    def _worth_loading(self, s: CachedRequest, reach: int, kv_tokens: int | None) -> bool:
        """Return whether there is plenty of room for a load up to `reach`, and it is worth its bytes."""
        config, size = self.config, self.config.block_size
        hit = self.model.match((s.salt, s.tokens.tobytes()), kv_tokens)[0]
        lacks = (
            [self._lookup(self.kv, h) is None for h in s.chain[1 : reach // size + 1]] if self.kv is not None else []
        )
        lacks_state = self._lookup(self.states, s.chain[reach // size]) is None
        moved = lacks_state * config.state_bytes + sum(lacks) * config.page_bytes
        pages = self._blocks(len(s.tokens)) + len(lacks) + self._lacking()
        room = self._available(self.states) > 2 and (self.kv is None or self._available(self.kv) >= pages)
        return room and config.slab is None and moved <= config.host_bytes_per_token * (reach - hit)

    def _lookup(self, pool: BlockPool, block_hash: bytes) -> int | None:
        """Return the block of a hash that may be reused, or None."""
        block = pool.lookup(block_hash)
        return block if block is not None and (pool.exact[block] or not self.config.strict_reuse) else None

    def prefix_of(self, event: CacheEvent) -> Prefix:
        known = self._prefixes.get(event.block_hash)
        if self._arriving:
            assert known is not None and len(known[1]) == event.num_tokens * 4
            return known
        prefix = self._prefixes[event.block_hash] = super().prefix_of(event)
        assert known in (None, prefix)
        return prefix

    def kv_elsewhere(self) -> set[Prefix]:
        return {self._prefixes[each] for each in self._admission.tier.pages.hashes if each is not None}

    def launch(self) -> None:
        """Launch new transfers, as a host does after it has planned a step."""
        for transfer in self.transfers():
            if transfer.number not in self.memory.launched:
                self.memory.launch(transfer)

    def finish(self, all_transfers: bool = False) -> None:
        """End some transfers, as a host does before it plans a step."""
        for number, transfer in list(self.memory.launched.items()):
            if all_transfers or self.rng.random() > self.slow:
                failed = self.memory.end(number, self.rng.random() < self.failing)
                self.transferred(transfer, failed=failed)

    def check_contents(self) -> None:
        super().check_contents()
        size, tier = self.config.block_size, self._admission.tier
        written, digests, exact, windows, ends = self.memory.slots[0]
        for slot, block_hash in enumerate(tier.states.hashes):
            if block_hash is not None:
                tokens = self._prefixes[block_hash][1]
                digest, window = true_state(tokens, len(tokens) // 4)
                assert written[slot] and int(digests[slot]) == digest and windows[slot].tolist() == window
                assert ends[slot] == len(tokens) // 4
                assert bool(exact[slot]) == tier.states.exact[slot]
        written, _, digests, exact = self.memory.slots[1]
        for slot, block_hash in enumerate(tier.pages.hashes):
            if block_hash is not None:
                tokens = self._prefixes[block_hash][1]
                end = len(tokens) // 4
                assert written[slot].all() and (digests[slot] == true_page(tokens, end - size, end)).all()
                assert bool(exact[slot].all()) == tier.pages.exact[slot]

    def check_no_leak(self) -> None:
        self.finish(all_transfers=True)
        self._admission.tier.loads.let_go()
        super().check_no_leak()
        for pool in (self._admission.tier.states, self._admission.tier.pages):
            assert not any(pool.references) and not self._admission.tier.moves
            assert pool.num_free + pool.num_committed == pool.num_blocks


class TieredDriver(Driver):
    """Drive a tier as an engine does: end transfers before a step is planned, and launch them after."""

    def __init__(self, mix: Mix, **options: Any) -> None:
        super().__init__(mix)
        self.cache: TieredCache = TieredCache(self.config, **options)
        self.scheduler.cache = self.cache
        self.loading = 0  # schedules with a request that waits for a load

    def step(self) -> None:
        self.cache.finish()
        super().step()

    def schedule(self) -> Any:
        plan = self.scheduler.schedule()
        self.cache.launch()
        self.loading += any(request.load is not None for request in self.cache._admission.requests.values())
        return plan

    def wait(self) -> bool:
        """End all transfers; return False if there were none."""
        waits = bool(self.cache.memory.launched)
        self.cache.finish(all_transfers=True)
        return waits


def tiered(jobs: Any, seed: int = 0, failing: float = 0.0, slow: float = 0.5, **options: Any) -> TieredDriver:
    """Run jobs; options are fields of `Mix`, and all others of `CacheConfig`."""
    cache: dict[str, Any] = {"num_host_states": 50, "num_host_pages": 300}
    mix: dict[str, Any] = {}
    for name, value in options.items():
        (mix if name in Mix.__dataclass_fields__ else cache)[name] = value
    driver = TieredDriver(Mix(list(jobs), cache=cache, **mix), seed=seed, failing=failing, slow=slow)
    driver.run()
    return driver
