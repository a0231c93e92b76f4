"""The third place: files of what the host's memory holds, which outlive the process. What the cache asks of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Files(Protocol):
    """Which blocks are in files, by kind ("state" or "kv") and hash. Blocks go there and come from there as transfers;
    it is only asked here, and told what is wrong."""

    @property
    def present(self) -> bool:
        """Whether anything can be there."""

    @property
    def key(self) -> object:
        """Enters every hash: another one for whatever makes states incomparable, and whenever all was forgotten."""

    def exact(self, kind: str, block_hash: bytes) -> bool | None:
        """Whether the block in a file was computed exactly; None if there is no such file."""

    def drop(self, block_hashes: Iterable[bytes], writer: int | None = None) -> None:
        """Delete the files of these hashes, unless another request than `writer` wrote their blocks."""

    def drop_born(self, since: int) -> None:
        """So is what was written by this issue of this process or a later one."""

    def clear(self) -> None:
        """Forgets all, for whoever comes later too."""


class NoFiles:
    """There are none; `key` counts how often all was forgotten."""

    present = False
    key = 0

    def exact(self, kind: str, block_hash: bytes) -> None:
        return None

    def drop(self, block_hashes: Iterable[bytes], writer: int | None = None) -> None:
        """Nothing is there."""

    def drop_born(self, since: int) -> None:
        """Nor is this."""

    def clear(self) -> None:
        self.key += 1
