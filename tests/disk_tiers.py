"""The tiers in host memory and in files, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from mambacache.plan import BlockFile, Transfer
from mambacache.runner.directory import Directory
from mambacache.runner.disk_tier import DiskTier
from mambacache.runner.host_tier import HostTier
from test_runner_host_tier import pools, run

SLOTS = {"state": 3, "kv": 6}
BLOCK_BYTES = {"state": 512, "kv": 2048}


class Tiers:
    """A process on a directory: files, and the host's slots before them."""

    def __init__(self, path: Path, limit: int | None = None, device: str = "cpu", model: str = "model") -> None:
        self.pools = pools(device)
        assert [pool.block_bytes for pool in self.pools] == list(BLOCK_BYTES.values())
        self.disk = DiskTier(Directory(path), limit, lambda: model)
        self.host = HostTier(self.pools, tuple(SLOTS.values()), self.disk)
        for slots in self.host._slots.values():
            slots.copy_(torch.randint(256, slots.shape, dtype=torch.uint8))
        self._number = 0

    def run(self, to_host: bool, *files: BlockFile) -> bool:
        """Whether a transfer between slots and files failed."""
        return next(iter(run(self.host, self.transfer(to_host, *files)).values()))

    def transfer(self, to_host: bool, *files: BlockFile) -> Transfer:
        self._number += 1
        return Transfer(self._number, to_host, (), (), files)

    def copy(self, to_host: bool, states: tuple[tuple[int, int], ...], pages: tuple[tuple[int, int], ...]) -> None:
        self._number += 1
        assert set(run(self.host, Transfer(self._number, to_host, states, pages)).values()) == {False}

    def slot(self, kind: str, slot: int) -> torch.Tensor:
        return self.host._slots[kind][slot]


def state(number: int, slot: int = 1, exact: bool = True, born: int = 0) -> BlockFile:
    return BlockFile("state", slot, bytes([number]) * 16, exact, born)


def page(number: int, slot: int = 1, born: int = 0) -> BlockFile:
    return BlockFile("kv", slot, bytes([number]) * 16, True, born)


def stored(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()} - {"lock", "epoch"}


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)
