"""Run random mixes with files behind a host tier, and restarts: no wrong state or KV, no leak, no stall.

Transfers to and from files end late and in any order, fail, and are overtaken by resets.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mambacache
from mambacache.plan import Transfer
from mixes import mixes
from symbolic import text
from symbolic_files import FiledDriver, FiledMemory, SymbolicFiles
from symbolic_jobs import Job, Mix
from test_properties_faults import Faults, faulty_mixes
from test_properties_tier import FaultyTieredDriver, tiered_mixes

CACHE = Path(mambacache.__file__).parent / "cache"
FILES = (str(CACHE / "host_tier.py"),)


@st.composite
def filed_mixes(draw: st.DrawFn, faults: bool = False) -> tuple[Mix, int, dict[str, Any]]:
    """Draw a mix with a tier, and a limit of files; some reads are not worth their bytes."""
    mix, chance = draw(tiered_mixes(faults=faults))
    if mix.cache.get("state_bytes"):
        mix.cache["disk_bytes_per_token"] = draw(st.sampled_from([30, 1 << 16]))
    return mix, draw(st.sampled_from([4, 30, 1000, 1000])), chance


def run_twice(mix: Mix, limit: int, chance: dict[str, Any]) -> list[FiledDriver]:
    """Run two processes, one after the other; each flushes its blocks before it ends, or not."""
    files = SymbolicFiles(limit)
    drivers = [FiledDriver(mix, files, **chance) for _ in range(2)]
    for driver in drivers:
        driver.run()
        if chance["seed"] % 3:
            driver.cache.flush()
        driver.cache.check_contents()
        files.restarted()
    return drivers


@mixes(100)
@given(filed_mixes())
def test_any_mix_with_files(filed: tuple[Mix, int, dict[str, Any]]) -> None:
    run_twice(*filed)


@mixes(100)
@given(filed_mixes(faults=True))
def test_any_mix_with_files_failing_steps_and_resets(filed: tuple[Mix, int, dict[str, Any]]) -> None:
    run_twice(*filed)


class FaultyFiledDriver(FaultyTieredDriver, FiledDriver):
    """Plant faults in a driver with files."""

    def __init__(self, mix: Mix, limit: int, faults: Faults, **chance: Any) -> None:
        FiledDriver.__init__(self, mix, SymbolicFiles(limit), **chance)
        self.faults = faults
        self.under_way = []
        self.ended: dict[Transfer, bool] = {}


@st.composite
def faulty(draw: st.DrawFn) -> tuple[Mix, int, Faults, dict[str, Any]]:
    mix, limit, chance = draw(filed_mixes())
    _, faults = draw(faulty_mixes())
    if draw(st.booleans()):
        faults = Faults(draw(st.integers(0, 1 << 30)), draw(st.sampled_from([50, 150])), faults.kinds, FILES)
    return mix, limit, faults, {**chance, "failing": 0.0}


@mixes(60)
@given(faulty())
def test_a_fault_on_any_line_costs_no_answer_and_no_block(faulty: tuple[Mix, int, Faults, dict[str, Any]]) -> None:
    mix, limit, faults, chance = faulty
    FaultyFiledDriver(mix, limit, faults, **chance).run()


def a_mix(**cache: int) -> Mix:
    stems = [text(300, i) for i in range(8)]
    rng = random.Random(0)
    jobs = [Job(stems[rng.randrange(8)] + text(20, 9 + i), 8, arrives=4 * i) for i in range(60)]
    pools = {"num_state_blocks": 6, "num_kv_blocks": 20, "num_host_states": 6, "num_host_pages": 12}
    return Mix(jobs, max_num_seqs=3, cache=pools | cache)


def test_mixes_read_files() -> None:
    """Check that files are read, within a process and after a restart."""
    calm, failing = (run_twice(a_mix(), 1000, {"seed": 1, "failing": failing, "slow": 0.5}) for failing in (0.0, 0.4))
    stats = [driver.cache.stats for driver in calm]
    assert all(each.disk_hit_tokens > 1000 and each.bytes_to_disk == 0 for each in stats)  # no sizes are given
    assert stats[1].hit_tokens > stats[0].hit_tokens
    stats = [driver.cache.stats for driver in failing]
    assert all(each.disk_hit_tokens > 100 and each.failed_transfers > 20 for each in stats)


def another_slot(transfer: Transfer) -> Transfer:
    return transfer._replace(files=tuple(file._replace(slot=file.slot % 5 + 1) for file in transfer.files))


def another_hash(transfer: Transfer) -> Transfer:
    hashes = [file.block_hash for file in transfer.files]
    turned = zip(transfer.files, [*hashes[1:], hashes[0]], strict=True)
    return transfer._replace(files=tuple(file._replace(block_hash=block_hash) for file, block_hash in turned))


@pytest.mark.parametrize("planted", [None, another_slot, another_hash])
@pytest.mark.parametrize("to_host", [True, False])
def test_a_planted_mistake_is_seen(
    planted: Callable[[Transfer], Transfer] | None, to_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of other blocks or slots give wrong contents, and these raise or change tokens."""
    launch, end = FiledMemory.launch, FiledMemory.end

    def planted_in(transfer: Transfer) -> Transfer:
        wrong = planted is not None and transfer.files and transfer.to_host == to_host
        return planted(transfer) if wrong and planted is not None else transfer

    def launched(memory: FiledMemory, transfer: Transfer) -> None:
        launch(memory, planted_in(transfer))
        memory.launched[transfer.number] = transfer

    def ended(memory: FiledMemory, number: int, failed: bool) -> bool:
        memory.launched[number] = planted_in(memory.launched[number])
        return end(memory, number, failed)

    monkeypatch.setattr(FiledMemory, "launch", launched)
    monkeypatch.setattr(FiledMemory, "end", ended)
    with pytest.raises((AssertionError, IndexError, KeyError)) if planted is not None else nullcontext():
        run_twice(a_mix(), 1000, {"seed": 1, "failing": 0.0, "slow": 0.5})
