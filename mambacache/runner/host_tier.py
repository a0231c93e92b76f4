"""The tier in host memory: its slots, and the copies between them, the device's pools and files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from mambacache.kernels import StatePool, copy_blocks
from mambacache.plan import Transfer
from mambacache.runner.disk_tier import DiskTier, Filing
from mambacache.runner.host_memory import HostMemory

logger = logging.getLogger(__name__)


@dataclass
class Copy:
    """A transfer that was begun. `done` tells whether it is over, an event on a GPU; None where it was when it was
    launched."""

    transfer: Transfer
    pairs: list[torch.Tensor] = field(default_factory=list)  # kept until they were read
    done: torch.cuda.Event | Filing | None = None
    failed: bool = False


class HostTier:
    """Runs transfers beside the steps: on a GPU on a stream of their own, which waits for what the device was told
    before each of them, and which nothing waits for. Those with files are the thread's of `DiskTier`.

    What fails is told as the failure of its transfer, which costs a miss and nothing else.

    Args:
        pools: the device's, of states and, for a model with attention, of KV pages.
        slots: how many slots there are for each of them.
        disk: the files, which this closes; None for none.

    Raises:
        ValueError: the memory cannot be had, or not pinned.
    """

    def __init__(self, pools: Sequence[StatePool], slots: Sequence[int], disk: DiskTier | None = None) -> None:
        self._device = pools[0].buffer.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._memory = HostMemory(self._device)
        self._pools = [  # slot 0 is no slot
            (pool.slabs, self._memory.slots(count + 1, pool.block_bytes))
            for pool, count in zip(pools, slots, strict=True)
        ]
        self._disk = disk
        self._slots = {kind: slots for kind, (_, slots) in zip(("state", "kv"), self._pools, strict=False)}
        self._copies: dict[int, Copy] = {}
        self._told = False  # of a failure
        if self._stream is not None:
            with torch.cuda.device(self._device):  # from null to no slot, so that no transfer waits for the compiler
                self._copy(Copy(Transfer(0, True, ((0, 0),), ((0, 0),))))

    @property
    def has_files(self) -> bool:
        """Whether there is a tier behind this one."""
        return self._disk is not None

    @property
    def under_way(self) -> bool:
        """Whether transfers were launched that nobody has forgotten."""
        return bool(self._copies)

    def launch(self, transfers: Sequence[Transfer]) -> None:
        """Begins those of the transfers that were not begun before."""
        for transfer in transfers:
            copy = self._copies.get(transfer.number)
            if copy is None:
                self._copies[transfer.number] = copy = Copy(transfer)
                self._launch(copy)
            elif self._disk is not None and isinstance(copy.done, Filing):
                self._disk.ask(copy.done)  # it may have been cut short before

    def ended(self) -> dict[Transfer, bool]:
        """The transfers that are over, until they are forgotten; and whether they failed."""
        over = [copy for copy in self._copies.values() if copy.done is None or copy.done.query()]
        for copy in over:
            if self._disk is not None and isinstance(copy.done, Filing):
                self._disk.note(copy.done)
                copy.failed = copy.done.failed
        return {copy.transfer: copy.failed for copy in over}

    def forget(self, transfers: Mapping[Transfer, bool]) -> None:
        """Whoever had to know of these ended transfers does."""
        for transfer in transfers:
            self._copies.pop(transfer.number, None)

    def wait(self) -> None:
        """Returns when the transfer that was begun first is over; files that are written wait for all others."""
        copies = sorted(self._copies.values(), key=lambda copy: bool(copy.transfer.files) and not copy.transfer.to_host)
        copy = next(iter(copies), None)
        if copy is not None and copy.done is not None:
            self.launch([copy.transfer])
            copy.done.synchronize()

    def close(self) -> None:
        """Gives the memory back, once all copies are over; what is not written by then never will be."""
        if self._disk is not None:
            self._disk.close()
        self._memory.close()
        self._pools, self._copies, self._slots = [], {}, {}

    # --- inside ---

    def _launch(self, copy: Copy) -> None:
        if self._disk is not None and copy.transfer.files:
            copy.failed = True  # unless it is known to be otherwise: this may be cut short anywhere
            copy.done = self._disk.filing(copy.transfer, self._slots)
            self._disk.ask(copy.done)
            return
        with ExitStack() as stack:
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
                stack.enter_context(torch.cuda.stream(self._stream))
            try:
                self._copy(copy)
            except Exception:
                copy.failed = True
                if not self._told:
                    logger.exception("a transfer between device and host failed, which is said once: it costs a miss")
                self._told = True
            if self._stream is not None:  # whatever failed: part of it may be under way
                copy.done = torch.cuda.Event()
                copy.done.record()

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
