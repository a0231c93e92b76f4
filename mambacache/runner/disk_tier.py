"""Index block files, and access them in a thread."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from typing import Protocol

import torch

from mambacache.plan import BlockFile, Transfer
from mambacache.runner.directory import DamagedError, Directory, Folder, StoredFile

logger = logging.getLogger(__name__)

Key = tuple[str, bytes]
STOP, READ, WRITE = range(3)
"""Priorities of the thread, first to last."""


class Listing(Protocol):
    """Lists files, as a `Directory`."""

    path: Path

    @property
    def epoch(self) -> str: ...

    def renew(self) -> str: ...

    def files(self) -> list[StoredFile]: ...

    def room(self) -> int: ...

    def remove(self, file: StoredFile) -> None: ...

    def close(self) -> None: ...


class Filing:
    """Holds files to be "read", "written" or "deleted", unless `Worker.era` changes."""

    def __init__(self, what: str, era: int, wanted: int) -> None:
        self.what, self.era, self._wanted = what, era, wanted
        self.acts: deque[tuple[StoredFile, Callable[[], None]]] = deque()
        self.files: list[StoredFile] = []
        self.good: list[StoredFile] = []
        self.over = threading.Event()
        self.asked = False

    def add(self, file: StoredFile, act: Callable[[], None]) -> None:
        self.files.append(file)
        self.acts.append((file, act))

    def query(self) -> bool:
        return self.over.is_set()

    def synchronize(self) -> None:
        self.over.wait()

    @property
    def failed(self) -> bool:
        return len(self.good) < self._wanted


class Worker:
    """Runs filings in a thread, reads first."""

    def __init__(self, directory: Folder | Listing) -> None:
        self.directory = directory
        self.busy = threading.Lock()  # held during file access
        self.era = 0
        self._asked: SimpleQueue[tuple[int, int, Filing | None]] = SimpleQueue()  # its `put` is atomic under signals
        self._numbers = count()
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="mambacache files", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Tell whether the thread runs; False after a fork."""
        return self._thread.is_alive()

    def ask(self, filing: Filing) -> None:
        """Queue a filing once; without the thread end it at once."""
        if not self.alive:
            filing.over = threading.Event()  # a fork may copy a held lock
            filing.over.set()
        elif not filing.asked:
            self._asked.put((READ if filing.what == "read" else WRITE, next(self._numbers), filing))
            filing.asked = True

    def stop(self) -> None:
        """Stop the thread after its file and deletions."""
        self._asked.put((STOP, next(self._numbers), None))

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        line: list[tuple[int, int, Filing | None]] = []
        while True:
            while not line or not self._asked.empty():
                heappush(line, self._asked.get())
            filing = line[0][2]
            if filing is None:
                break
            if filing.acts:
                self._act(filing)
            else:
                heappop(line)
        while not self._asked.empty():
            heappush(line, self._asked.get())
        for *_, filing in sorted(line):  # a restart must not find removed files
            while filing is not None and filing.what == "deleted" and filing.acts:
                self._act(filing)
        self.directory.close()

    def _act(self, filing: Filing) -> None:
        file, act = filing.acts.popleft()
        try:
            with self.busy:
                if filing.era == self.era:
                    act()
                    filing.good.append(file)
        except BaseException as error:  # no error ends the thread
            self._tell(filing.what, error)
        if not filing.acts:
            filing.over.set()

    def _tell(self, what: str, error: BaseException) -> None:
        place = self.directory.path
        if isinstance(error, DamagedError):
            logger.warning("a file in %s is not what was written there, and is deleted: %s", place, error)
        elif what not in self._told:
            logger.warning(
                "files in %s cannot be %s, which is said once and costs hits: %s: %s",
                place, what, type(error).__name__, error,
            )  # fmt: skip
            self._told.add(what)


