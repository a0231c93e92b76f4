"""Keep states in files, which the scheduler chooses, in a folder for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import chain, repeat
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
import vllm

from mambacache.plan import Transfer
from mambacache.runner.directory import HEADER, Directory, Folder, StoredFile
from mambacache.runner.disk_tier import FileIndex, Filing, Worker
from mambacache.runner.identity import identity
from mambacache.vllm.private_files import folder_of, made_folder_of
from mambacache.vllm.settings import Settings


def folders(vllm_config: Any) -> list[Path]:
    """Return the folder of each rank."""
    parallel, path = vllm_config.parallel_config, Settings.of(vllm_config).state_disk_dir
    if path is None:
        return []
    return [Path(path, f"{parallel.data_parallel_index}.{rank}") for rank in range(parallel.world_size)]


def rank_identity(vllm_config: Any, rank: int, model: Any, layout: Sequence[Any], device: torch.device) -> str:
    """Return a digest of all that a rank's states depend on, or raise ValueError."""
    if model.mambacache_weights is None:
        raise ValueError(
            "mambacache: state_disk_dir in --additional-config needs weights of a checkpoint, by which files of other "
            "models are told apart: give another --load-format, or leave state_disk_dir out"
        )
    config, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    settings = {name: value for name, value in config.hf_config.to_dict().items() if name != "_name_or_path"}
    numbers = config.dtype, config.quantization, cache.cache_dtype
    sizes = rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size, cache.block_size
    found = identity(model.mambacache_weights, (settings, numbers), (sizes, layout), ("transformers",), device)
    return blake2b(repr((found, vllm.__version__)).encode(), digest_size=16).hexdigest()


def tell_identity(vllm_config: Any, rank: int, found: str) -> None:
    """Tell the scheduler a rank's identity; may raise OSError."""
    made_folder_of(vllm_config.instance_id).write(_name(vllm_config, rank), found.encode())


def _name(vllm_config: Any, rank: int) -> str:
    return f"{vllm_config.parallel_config.data_parallel_index}.{rank}.identity"


class Directories:
    """Joins the directories of all ranks, each with a file of every block."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.path = paths[0].parent
        self._ranks = [Directory(path, "state_disk_dir") for path in paths]

    @property
    def epoch(self) -> str:
        return " ".join(rank.epoch for rank in self._ranks)

    def renew(self) -> str:
        return " ".join([rank.renew() for rank in self._ranks])

    def files(self) -> list[StoredFile]:
        """Return files, least recently used first, and delete those that a rank lacks."""
        first, *others = ({file.name: file for file in rank.files()} for rank in self._ranks)
        found = []
        for name, file in chain(first.items(), *(each.items() for each in others)):
            parts = [each[name] for each in (first, *others) if name in each]
            if len(parts) < len(self._ranks):
                self.remove(file)
            elif file is first[name]:
                size = sum(part.num_bytes for part in parts) - HEADER.size
                found.append(StoredFile(file.kind, file.block_hash, file.exact, size))
        return found

    def room(self) -> int:
        return min(rank.room() for rank in self._ranks)

    def remove(self, file: StoredFile) -> None:
        for rank in self._ranks:
            rank.remove(file)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class StateFiles(FileIndex):
    """Chooses the files of all ranks.

    After a reset, weights may be others: no later process finds files that are written then.

    Args:
        identities: `rank_identity` of each rank.
        state_bytes: bytes of a state on all ranks.
    """

    def __init__(self, directories: Directories, identities: Sequence[str], state_bytes: int) -> None:
        known = chain([repr(identities)], (token_hex() for _ in repeat(None)))
        super().__init__(directories, None, partial(next, known))
        self._state_bytes = state_bytes
        self._sent: dict[int, tuple[Transfer, list[StoredFile | None]]] = {}

    @classmethod
    def of(cls, vllm_config: Any, state_bytes: int) -> StateFiles | None:
        """Open the folders, if `state_disk_dir` is given, or raise ValueError."""
        paths = folders(vllm_config)
        if not paths:
            return None
        try:
            folder = folder_of(vllm_config.instance_id)
            identities = [folder.read(_name(vllm_config, rank)).decode() for rank in range(len(paths))]
            return cls(Directories(paths), identities, state_bytes * len(paths))
        except OSError as error:
            raise ValueError(
                f"mambacache: state_disk_dir in --additional-config is not usable ({error}): set it to a folder on the "
                "machine of all ranks, or leave it out"
            ) from error

    def choose(self, transfer: Transfer) -> Transfer:
        """Return the part of a transfer that ranks shall run."""
        if not transfer.files:
            return transfer
        files = [
            self._to_read(asked) if transfer.to_host else self._to_write(asked, self._state_bytes)
            for asked in transfer.files
        ]
        self._sent[transfer.number] = transfer, files
        return transfer._replace(
            files=tuple([asked for asked, file in zip(transfer.files, files, strict=True) if file is not None])
        )

    def over(self, number: int, failed: bool) -> bool:
        """End a transfer, and return whether it failed."""
        if number not in self._sent:
            return failed
        transfer, sent = self._sent.pop(number)
        files = [file for file in sent if file is not None]
        for file in files:
            if not transfer.to_host and self._index.get((file.kind, file.block_hash)) is not file:
                self._delete(file)  # a rank may have written it later
        self.ended(files, () if failed else files)
        return failed or len(files) < len(sent)


class RankFiles:
    """Moves a rank's blocks between files and host slots."""

    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)
        self._worker = Worker(self._folder)

    def filing(self, transfer: Transfer, slots: Mapping[str, torch.Tensor]) -> Filing:
        filing = Filing("read" if transfer.to_host else "written", self._worker.era, len(transfer.files))
        act = self._folder.read if transfer.to_host else self._folder.write
        for asked in transfer.files:
            block = slots[asked.kind][asked.slot].numpy().data
            file = StoredFile(asked.kind, asked.block_hash, asked.exact, len(block))
            filing.add(file, partial(act, file, block))
        return filing

    def ask(self, filing: Filing) -> None:
        self._worker.ask(filing)

    def note(self, filing: Filing) -> None:
        """Do nothing: the scheduler has the index."""

    def close(self) -> None:
        self._worker.stop()
        self._worker.join()
