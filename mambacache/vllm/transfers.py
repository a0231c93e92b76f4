"""Follow copies between device and host memory on all ranks: vLLM returns the output of one rank alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.plan import Transfer
from mambacache.vllm.files import StateFiles
from mambacache.vllm.private_files import folder_of, made_folder_of

MOST = 1 << 12
"""Most transfers under way."""


class Ends:
    """Maps a rank's file of ended transfers, int64 [MOST]: twice the number, plus 1 for a failure; may raise OSError.

    Args:
        new: make the file, as the rank does.
    """

    def __init__(self, vllm_config: Any, rank: int, *, new: bool) -> None:
        folder = (made_folder_of if new else folder_of)(vllm_config.instance_id)
        name = f"{vllm_config.parallel_config.data_parallel_index}.{rank}.ends"
        self._ends = np.frombuffer(folder.map(name, MOST * np.int64().nbytes, new=new), np.int64)

    def note(self, number: int, failed: bool) -> None:
        self._ends[number % MOST] = 2 * number + failed

    def failed(self, number: int) -> bool | None:
        """Tell whether a transfer failed; None while it is under way."""
        noted, failed = divmod(int(self._ends[number % MOST]), 2)
        return bool(failed) if noted == number else None


class Copies:
    """Hands transfers to all ranks, and ends those that are over on all ranks."""

    def __init__(self, prefix_cache: PrefixCache, ranks: Sequence[Ends], files: StateFiles | None = None) -> None:
        self._prefix_cache, self._ranks, self._files = prefix_cache, ranks, files
        self.flushing = False
        self._under_way: dict[int, Transfer] = {}

    @classmethod
    def of(cls, vllm_config: Any, prefix_cache: PrefixCache, files: StateFiles | None) -> Copies:
        """Join all ranks, or raise ValueError."""
        try:
            ranks = [Ends(vllm_config, rank, new=False) for rank in range(vllm_config.parallel_config.world_size)]
        except (OSError, ValueError) as error:
            raise ValueError(
                f"mambacache: the scheduler cannot follow the copies of its workers ({error}), which may run on "
                "another machine: leave state_host_bytes out of --additional-config"
            ) from error
        return cls(prefix_cache, ranks, files)

    def begin(self, idle: bool) -> tuple[Transfer, ...]:
        """Return transfers to launch before this step; idle steps bring states to files."""
        flush = idle and self._files is not None
        found = self._prefix_cache.transfers(flush=flush)
        self.flushing = flush and bool(found)
        new = [each for each in found if each.number not in self._under_way and each.number < found[0].number + MOST]
        self._under_way.update((each.number, each) for each in new)
        return tuple(new) if self._files is None else tuple(map(self._files.choose, new))

    def end(self) -> None:
        for number, transfer in [*self._under_way.items()]:
            ends = [rank.failed(number) for rank in self._ranks]
            if None not in ends:
                del self._under_way[number]
                failed = any(ends) if self._files is None else self._files.over(number, any(ends))
                self._prefix_cache.transferred(transfer, failed=failed)

    def close(self) -> None:
        """Let another process have the files."""
        if self._files is not None:
            self._files.close()
