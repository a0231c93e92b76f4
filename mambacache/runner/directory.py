"""Store each state or KV page in a checked file."""

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
"""`MAGIC`, file name, bytes behind it, and checksum."""

MAGIC = b"mambacache 1"
NAME = re.compile(r"[0-9a-f]{32}\.(state|kv)(\.near)?")
UNFINISHED = ".new"
OTHERS = 0o077
"""Permissions of others: states and KV reveal prompts."""


class DamagedError(Exception):
    """Signals a file that differs from the block written."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredFile:
    kind: str
    block_hash: bytes
    exact: bool
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        return HEADER.size + self.block_bytes

    @property
    def name(self) -> str:
        return f"{self.block_hash.hex()}.{self.kind}{'' if self.exact else '.near'}"


class Folder:
    """Accesses files of an open `Directory`; a file gets its name when complete."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, file: StoredFile, block: memoryview) -> None:
        """Write a block; after an error delete the incomplete file if possible."""
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
        """Read a file into `block`, undefined after a DamagedError: length, header or checksum differ.

        A memory map would kill the process on a truncated file.
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
        (self.path / file.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Do nothing: the `Directory` holds the lock."""


class Directory(Folder):
    """Lists and invalidates block files; a lock excludes other processes until `close`.

    Errors name `option`.

    Raises:
        OSError: the directory cannot be created or written.
        ValueError: another engine holds the lock.
    """

    def __init__(self, path: Path, option: str = "disk_cache_dir") -> None:
        super().__init__(path)
        path.mkdir(0o700, parents=True, exist_ok=True)
        if path.stat().st_mode & OTHERS:
            logger.warning("%s %r is open to other users: run chmod 700 on it", option, str(path))
        self._lock = FileLock(path / "lock", timeout=0, mode=0o600, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise ValueError(
                f"{option} {str(path)!r} is in use by another engine: close that first, or give each its own"
            ) from None
        for left in self._names(UNFINISHED):
            (path / left).unlink()
        if not self.epoch:
            self.renew()

    @property
    def epoch(self) -> str:
        with suppress(OSError):
            return (self.path / "epoch").read_bytes().hex()
        return ""

    def renew(self) -> str:
        """Invalidate all files by a new epoch; an OSError may leave the old epoch valid."""
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
        """Return files, least recently used first, made private."""
        found = []
        for name in self._names():
            with suppress(OSError):
                of_file, stem, *endings = (self.path / name).stat(), *name.split(".")
                if of_file.st_mode & OTHERS:
                    (self.path / name).chmod(0o600)
                size = of_file.st_size - HEADER.size
                file = StoredFile(endings[0], bytes.fromhex(stem), "near" not in endings, size)
                found.append((of_file.st_mtime_ns, file))
        return [file for _, file in sorted(found, key=lambda each: each[0])]

    def room(self) -> int:
        return shutil.disk_usage(self.path).free

    def close(self) -> None:
        self._lock.release()

    def _names(self, ending: str = "") -> Iterator[str]:
        with os.scandir(self.path) as entries:
            names = [entry.name for entry in entries]
        return (name for name in names if name.endswith(ending) and NAME.fullmatch(name.removesuffix(ending)))


def _created(path: Path) -> BinaryIO:
    path.unlink(missing_ok=True)
    path.touch(0o600, exist_ok=False)
    return path.open("wb")


def _header(file: StoredFile, block: memoryview) -> bytes:
    name = file.name.encode()
    return HEADER.pack(MAGIC, name, len(block), crc32(block, crc32(name)))
