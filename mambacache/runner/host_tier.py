"""Copy blocks between device, host and files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mambacache.kernels import StatePool, copy_blocks
from mambacache.plan import Transfer
from mambacache.runner.disk_tier import Filing
from mambacache.runner.host_memory import HostMemory

logger = logging.getLogger(__name__)


class Files(Protocol):
    """Moves blocks, as a `DiskTier`."""

    def filing(self, transfer: Transfer, slots: Mapping[str, torch.Tensor]) -> Filing: ...

    def ask(self, filing: Filing) -> None: ...

    def note(self, filing: Filing) -> None: ...

    def close(self) -> None: ...


@dataclass
class Copy:
    """Holds a launched transfer."""

    transfer: Transfer
    pairs: list[torch.Tensor] = field(default_factory=list)  # alive until the device has read them
    done: torch.cuda.Event | Filing | None = None
    failed: bool = False


class HostTier:
    """Runs transfers beside the steps; raises ValueError if memory cannot be pinned.

    GPU copies run on a separate stream, behind all earlier work. A failed transfer costs only a hit.
    """

    def __init__(
        self, pools: Sequence[StatePool], slots: Sequence[int], disk: Files | None = None, *,
        option: str = "host_cache_bytes",
    ) -> None:  # fmt: skip
        self._device = pools[0].buffer.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._memory = HostMemory(self._device, option)
        self._pools = [  # slot 0 holds no block
            (pool.slabs, self._memory.slots(count + 1, pool.block_bytes))
            for pool, count in zip(pools, slots, strict=True)
        ]
        self._disk = disk
        self._slots = {kind: slots for kind, (_, slots) in zip(("state", "kv"), self._pools, strict=False)}
        self._copies: dict[int, Copy] = {}
        self._told = False
        if self._stream is not None:
            with torch.cuda.device(self._device):  # compiles the kernel
                self._copy(Copy(Transfer(0, True, ((0, 0),), ((0, 0),))))

    @property
    def has_files(self) -> bool:
        return self._disk is not None

    @property
    def under_way(self) -> bool:
        return bool(self._copies)

    def launch(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            copy = self._copies.get(transfer.number)
            if copy is None:
                self._copies[transfer.number] = copy = Copy(transfer)
                self._launch(copy)
            elif self._disk is not None and isinstance(copy.done, Filing):
                self._disk.ask(copy.done)  # again, after an interrupt

    def ended(self) -> dict[Transfer, bool]:
        """Tell whether each ended transfer failed, until `forget`."""
        over = [copy for copy in self._copies.values() if copy.done is None or copy.done.query()]
        for copy in over:
            if self._disk is not None and isinstance(copy.done, Filing):
                self._disk.note(copy.done)
                copy.failed = copy.done.failed
        return {copy.transfer: copy.failed for copy in over}

    def forget(self, transfers: Mapping[Transfer, bool]) -> None:
        for transfer in transfers:
            self._copies.pop(transfer.number, None)

    def wait(self) -> None:
        """Wait for the first launched transfer, writes to files last."""
        copies = sorted(self._copies.values(), key=lambda copy: bool(copy.transfer.files) and not copy.transfer.to_host)
        copy = next(iter(copies), None)
        if copy is not None and copy.done is not None:
            self.launch([copy.transfer])
            copy.done.synchronize()

    def close(self) -> None:
        """Release the memory; drop pending writes to files."""
        if self._disk is not None:
            self._disk.close()
        self._memory.close()
        self._pools, self._copies, self._slots = [], {}, {}

    def _launch(self, copy: Copy) -> None:
        copy.failed = True  # also after an interrupt
        if self._disk is not None and copy.transfer.files:
            copy.done = self._disk.filing(copy.transfer, self._slots)
            self._disk.ask(copy.done)
            return
        good = False
        with ExitStack() as stack:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            try:
                self._copy(copy)
                good = True
            except Exception:
                if not self._told:
                    logger.exception("a transfer between device and host failed, which is said once: it costs a miss")
                self._told = True
            finally:
                if self._stream is not None:  # with copies in flight
                    copy.done = torch.cuda.Event()
                    copy.done.record()
            copy.failed = not good

    def _copy(self, copy: Copy) -> None:
        transfer = copy.transfer
        for (device, slots), pairs in zip(self._pools, (transfer.states, transfer.pages), strict=False):
            if not pairs:
                continue
            rows = torch.tensor(pairs if transfer.to_host else [pair[::-1] for pair in pairs], dtype=torch.int32)
            if self._stream is not None:
                rows = rows.pin_memory()
            copy.pairs += [rows, rows.to(self._device, non_blocking=True)]
            copy_blocks(*((device, slots) if transfer.to_host else (slots, device)), copy.pairs[-1])
