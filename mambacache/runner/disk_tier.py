"""The tier in files: which blocks are there, and the thread that reads and writes them."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import count
from queue import SimpleQueue
from secrets import token_hex

import torch

from mambacache.plan import BlockFile, Transfer
from mambacache.runner.directory import DamagedError, Directory, StoredFile

logger = logging.getLogger(__name__)

Key = tuple[str, bytes]
STOP, READ, WRITE = range(3)
"""What the thread does first."""


class Filing:
    """Files to read, to write or to delete, of which the thread takes one after the other.

    Args:
        what: becomes of them, "read", "written" or "deleted".
        era: of `Worker`, in which this is wanted.
        wanted: how many there should be.
    """

    def __init__(self, what: str, era: int, wanted: int) -> None:
        self.what, self.era, self._wanted = what, era, wanted
        self.acts: deque[tuple[StoredFile, Callable[[], None]]] = deque()  # that are left
        self.files: list[StoredFile] = []
        self.good: list[StoredFile] = []  # with which the thread was done
        self.over = threading.Event()
        self.asked = False

    def add(self, file: StoredFile, act: Callable[[], None]) -> None:
        self.files.append(file)
        self.acts.append((file, act))

    def query(self) -> bool:
        """Whether it is over."""
        return self.over.is_set()

    def synchronize(self) -> None:
        """Returns when it is over."""
        self.over.wait()

    @property
    def failed(self) -> bool:
        """Whether any of its files did."""
        return len(self.good) < self._wanted


class Worker:
    """A thread that does one thing after another, reads before all else. It knows no books: it is given bytes.

    What it raises is told in the log, of each kind of trouble once, or of a damaged file each time.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.busy = threading.Lock()  # held while a file is read, written or deleted
        self.era = 0  # what is wanted in another one is not done any more
        self._asked: SimpleQueue[tuple[int, int, Filing | None]] = SimpleQueue()  # whose put no signal can cut in two
        self._numbers = count()
        self._told: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="mambacache files", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is there: it is not in a process that was forked off, whose parent's the files are."""
        return self._thread.is_alive()

    def ask(self, filing: Filing) -> None:
        """Puts files in line, unless that was done before; twice is no matter. Without the thread it is over."""
        if not self.alive:
            filing.over = threading.Event()  # the thread may have held the other one's lock when it was forked
            filing.over.set()
        elif not filing.asked:
            self._asked.put((READ if filing.what == "read" else WRITE, next(self._numbers), filing))
            filing.asked = True

    def stop(self) -> None:
        """It ends after what it is doing, deletes what is given up, and lets go of the directory."""
        self._asked.put((STOP, next(self._numbers), None))

    def join(self) -> None:
        """Returns when it has ended."""
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
        for *_, filing in sorted(line):  # who comes next may find no file that was given up: it may hold what is wrong
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
        except BaseException as error:  # whatever it is, the next file may do better
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


class DiskTier:
    """What is in a directory, for the cache as its `Files`, and for `HostTier` the way there and back.

    All but the thread's own acts is done by its caller's thread. A hash counts under one `key` alone, which is made of
    all that states depend on and of the directory's epoch.

    Args:
        directory: which this owns from now on.
        limit: bytes of all its files at most, of which those go first that were used longest ago; None for half of what
            its disk has free beside them.
        identity: tells what states depend on, as it is when it is called.
    """

    def __init__(self, directory: Directory, limit: int | None, identity: Callable[[], str]) -> None:
        self._usable = True
        self._directory, self._identity = directory, identity
        self.key = self._make_key(directory.epoch)
        files = directory.files()
        self._index: OrderedDict[Key, StoredFile] = OrderedDict(((f.kind, f.block_hash), f) for f in files)
        self._born: dict[Key, int] = {}  # of those of this process
        self._writers: dict[Key, int] = {}  # the requests that wrote them
        self._coming: set[StoredFile] = set()  # which are in the index, and being written
        self.num_bytes = sum(file.num_bytes for file in files)
        self._limit = (directory.room() + self.num_bytes) // 2 if limit is None else limit
        self._worker = Worker(directory)
        self._end = weakref.finalize(self, self._worker.stop)
        self._make_room(0)

    # --- as the cache sees it ---

    @property
    def present(self) -> bool:
        """Whether files can be read and written."""
        return self._usable and self._worker.alive

    def exact(self, kind: str, block_hash: bytes) -> bool | None:
        """Whether the block in a file was computed exactly; None if there is no such file."""
        file = self._index.get((kind, block_hash))
        return file.exact if file is not None and file not in self._coming else None

    def drop(self, block_hashes: Iterable[bytes], writer: int | None = None) -> None:
        """Delete the files of these hashes, unless another request than `writer` wrote their blocks."""
        for key in [(kind, each) for each in block_hashes for kind in ("state", "kv")]:
            if writer in (None, self._writers.get(key)):
                self._remove(key)

    def drop_born(self, since: int) -> None:
        """So is what was written by this issue of this process or a later one."""
        for key in [key for key, born in self._born.items() if born >= since]:
            self._remove(key)

    def clear(self) -> None:
        """Deletes all, and sees to it that what cannot be deleted counts no more, here or after a restart."""
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
                    "%s cannot be written (%s) and may hold what was to be forgotten: delete it before the next start",
                    self._directory.path, error,
                )  # fmt: skip
            with suppress(OSError):
                for file in self._directory.files():
                    self._directory.remove(file)

    # --- as `HostTier` sees it ---

    def filing(self, transfer: Transfer, slots: Mapping[str, torch.Tensor]) -> Filing:
        """What is to be done for a transfer that has files, once `ask` is told. `slots` are the host's by kind, uint8
        [slots, bytes]."""
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
        """Has the thread do it, unless that was asked before."""
        self._worker.ask(filing)

    def note(self, filing: Filing) -> None:
        """Takes down what became of a transfer that is over."""
        for file in filing.files:
            key = file.kind, file.block_hash
            if self._index.get(key) is not file:
                continue  # it was given up meanwhile
            self._coming.discard(file)
            if file not in filing.good:
                self._remove(key)
        filing.files = []

    def close(self) -> None:
        """Ends the thread, whatever is left for it to do."""
        self._end()
        self._worker.join()

    # --- inside ---

    def _make_key(self, epoch: str) -> str:
        return blake2b(repr((self._identity(), epoch)).encode(), digest_size=16).hexdigest()

    def _to_read(self, asked: BlockFile) -> StoredFile | None:
        """The file to read, which counts as used; None if it is gone, or holds another block than was asked for."""
        key = asked.kind, asked.block_hash
        if self.exact(*key) is not asked.exact:
            return None
        self._index.move_to_end(key)
        return self._index[key]

    def _to_write(self, asked: BlockFile, block_bytes: int) -> StoredFile | None:
        """The file to write, for which others were given up if they must and may; None if there can be no room."""
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
        """Gives up a file, and deletes it: behind what is being written, which may be itself. One that is not written
        by then never will be."""
        file = self._index.get(key)
        if file is not None:
            deletion = Filing("deleted", self._worker.era, 1)
            deletion.add(file, partial(self._directory.remove, file))
            self._worker.ask(deletion)
            del self._index[key]
            self._born.pop(key, None)
            self._writers.pop(key, None)
            self._coming.discard(file)
            self.num_bytes -= file.num_bytes


def _write(directory: Directory, coming: set[StoredFile], file: StoredFile, block: memoryview) -> None:
    """Nothing of a file that was given up meanwhile: its deletion may be over, and no other one would follow."""
    if file in coming:
        directory.write(file, block)
