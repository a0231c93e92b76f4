"""Allocate host memory that a GPU accesses directly."""

from __future__ import annotations

import mmap
import weakref
from contextlib import suppress
from pathlib import Path

import torch


def available_bytes() -> int:
    """Return the host's free memory, system caches included."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return next(int(words[1]) for words in lines if words[0] == "MemAvailable:") * 1024


class HostMemory:
    """Owns pinned slots in host memory until `close`.

    `mmap` gives separate pages, since none is pinned twice; `pin_memory` would round sizes up.
    Errors name `option`.
    """

    def __init__(self, device: torch.device, option: str = "host_cache_bytes") -> None:
        self._device, self._option = device, option
        self._pinned: list[torch.Tensor] = []
        self.close = weakref.finalize(self, _unpin, device, self._pinned)
        self.close.atexit = False  # the driver may be unloaded by then

    def slots(self, count: int, slot_bytes: int) -> torch.Tensor:
        """Return slots, uint8 [count, slot_bytes], or raise ValueError."""
        size = count * slot_bytes
        try:
            slots = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).view(count, slot_bytes)
        except (OSError, OverflowError, ValueError) as error:
            raise ValueError(f"{size:,} bytes of host memory cannot be had: lower {self._option}") from error
        if self._device.type == "cuda":
            if int(torch.cuda.cudart().cudaHostRegister(slots.data_ptr(), size, 0)) != 0:
                with suppress(RuntimeError):  # clears the runtime's error
                    torch.zeros(1, device=self._device)
                raise ValueError(f"{size:,} bytes of host memory cannot be pinned: lower {self._option}")
            self._pinned.append(slots)
        return slots


def _unpin(device: torch.device, pinned: list[torch.Tensor]) -> None:
    if pinned:
        torch.cuda.synchronize(device)  # copies may be in flight
    while pinned:
        torch.cuda.cudart().cudaHostUnregister(pinned.pop().data_ptr())
