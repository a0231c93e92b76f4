"""Keep files behind the symbolic host tier: they outlive a cache, fail, and are lost now and then."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from cache_model import Prefix
from mambacache.config import CacheConfig
from mambacache.plan import Transfer
from symbolic import WINDOW, true_page, true_state
from symbolic_jobs import Mix
from symbolic_tier import HostMemory, TieredCache, TieredDriver

KINDS = ("state", "kv")
Key = tuple[str, bytes]


class SymbolicFiles:
    """Stand in for `Files`; a file holds a block's entries of `HostMemory`. At most `limit` files stay."""

    def __init__(self, limit: int = 1000) -> None:
        self.present, self.key, self.limit = True, 0, limit
        self.kept: dict[Key, tuple[bool, int, list[np.ndarray]]] = {}
        self.coming: dict[Key, int] = {}  # number of the transfer
        self.writers: dict[Key, int] = {}  # requests of this process
        self.prefixes: dict[bytes, Prefix] = {}

    def exact(self, kind: str, block_hash: bytes) -> bool | None:
        file = self.kept.get((kind, block_hash))
        return file[0] if file is not None else None

    def drop(self, block_hashes: Iterable[bytes], writer: int | None = None) -> None:
        for key in [(kind, block_hash) for block_hash in block_hashes for kind in KINDS]:
            if writer in (None, self.writers.get(key)):
                self.kept.pop(key, None)
                self.coming.pop(key, None)

    def drop_born(self, since: int) -> None:
        """Drop the files born at `since` or later, and all unfinished files."""
        self.kept = {key: file for key, file in self.kept.items() if file[1] < since}
        self.coming.clear()

    def clear(self) -> None:
        self.key += 1
        self.kept.clear()
        self.coming.clear()

    def restarted(self) -> None:
        """Forget births, writers and unfinished files, as a new process does."""
        self.kept = {key: (exact, 0, rows) for key, (exact, _, rows) in self.kept.items()}
        self.coming.clear()
        self.writers.clear()

    def check(self) -> None:
        """Check that every file holds the tokens that its hash names."""
        for (kind, block_hash), (exact, _, rows) in self.kept.items():
            tokens = self.prefixes[block_hash][1]
            end = len(tokens) // 4
            assert rows[0].all(), "a file holds a block that was never written"
            if kind == "state":
                digest, window = true_state(tokens, end)
                assert int(rows[1]) == digest and rows[3][:WINDOW].tolist() == window and bool(rows[2]) == exact
            else:
                size = len(rows[0])
                assert (rows[2] == true_page(tokens, end - size, end)).all() and bool(rows[3].all()) == exact


class FiledMemory(HostMemory):
    """Copy between slots and files when a transfer ends."""

    def __init__(self, cache: FiledCache) -> None:
        super().__init__(cache)
        self.files, self.rng = cache.files, random.Random(0)
        self.read: dict[int, list[list[np.ndarray]] | None] = {}  # contents of the files when the transfer began

    def launch(self, transfer: Transfer) -> None:
        if not transfer.files:
            super().launch(transfer)
            return
        tier, found = self._cache._admission.tier, []
        for kind, slot, block_hash, exact, *_ in transfer.files:
            assert slot and (tier.states, tier.pages)[KINDS.index(kind)].references[slot], "a busy slot may be taken"
            if transfer.to_host:
                self.slots[KINDS.index(kind)][0][slot] = False
                file = self.files.kept.get((kind, block_hash))
                found += [file[2]] if file is not None and file[0] == exact else []
            else:
                self.files.coming[kind, block_hash] = transfer.number
        self.read[transfer.number] = found if len(found) == len(transfer.files) else None
        self.launched[transfer.number] = transfer

    def end(self, number: int, failed: bool) -> bool:
        transfer = self.launched[number]
        if not transfer.files:
            return super().end(number, failed)
        del self.launched[number]
        read = self.read.pop(number)
        if not transfer.to_host:
            return self._write(transfer, failed)
        for file, rows in zip(transfer.files, read or (), strict=False):
            for slots, row in zip(self.slots[KINDS.index(file.kind)], rows, strict=True):
                slots[file.slot] = row
        if failed and read:  # one file is damaged, and deleted
            self.files.kept.pop(self.rng.choice([(file.kind, file.block_hash) for file in transfer.files]), None)
        return failed or read is None

    def _write(self, transfer: Transfer, failed: bool) -> bool:
        files = self.files
        for kind, slot, block_hash, exact, born, writer, if_room in transfer.files:
            files.writers[kind, block_hash] = writer
            room = not if_room or len(files.kept) < files.limit
            wanted = files.coming.get((kind, block_hash)) == transfer.number
            if wanted:
                del files.coming[kind, block_hash]
            if wanted and room and (not failed or self.rng.random() < 0.5):
                rows = [np.copy(slots[slot]) for slots in self.slots[KINDS.index(kind)]]
                files.kept[kind, block_hash] = exact, born, rows
            while len(files.kept) > files.limit:
                del files.kept[next(iter(files.kept))]
        return failed


class FiledCache(TieredCache):
    """Put files behind a `TieredCache`."""

    def __init__(self, config: CacheConfig, files: SymbolicFiles, **options: Any) -> None:
        self.files = files
        super().__init__(config, files=files, **options)
        self.memory = FiledMemory(self)
        self._prefixes = files.prefixes

    def check_contents(self) -> None:
        super().check_contents()
        self.files.check()

    def _filed(self) -> list[tuple[str, bytes]]:
        return [key for key, file in self.files.kept.items() if file[0] or not self.config.strict_reuse]

    def flush(self) -> int:
        """Write all blocks to files, as an engine does when it closes; return the number of rounds."""
        count = 0
        while found := self.transfers(flush=True):
            count += 1
            assert count < 1000, "no end"
            for transfer in found:
                if transfer.number not in self.memory.launched:
                    self.memory.launch(transfer)
            self.finish(all_transfers=True)
        return count


class FiledDriver(TieredDriver):
    """Drive a cache with files."""

    def __init__(self, mix: Mix, files: SymbolicFiles, **options: Any) -> None:
        super().__init__(mix, **options)
        self.cache: FiledCache = FiledCache(self.config, files, **options)
        self.scheduler.cache = self.cache
