"""No file is left that was given up before, during or after its write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from disk_tiers import BLOCK_BYTES, Tiers, page, state, stored
from mambacache.runner.directory import HEADER
from test_runner_disk import Held
from test_runner_disk import start as start


def test_the_bound_holds_for_a_transfer_that_is_larger(start: Callable[..., Tiers], tmp_path: Path) -> None:
    """The last files of a transfer stay. The others do not count as failures of the disk."""
    one = HEADER.size + BLOCK_BYTES["state"]
    tiers = start(limit=3 * one + 100)
    assert not tiers.run(False, state(0)) and not tiers.run(False, *map(state, range(1, 9)))
    assert not tiers.run(True, *map(state, range(6, 9)))
    assert stored(tmp_path / "cache") == {f"{state(n).block_hash.hex()}.state" for n in range(6, 9)}
    assert tiers.disk.num_bytes == 3 * one


@pytest.mark.parametrize("moment", ["not asked", "in line", "written"])
def test_a_file_given_up_at_any_moment_is_not_left(
    start: Callable[..., Tiers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its deletion may come first or last. `drop` forgets it for good."""
    tiers, held = start(), Held(monkeypatch)
    filings = [tiers.disk.filing(tiers.transfer(False, each), tiers.host._slots) for each in (page(2), state(1))]
    for filing in filings[: 1 if moment == "not asked" else 2]:
        tiers.disk.ask(filing)
    if moment == "written":
        held.go_on.set()
        filings[1].synchronize()
    tiers.disk.drop([state(1).block_hash])
    held.go_on.set()
    for filing in filings:
        tiers.disk.ask(filing)
        filing.synchronize()
        tiers.disk.note(filing)
    assert not any(filing.failed for filing in filings)
    assert not tiers.run(False, page(3))  # runs after the deletions
    assert stored(tmp_path / "cache") == {f"{page(n).block_hash.hex()}.kv" for n in (2, 3)}
    assert tiers.disk.num_bytes == 2 * (HEADER.size + BLOCK_BYTES["kv"])


def test_a_file_given_up_before_the_end_is_not_left(
    start: Callable[..., Tiers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process does not find a dropped file, though the thread had other things to do."""
    tiers = start()
    assert not tiers.run(False, state(1), page(2))
    held = Held(monkeypatch)
    tiers.host.launch([tiers.transfer(False, state(3))])
    assert held.began.wait(10)
    tiers.disk.drop([state(1).block_hash])
    end = Thread(target=tiers.disk.close)
    end.start()
    held.go_on.set()
    end.join(10)
    assert not end.is_alive()
    assert f"{state(1).block_hash.hex()}.state" not in stored(tmp_path / "cache")
