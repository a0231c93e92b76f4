"""A directory of files, one for each state or KV page, and each of them checked by its name, length and checksum."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import BinaryIO
from zlib import crc32

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

HEADER = Struct("<16s48sQI")
"""`MAGIC`, the file's name, bytes that follow, and their checksum."""

MAGIC = b"mambacache 1"
NAME = re.compile(r"[0-9a-f]{32}\.(state|kv)(\.near)?")
UNFINISHED = ".new"
OTHERS = 0o077
"""The permissions of all but the owner: states and KV tell what prompts said."""


class DamagedError(Exception):
    """A file is not what was written under its name."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredFile:
    """A file as its name tells of it: the block that it holds, whether that was computed exactly; and its bytes."""

    kind: str
    block_hash: bytes
    exact: bool
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of the file."""
        return HEADER.size + self.block_bytes

    @property
    def name(self) -> str:
        return f"{self.block_hash.hex()}.{self.kind}{'' if self.exact else '.near'}"


class Directory:
    """Reads and writes the files, for one process at a time: it holds a lock until it is closed or forgotten.

    A file gets its name once it is whole. Files of other names are nobody's business here. Only the owner can read the
    files, and a directory that is made here; one that was there before keeps its permissions, with a line in the log.

    Raises:
        OSError: it cannot be made or written.
        ValueError: another engine has it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & OTHERS:
            logger.warning("disk_cache_dir %r is open to other users: run chmod 700 on it", str(path))
        self._lock = FileLock(path / "lock", timeout=0, mode=0o600, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"disk_cache_dir {str(path)!r} is in use by another engine: close that first, or give each its own"
            ) from None
        for left in self._names(UNFINISHED):
            (path / left).unlink()
        if not self.epoch:
            self.renew()

    @property
    def epoch(self) -> str:
        """What names this period of the directory's life, from one `renew` to the next; "" if nothing does."""
        with suppress(OSError):
            return (self.path / "epoch").read_bytes().hex()
        return ""

    def renew(self) -> str:
        """Begins another epoch, so that nothing written before counts any more, even if the machine stops now.

        Raises:
            OSError: it cannot be written, and the old one goes on.
        """
        epoch, unfinished = secrets.token_bytes(16), self.path / f"epoch{UNFINISHED}"
        with _created(unfinished) as stream:
            stream.write(epoch)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(self.path / "epoch")
        directory = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return epoch.hex()

    def files(self) -> list[StoredFile]:
        """All that are whole, those first that were used longest ago. Other users can read none of them afterwards."""
        found = []
        for name in self._names():
            with suppress(OSError):  # it may be gone by now
                of_file, stem, *endings = (self.path / name).stat(), *name.split(".")
                if of_file.st_mode & OTHERS:
                    (self.path / name).chmod(0o600)
                size = of_file.st_size - HEADER.size
                file = StoredFile(endings[0], bytes.fromhex(stem), "near" not in endings, size)
                found.append((of_file.st_mtime_ns, file))
        return [file for _, file in sorted(found, key=lambda each: each[0])]

    def room(self) -> int:
        """Bytes that are free on its disk."""
        return shutil.disk_usage(self.path).free

    def write(self, file: StoredFile, block: memoryview) -> None:
        """Makes a file of a block's bytes.

        Raises:
            OSError: it cannot be written; nothing of it is left then, if that can be helped.
        """
        unfinished = self.path / f"{file.name}{UNFINISHED}"
        try:
            with _created(unfinished) as stream:
                stream.write(_header(file, block))
                stream.write(block)
            unfinished.replace(self.path / file.name)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def read(self, file: StoredFile, block: memoryview) -> None:
        """Fills a block with a file's bytes, and notes that it was used. Into the slot itself, and not through a map of
        the file: one that is cut short under a map takes the process with it.

        Raises:
            OSError: it cannot be read.
            DamagedError: it is not what was written; the block's bytes mean nothing then.
        """
        path = self.path / file.name
        with path.open("rb") as stream:
            header = stream.read(HEADER.size)
            size = os.fstat(stream.fileno()).st_size
            if size != HEADER.size + len(block):
                raise DamagedError(f"{path.name} has {size:,} bytes and not {HEADER.size + len(block):,}")
            if stream.readinto(block) != len(block) or header != _header(file, block):
                raise DamagedError(f"{path.name} has another header or checksum")
        with suppress(OSError):
            os.utime(path)

    def remove(self, file: StoredFile) -> None:
        """Deletes a file; one that is gone already is no matter.

        Raises:
            OSError: it cannot be deleted.
        """
        (self.path / file.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets others have it."""
        self._lock.release()

    def _names(self, ending: str = "") -> Iterator[str]:
        with os.scandir(self.path) as entries:
            names = [entry.name for entry in entries]
        return (name for name in names if name.endswith(ending) and NAME.fullmatch(name.removesuffix(ending)))


def _created(path: Path) -> BinaryIO:
    """Open a new file that only its owner can read; what stood there is deleted."""
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    return path.open("wb")


def _header(file: StoredFile, block: memoryview) -> bytes:
    name = file.name.encode()
    return HEADER.pack(MAGIC, name, len(block), crc32(block, crc32(name)))
