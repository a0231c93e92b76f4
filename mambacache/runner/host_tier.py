"""The tier in host memory: its slots, and the copies between them and the device's pools."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from mambacache.kernels import StatePool, copy_blocks
from mambacache.plan import Transfer
from mambacache.runner.host_memory import HostMemory

logger = logging.getLogger(__name__)


@dataclass
class Copy:
    """A transfer that was begun. `done` is recorded behind it on a GPU; None where it is over when it was launched."""

    transfer: Transfer
    pairs: list[torch.Tensor] = field(default_factory=list)  # kept until they were read
    done: torch.cuda.Event | None = None
    failed: bool = False


class HostTier:
    """Runs transfers beside the steps: on a GPU on a stream of their own, which waits for what the device was told
    before each of them, and which nothing waits for.

    What fails is told as the failure of its transfer, which costs a miss and nothing else.

    Args:
        pools: the device's, of states and, for a model with attention, of KV pages.
        slots: how many slots there are for each of them.

    Raises:
        ValueError: the memory cannot be had, or not pinned.
    """

    def __init__(self, pools: Sequence[StatePool], slots: Sequence[int]) -> None:
        self._device = pools[0].buffer.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._memory = HostMemory(self._device)
        self._pools = [  # slot 0 is no slot
            (pool.slabs, self._memory.slots(count + 1, pool.block_bytes))
            for pool, count in zip(pools, slots, strict=True)
        ]
        self._copies: dict[int, Copy] = {}
        self._told = False  # of a failure

    @property
    def under_way(self) -> bool:
        """Whether transfers were launched that nobody has forgotten."""
        return bool(self._copies)

    def launch(self, transfers: Sequence[Transfer]) -> None:
        """Begins those of the transfers that were not begun before."""
        for transfer in transfers:
            if transfer.number not in self._copies:
                self._copies[transfer.number] = copy = Copy(transfer)
                self._launch(copy)

    def ended(self) -> dict[Transfer, bool]:
        """The transfers that are over, until they are forgotten; and whether they failed."""
        return {copy.transfer: copy.failed for copy in self._copies.values() if self._over(copy)}

    def forget(self, transfers: Mapping[Transfer, bool]) -> None:
        """Whoever had to know of these ended transfers does."""
        for transfer in transfers:
            self._copies.pop(transfer.number, None)

    def wait(self) -> None:
        """Returns when the transfer that was begun first is over."""
        copy = next(iter(self._copies.values()), None)
        if copy is not None and copy.done is not None:
            copy.done.synchronize()

    def close(self) -> None:
        """Gives the memory back, once all copies are over."""
        self._memory.close()
        self._pools, self._copies = [], {}

    # --- inside ---

    def _launch(self, copy: Copy) -> None:
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

    def _over(self, copy: Copy) -> bool:
        return copy.done is None or copy.done.query()
