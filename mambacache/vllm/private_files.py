"""The processes of one vLLM tell each other numbers by files in a folder that no other user may enter.

All processes of a vLLM know its instance id, which the folder's name holds. A process that uses the folder has a shared
lock on it until the process ends. A folder without a lock was left behind, and the next start removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

PREFIX = "mambacache-vllm-"
NAME = re.compile(r"\d+\.(blocks|prom)(\.new)?")
"""Files of other names are not removed."""


class PrivateFolder:
    """Join the processes that use a folder.

    Raises:
        FileNotFoundError: there is none.
        OSError: it is a link, belongs to another user, or is open to others.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._fd = path, _locked(path, fcntl.LOCK_SH)

    def names(self, suffix: str) -> list[str]:
        """Return the names of the files that end so."""
        return sorted(name for name in os.listdir(self._fd) if name.endswith(suffix))

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file, which readers see whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        new = f"{name}.new"
        self.delete(new)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600, dir_fd=self._fd), "wb") as file:
            file.write(content)
        os.replace(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def read(self, name: str) -> bytes:
        """Return what a file holds.

        Raises:
            OSError: there is no such file of this user, or it cannot be read.
        """
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._fd)  # no waiting at pipes
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise PermissionError(f"{self._path / name} is no file of this user")
            return file.read()

    def delete(self, name: str) -> None:
        """Remove a file, if there is one."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)

    def remove(self) -> None:
        """Remove the folder and its files."""
        _remove(self._path, self._fd)


_found = cache(PrivateFolder)


def _path(instance_id: str) -> Path:
    return Path(tempfile.gettempdir(), PREFIX + instance_id)


def folder_of(instance_id: str) -> PrivateFolder:
    """Return the folder of a vLLM; it is this process's, too, from now on.

    Raises:
        OSError: as of `PrivateFolder`.
    """
    return _found(_path(instance_id))


def made_folder_of(instance_id: str) -> PrivateFolder:
    """Return the folder of a vLLM, which is made if there is none.

    Raises:
        OSError: as of `PrivateFolder`, or the folder cannot be made.
    """
    path = _path(instance_id)
    while True:
        with suppress(FileExistsError):
            path.mkdir(0o700)
        with suppress(FileNotFoundError):  # another process took it for a folder that was left behind
            return _found(path)


def remove(instance_id: str) -> None:
    """Remove the folder of a vLLM that ends. A process that writes there afterwards gets an OSError."""
    with suppress(OSError):
        folder_of(instance_id).remove()


def remove_left() -> None:
    """Remove the folders of this user that no process has a lock on.

    Raises:
        OSError: there is no temporary folder.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or in use
            descriptor = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(path, descriptor)
            os.close(descriptor)


def _locked(path: Path, lock: int) -> int:
    """Open and lock a folder of this user alone.

    Raises:
        FileNotFoundError: it is gone, be it while this process waited for the lock.
        OSError: it cannot be locked or is not this user's alone.
    """
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
