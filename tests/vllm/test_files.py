"""Files of states: what they depend on, and files that some rank lacks, has badly, or writes too late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from scheduler_mixes import random_tokens
from simulation import Simulation, make_scheduler

from mambacache.kernels.state_pool import StateTensor
from mambacache.plan import BlockFile, Transfer
from mambacache.runner import identity
from mambacache.runner.directory import Folder, StoredFile
from mambacache.runner.disk_tier import Filing
from mambacache.vllm import files
from mambacache.vllm.files import Directories, StateFiles

CPU = torch.device("cpu")
LAYOUT = [[StateTensor((4, 8), torch.float32)]]
Start = Callable[..., StateFiles]


def configured(disk: object = "states", **changes: Any) -> SimpleNamespace:
    """Return the part of a vLLM configuration that files depend on; changes have names as `cache__block_size`."""
    parts = {
        "model": SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: changes.get("hf", {"eps": 1, "_name_or_path": disk})),
            dtype=torch.bfloat16, quantization=None,
        ),
        "cache": SimpleNamespace(block_size=64, cache_dtype="auto"),
        "parallel": SimpleNamespace(
            data_parallel_index=0, world_size=2, tensor_parallel_size=2, pipeline_parallel_size=1
        ),
    }  # fmt: skip
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            setattr(parts[part], field, value)
    return SimpleNamespace(
        instance_id="files",
        additional_config={"mambacache": {"state_host_bytes": 1, "state_disk_dir": str(disk)}},
        **{f"{name}_config": part for name, part in parts.items()},
    )


def of(weights: str | None = "digest", rank: int = 0, layout: Any = LAYOUT, **changes: Any) -> str:
    model = SimpleNamespace(mambacache_weights=weights)
    return files.rank_identity(configured(**changes), rank, model, layout, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "other"},
        {"rank": 1},
        {"layout": [[StateTensor((4, 8), torch.bfloat16)]]},
        {"layout": [[StateTensor((8, 8), torch.float32)]]},
        {"hf": {"eps": 2}},
        {"model__dtype": torch.float32},
        {"model__quantization": "fp8"},
        {"cache__cache_dtype": "fp8"},
        {"cache__block_size": 128},
        {"parallel__tensor_parallel_size": 4},
        {"parallel__pipeline_parallel_size": 2},
    ],
)
def test_another_model_or_layout_changes_the_identity(changes: dict[str, Any]) -> None:
    assert of(**changes) != of() == of(disk="moved")


def test_another_release_changes_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of()
    monkeypatch.setattr(vllm, "__version__", "7")
    assert of() != before
    monkeypatch.undo()
    monkeypatch.setattr(identity, "source_digest", lambda: "another")
    assert of() != before


def test_weights_without_a_digest_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs weights of a checkpoint, .*give another --load-format, or leave"):
        of(weights=None)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as processes:

        def begin(identities: tuple[str, ...] = ("a", "b")) -> StateFiles:
            processes.close()
            found = StateFiles(Directories([tmp_path / "0.0", tmp_path / "0.1"]), identities, 16)
            processes.callback(found.close)
            return found

        yield begin


def state(number: int) -> BlockFile:
    return BlockFile("state", 1, bytes([number]) * 16, True, 0)


def transfer(number: int, to_host: bool, *states: BlockFile) -> Transfer:
    return Transfer(number, to_host, (), (), states)


def write(tmp_path: Path, *states: BlockFile, ranks: tuple[int, ...] = (0, 1)) -> None:
    for each in states:
        file = StoredFile("state", each.block_hash, each.exact, 8)
        for rank in ranks:
            Folder(tmp_path / f"0.{rank}").write(file, memoryview(bytearray(8)))


def stored(tmp_path: Path) -> list[list[int]]:
    """Return the states in the files of each rank."""
    return [sorted(path.read_bytes() and int(path.name[:2], 16) for path in tmp_path.glob(f"0.{rank}/*.state*"))
            for rank in (0, 1)]  # fmt: skip


def known(tier: StateFiles, *numbers: int) -> list[bool]:
    return [tier.exact("state", state(number).block_hash) is not None for number in numbers]


def test_a_file_counts_once_all_ranks_wrote_it(start: Start, tmp_path: Path) -> None:
    tier = start()
    sent = tier.choose(transfer(1, False, state(1), state(2)))
    assert sent.files == (state(1), state(2)) and known(tier, 1, 2) == [False, False]
    write(tmp_path, *sent.files)
    assert not tier.over(1, failed=False) and known(tier, 1, 2) == [True, True]
    assert tier.num_bytes == 2 * (StoredFile("state", b"", True, 16).num_bytes)
    again = start()
    assert known(again, 1, 2) == [True, True] and again.key == tier.key
    assert start(("a", "c")).key != tier.key != start(("b", "a")).key


def test_a_file_that_a_rank_lacks_is_deleted(start: Start, tmp_path: Path) -> None:
    start()
    write(tmp_path, state(1))
    write(tmp_path, state(2), ranks=(0,))
    write(tmp_path, state(3), ranks=(1,))
    assert known(start(), 1, 2, 3) == [True, False, False] and stored(tmp_path) == [[1], [1]]


@pytest.mark.parametrize("to_host", [False, True])
def test_a_transfer_that_fails_on_a_rank_leaves_no_file(start: Start, tmp_path: Path, to_host: bool) -> None:
    tier = start()
    sent = tier.choose(transfer(1, False, state(1), state(2)))
    write(tmp_path, *sent.files)
    if to_host:
        tier.over(1, failed=False)
        assert tier.choose(transfer(2, True, state(1))).files == (state(1),)
    assert tier.over(2 if to_host else 1, failed=True)
    tier.close()
    assert known(tier, 1, 2) == [False, to_host] and stored(tmp_path) == [[2] * to_host] * 2


def test_a_file_that_is_gone_is_not_asked_for(start: Start) -> None:
    tier = start()
    assert tier.choose(transfer(1, True, state(1))).files == () and tier.over(1, failed=False)


def test_a_file_given_up_while_ranks_write_it_is_not_left(start: Start, tmp_path: Path) -> None:
    tier = start()
    sent = tier.choose(transfer(1, False, state(1)))
    tier.drop([state(1).block_hash])
    last = Filing("deleted", 0, 0)
    last.add(StoredFile("state", b"", True, 0), lambda: None)
    tier._worker.ask(last)
    last.synchronize()  # the deletion is over
    write(tmp_path, *sent.files)
    tier.over(1, failed=False)
    tier.close()
    assert stored(tmp_path) == [[], []]


def test_after_a_reset_no_later_process_finds_files(start: Start, tmp_path: Path) -> None:
    """Nobody knows the weights after a reset. Files that were being written are deleted too."""
    tier = start()
    before = tier.key
    tier.choose(transfer(1, False, state(1)))
    tier.clear()
    write(tmp_path, state(1))
    tier.over(1, failed=False)
    tier.close()
    assert stored(tmp_path) == [[], []]
    assert len({before, tier.key, start().key}) == 3


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path / "states")
    for rank in (0, 1):
        files.tell_identity(config, rank, "model")
    tier = StateFiles.of(config, 8)
    assert tier is not None
    with pytest.raises(ValueError, match=r"state_disk_dir '.*0\.0' is in use by another engine"):
        StateFiles.of(config, 8)
    tier.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = configured(tmp_path / "file")
    for rank in (0, 1):
        files.tell_identity(config, rank, "model")
    with pytest.raises(ValueError, match=r"state_disk_dir in --additional-config is not usable .*: set it to a folder"):
        StateFiles.of(config, 8)


def test_a_rank_without_an_identity_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path / "states")
    files.tell_identity(config, 0, "model")
    with pytest.raises(ValueError, match=r"is not usable .*: set it to a folder on the machine of all ranks"):
        StateFiles.of(config, 8)


def restarted(disk: Path, lora: str = "") -> list[int]:
    """Return the hits of six prompts in two processes."""
    found: list[int] = []
    kept: dict[bytes, list[int]] = {}
    for _ in range(2):
        scheduler = make_scheduler(8, host_states=3, ranks=2, disk=disk, connector={"seed": 0})
        scheduler.connector.kept = kept
        simulation = Simulation(scheduler)
        for number in range(6):
            simulation.add(str(number), random_tokens(200, number), 2, lora=lora)
            simulation.drain()
            found.append(simulation.cached[str(number)])
        simulation.check_end()
        scheduler.shutdown()
    return found


def test_idle_steps_bring_all_states_to_files(tmp_path: Path) -> None:
    """The connector of the second process has the KV of the first's."""
    assert restarted(tmp_path / "disk") == [0] * 6 + [192] * 6


def test_an_adapter_of_another_process_may_have_other_weights(tmp_path: Path) -> None:
    assert restarted(tmp_path / "disk", lora="adapter") == [0] * 12