class FileIndex:
    """Implements the cache's `Files`.

    Args:
        limit: as `disk_cache_bytes`.
        identity: returns everything that states depend on.
    """

    def __init__(self, directory: Listing, limit: int | None, identity: Callable[[], str]) -> None:
        self._usable = True
        self._directory, self._identity = directory, identity
        self.key = self._make_key(directory.epoch)
        files = directory.files()
        self._index: OrderedDict[Key, StoredFile] = OrderedDict(((f.kind, f.block_hash), f) for f in files)
        self._born: dict[Key, int] = {}
        self._writers: dict[Key, int] = {}
        self._coming: set[StoredFile] = set()  # indexed, but incomplete
        self.num_bytes = sum(file.num_bytes for file in files)
        self._limit = (directory.room() + self.num_bytes) // 2 if limit is None else limit
        self._worker = Worker(directory)
        self._end = weakref.finalize(self, self._worker.stop)
        self._make_room(0)

    # --- called by the cache ---

    @property
    def present(self) -> bool:
        return self._usable and self._worker.alive

    def exact(self, kind: str, block_hash: bytes) -> bool | None:
        """Tell whether a file's block is exact; None without a complete file."""
        file = self._index.get((kind, block_hash))
        return file.exact if file is not None and file not in self._coming else None

    def drop(self, block_hashes: Iterable[bytes], writer: int | None = None) -> None:
        """Delete these hashes' files, or only those that `writer` wrote."""
        for key in [(kind, each) for each in block_hashes for kind in ("state", "kv")]:
            if writer in (None, self._writers.get(key)):
                self._remove(key)

    def drop_born(self, since: int) -> None:
        for key in [key for key, born in self._born.items() if born >= since]:
            self._remove(key)

    def clear(self) -> None:
        """Delete all files; a new epoch invalidates the rest."""
        self._index.clear()
        self._born.clear()
        self._writers.clear()
        self._coming.clear()
        self._worker.era += 1
        self.key, self.num_bytes = token_hex(16), 0
        if not self._worker.alive:
            return
        with self._worker.busy:
            try:
                self.key = self._make_key(self._directory.renew())
            except OSError as error:
                self._usable = False
                logger.error(
                    "%s cannot be written (%s) and may hold invalid files: delete it before the next start",
                    self._directory.path, error,
                )  # fmt: skip
            with suppress(OSError):
                for file in self._directory.files():
                    self._directory.remove(file)

    def ended(self, files: Iterable[StoredFile], good: Collection[StoredFile]) -> None:
        """End a transfer, and delete files that are not `good`."""
        for file in files:
            key = file.kind, file.block_hash
            if self._index.get(key) is not file:
                continue
            self._coming.discard(file)
            if file not in good:
                self._remove(key)

    def close(self) -> None:
        self._end()
        self._worker.join()

    def _make_key(self, epoch: str) -> str:
        return blake2b(repr((self._identity(), epoch)).encode(), digest_size=16).hexdigest()

    def _to_read(self, asked: BlockFile) -> StoredFile | None:
        key = asked.kind, asked.block_hash
        if self.exact(*key) is not asked.exact:
            return None
        self._index.move_to_end(key)
        return self._index[key]

    def _to_write(self, asked: BlockFile, block_bytes: int) -> StoredFile | None:
        """Return the file to write; evict others unless `asked.if_room`."""
        key, file = (asked.kind, asked.block_hash), StoredFile(asked.kind, asked.block_hash, asked.exact, block_bytes)
        if asked.if_room and self.num_bytes + file.num_bytes > self._limit:
            return None
        self._remove(key)
        if not self._make_room(file.num_bytes):
            return None
        self._index[key] = file
        self._coming.add(file)
        self._born[key], self._writers[key] = asked.born, asked.writer
        self.num_bytes += file.num_bytes
        return file

    def _make_room(self, num_bytes: int) -> bool:
        while self._index and self.num_bytes + num_bytes > self._limit:
            self._remove(next(iter(self._index)))
        return self.num_bytes + num_bytes <= self._limit

    def _remove(self, key: Key) -> None:
        """Forget and delete a file."""
        file = self._index.get(key)
        if file is not None:
            self._delete(file)
            del self._index[key]
            self._born.pop(key, None)
            self._writers.pop(key, None)
            self._coming.discard(file)
            self.num_bytes -= file.num_bytes

    def _delete(self, file: StoredFile) -> None:
        """Queue a file's deletion behind writes."""
        deletion = Filing("deleted", self._worker.era, 1)
        deletion.add(file, partial(self._directory.remove, file))
        self._worker.ask(deletion)


class DiskTier(FileIndex):
    """Moves blocks between files and host slots."""

    _directory: Directory

    def filing(self, transfer: Transfer, slots: Mapping[str, torch.Tensor]) -> Filing:
        """Return a transfer's filing; `slots` are uint8 [slots, bytes]."""
        filing = Filing("read" if transfer.to_host else "written", self._worker.era, len(transfer.files))
        for asked in transfer.files:
            block = slots[asked.kind][asked.slot].numpy().data
            file = self._to_read(asked) if transfer.to_host else self._to_write(asked, len(block))
            if file is not None:
                act = self._directory.read if transfer.to_host else partial(_write, self._directory, self._coming)
                filing.add(file, partial(act, file, block))
        if not filing.acts:
            filing.over.set()
        return filing

    def ask(self, filing: Filing) -> None:
        self._worker.ask(filing)

    def note(self, filing: Filing) -> None:
        self.ended(filing.files, filing.good)
        filing.files = []


def _write(directory: Folder, coming: set[StoredFile], file: StoredFile, block: memoryview) -> None:
    """Write a file unless removed: its deletion may be over."""
    if file in coming:
        directory.write(file, block)
