"""Share numbers between a vLLM's processes in a private folder.

Each process keeps a shared lock on it. The next start removes unlocked folders. Methods raise OSError.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

PREFIX = "mambacache-vllm-"
NAME = re.compile(r"\d+\.((blocks|prom)(\.new)?|\d+\.(ends|identity(\.new)?))")
"""Names of files that may be removed."""


class PrivateFolder:
    """Joins the processes of an existing folder."""

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, _locked(path, fcntl.LOCK_SH)

    def names(self, suffix: str) -> list[str]:
        return sorted(name for name in os.listdir(self._fd) if name.endswith(suffix))

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file atomically."""
        new = f"{name}.new"
        self.delete(new)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600, dir_fd=self._fd), "wb") as file:
            file.write(content)
        os.replace(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def read(self, name: str) -> bytes:
        """Return the contents of this user's file."""
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)  # do not wait at pipes
        with open(descriptor, "rb") as file:
            self._check_own(descriptor, name)
            return file.read()

    def map(self, name: str, size: int, *, new: bool) -> mmap.mmap:
        """Map this user's file of `size` bytes into memory that processes share; `new`: replace it with zeros."""
        if new:
            self.delete(name)
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT | os.O_EXCL if new else 0)
        with open(os.open(name, flags, 0o600, dir_fd=self._fd), "r+b", buffering=0) as file:
            self._check_own(file.fileno(), name)
            if new:
                file.truncate(size)
            return mmap.mmap(file.fileno(), size)

    def _check_own(self, descriptor: int, name: str) -> None:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{self._path / name} is no file of this user")

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove(self) -> None:
        _remove(self._path, self._fd)


_found = cache(PrivateFolder)


def _path(instance_id: str) -> Path:
    return Path(tempfile.gettempdir(), PREFIX + instance_id)


def folder_of(instance_id: str) -> PrivateFolder:
    """Join a vLLM's folder."""
    return _found(_path(instance_id))


def made_folder_of(instance_id: str) -> PrivateFolder:
    """Join or make a vLLM's folder."""
    path = _path(instance_id)
    while True:
        with suppress(FileExistsError):
            path.mkdir(0o700)
        with suppress(FileNotFoundError):  # another process removed it, unlocked
            return _found(path)


def remove(instance_id: str) -> None:
    """Remove a vLLM's folder; later writes raise OSError."""
    with suppress(OSError):
        folder_of(instance_id).remove()


def remove_left() -> None:
    """Remove this user's unlocked folders."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            descriptor = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path, descriptor)
            os.close(descriptor)


def _locked(path: Path, lock: int) -> int:
    """Open and lock a private folder; FileNotFoundError: it is gone."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} belongs to another user or is open to others")
        fcntl.flock(descriptor, lock)
        if not os.path.samestat(status, path.lstat()):
            raise FileNotFoundError(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(path: Path, descriptor: int) -> None:
    with suppress(OSError):
        for name in filter(NAME.fullmatch, os.listdir(descriptor)):
            os.unlink(name, dir_fd=descriptor)
        path.rmdir()
