"""Files of states and pages come back bitwise the same, and any fault in them costs a miss."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from disk_tiers import BLOCK_BYTES, Tiers, page, state, stored, wait_until
from mambacache.plan import Transfer
from mambacache.runner import disk_tier
from mambacache.runner.directory import HEADER, Directory
from mambacache.runner.disk_tier import DiskTier
from test_runner_host_tier import DEVICES, run

Start = Callable[..., Tiers]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start tiers on the test's directory as a new process would, and end the tiers before them."""
    running: list[Tiers] = []

    def begin(**options: Any) -> Tiers:
        while running:
            running.pop().host.close()
        running.append(Tiers(tmp_path / "cache", **options))
        return running[0]

    yield begin
    while running:
        running.pop().host.close()
    assert not any(thread.name == "mambacache files" for thread in threading.enumerate())


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_survive_a_restart(start: Start, device: str) -> None:
    first = start(device=device)
    before = [pool.slabs.clone() for pool in first.pools]
    first.copy(True, ((2, 3), (4, 1)), ((9, 6), (1, 1)))
    assert not first.run(False, state(1, 3), state(2, 1, exact=False), page(1, 6), page(2, 1))
    second = start(device=device)
    assert second.disk.key == first.disk.key
    held = [second.disk.exact(kind, bytes([n]) * 16) for kind in ("state", "kv") for n in (1, 2, 3)]
    assert held == [True, False, None, True, True, None]
    assert not second.run(True, state(2, 2, exact=False), page(2, 3), page(1, 4), state(1, 1))
    second.copy(False, ((1, 1), (3, 2)), ((5, 3), (6, 4)))
    states, pages = [pool.slabs for pool in second.pools]
    assert torch.equal(states[[1, 3]], before[0][[2, 4]]) and torch.equal(pages[[5, 6]], before[1][[1, 9]])


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flipped(place: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return flip


def foreign(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def of_another_name(path: Path) -> None:
    path.write_bytes((path.parent / state(2).block_hash.hex()).with_suffix(".state").read_bytes())


def of_another_kind(path: Path) -> None:
    path.write_bytes((path.parent / page(1).block_hash.hex()).with_suffix(".kv").read_bytes())


@pytest.mark.parametrize(
    "damage",
    [cut_short, longer, empty, flipped(0), flipped(20), flipped(HEADER.size + 100), flipped(-1), foreign,
     of_another_name, of_another_kind],
)  # fmt: skip
def test_a_damaged_file_is_a_miss(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    """The file is deleted, and good files beside it stay."""
    assert not start().run(False, state(1), state(2, 2), page(1))
    name = f"{state(1).block_hash.hex()}.state"
    damage(tmp_path / "cache" / name)
    tiers = start()
    assert tiers.run(True, state(2, 2), state(1))
    assert caplog.text.count("is not what was written there, and is deleted") == 1 and name in caplog.text
    assert tiers.disk.exact("state", state(1).block_hash) is None and not tiers.run(True, state(2), page(1))
    wait_until(lambda: name not in stored(tmp_path / "cache"))


def test_foreign_files_are_left_alone(start: Start, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    names = ["notes.txt", "0" * 32, f"{'0' * 31}.state", f"{'g' * 32}.kv", f"{'0' * 32}.kv.far", "x.new"]
    for name in names:
        (tmp_path / "cache" / name).write_text("mine")
    unfinished = tmp_path / "cache" / f"{'0' * 32}.state.new"
    unfinished.write_text("of one that was killed")
    tiers = start(limit=10_000)
    assert tiers.disk.num_bytes == 0 and not unfinished.exists()
    tiers.disk.clear()
    assert stored(tmp_path / "cache") == set(names)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "no space left"), ValueError("planted"), SystemExit()])
def test_a_failure_in_the_thread_costs_hits_only(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    """Any error, such as a full disk, is logged once. No half file is left, and later files are written."""
    tiers = start()
    writes: list[str] = []

    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def write(self, data: Any) -> None:
            self.stream.write(data[:10])
            writes.append(self.stream.name)
            raise error

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, mode: Full(opened(path, mode)))
    assert tiers.run(False, state(1), page(1)) and tiers.run(False, state(3))
    assert len(writes) == 3 and stored(tmp_path / "cache") == set()
    assert tiers.disk.exact("state", state(1).block_hash) is None and tiers.disk.num_bytes == 0
    assert caplog.text.count("cannot be written, which is said once and costs hits") == 1
    monkeypatch.undo()
    assert not tiers.run(False, state(1)) and not tiers.run(True, state(1, 2))
    assert torch.equal(tiers.slot("state", 2), tiers.slot("state", 1))


def test_a_directory_that_vanished(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = start()
    assert not tiers.run(False, state(1))
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    assert tiers.run(True, state(1)) and tiers.run(False, state(2))
    assert tiers.disk.exact("state", state(1).block_hash) is None
    assert "cannot be read" in caplog.text and "cannot be written" in caplog.text


def test_the_bound_holds_and_the_file_used_longest_ago_goes(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = HEADER.size + BLOCK_BYTES["state"]
    limit, most = 3 * one + 100, 0
    write = Directory.write

    def watched(directory: Directory, file: Any, block: memoryview) -> None:
        nonlocal most
        write(directory, file, block)
        most = max(most, sum((directory.path / name).stat().st_size for name in stored(directory.path)))

    monkeypatch.setattr(Directory, "write", watched)
    tiers = start(limit=limit)
    for number in range(3):
        assert not tiers.run(False, state(number))
    assert not tiers.run(True, state(0))  # 1 is now the file used longest ago
    assert not tiers.run(False, state(3))
    held = [tiers.disk.exact("state", state(n).block_hash) for n in range(4)]
    assert held == [True, None, True, True]
    assert tiers.run(False, page(9)), "no room for it however much is deleted"
    for number in range(4, 20):
        assert not tiers.run(False, state(number), state(number + 100))
    assert 3 * one == most == tiers.disk.num_bytes <= limit
    assert not tiers.run(True, state(118))
    tiers = start(limit=limit - one)  # the file used last stays, after a restart too
    assert tiers.disk.exact("state", state(118).block_hash) and tiers.disk.num_bytes == 2 * one
    wait_until(lambda: len(stored(tmp_path / "cache")) == 2)


def test_by_default_half_of_the_disk(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = HEADER.size + BLOCK_BYTES["state"]
    assert not start().run(False, state(1))
    monkeypatch.setattr(Directory, "room", lambda directory: 3 * one)
    tiers = start()
    assert not tiers.run(False, state(2)) and not tiers.run(False, state(3))
    assert [tiers.disk.exact("state", state(n).block_hash) for n in (1, 2, 3)] == [None, True, True]


def test_an_exact_block_replaces_a_near_block(start: Start, tmp_path: Path) -> None:
    tiers = start()
    assert not tiers.run(False, state(1, exact=False))
    assert tiers.disk.exact("state", state(1).block_hash) is False and tiers.run(True, state(1)), "asked for as exact"
    assert not tiers.run(False, state(1, 2)) and tiers.disk.exact("state", state(1).block_hash) is True
    assert start().disk.exact("state", state(1).block_hash) is True
    assert stored(tmp_path / "cache") == {f"{state(1).block_hash.hex()}.state"}


def test_another_model_shares_nothing_but_the_room(start: Start) -> None:
    """A model's key enters every hash, so that another model asks for other names."""
    first = start()
    assert not first.run(False, state(1))
    other = start(model="another")
    assert other.disk.key != first.disk.key and other.disk.num_bytes == first.disk.num_bytes > 0
    assert start().disk.key == first.disk.key


def test_reset_deletes_and_counts_after_a_restart(start: Start, tmp_path: Path) -> None:
    tiers = start()
    assert not tiers.run(False, state(1), page(1))
    before = tiers.disk.key
    tiers.disk.clear()
    assert stored(tmp_path / "cache") == set() and tiers.disk.num_bytes == 0
    assert tiers.disk.key != before and tiers.disk.exact("state", state(1).block_hash) is None
    assert not tiers.run(False, state(1))
    after = start()
    assert after.disk.key == tiers.disk.key and after.disk.exact("state", state(1).block_hash)


def test_reset_looks_at_the_model_again(tmp_path: Path) -> None:
    models = iter(["one", "two", "two"])
    tier = DiskTier(Directory(tmp_path), None, lambda: next(models))
    tier.clear()
    tier.close()
    other = DiskTier(Directory(tmp_path), None, lambda: next(models))
    other.close()
    assert other.key == tier.key


def test_files_that_reset_cannot_delete_count_no_more(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EACCES, "planted")

    tiers = start()
    assert not tiers.run(False, state(1))
    before = tiers.disk.key
    monkeypatch.setattr(Directory, "remove", refuse)
    tiers.disk.clear()
    assert tiers.disk.exact("state", state(1).block_hash) is None
    after = start()
    assert after.disk.key == tiers.disk.key != before


def test_a_reset_that_cannot_be_written_is_logged(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The files are deleted if they can be, and this process uses none of them in any case."""

    def refuse(directory: Directory) -> None:
        raise OSError(errno.EROFS, "planted")

    tiers = start()
    assert not tiers.run(False, state(1))
    before = tiers.disk.key
    monkeypatch.setattr(Directory, "renew", refuse)
    tiers.disk.clear()
    assert "delete it before the next start" in caplog.text and not tiers.disk.present
    assert tiers.disk.key != before and tiers.disk.exact("state", state(1).block_hash) is None


def test_a_reset_is_on_the_disk_when_it_returns(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stops right after a reset starts with the new epoch.

    The file is synced before it takes its name, and the directory after that.
    """
    tiers = start()
    assert not tiers.run(False, state(1))
    folder, done = tmp_path / "cache", []
    fsync, replace = os.fsync, Path.replace

    def syncing(file: int) -> None:
        done.append(("synced", os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_size))
        fsync(file)

    def replacing(path: Path, target: Path) -> Path:
        done.append(("replaced", str(path), str(target)))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(Path, "replace", replacing)
    tiers.disk.clear()
    new = str(folder / "epoch.new")
    assert done[:2] == [("synced", new, 16), ("replaced", new, str(folder / "epoch"))]
    assert [each[:2] for each in done[2:]] == [("synced", str(folder))]


def modes(path: Path) -> set[int]:
    return {each.stat().st_mode & 0o777 for each in path.iterdir()}


@pytest.mark.parametrize("umask", [0, 0o022])
def test_other_users_can_read_nothing(start: Start, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        tiers = start()
        assert not tiers.run(False, state(1), page(1))
        tiers.disk.clear()
        assert not tiers.run(False, state(2), page(2))
    finally:
        os.umask(before)
    folder = tmp_path / "cache"
    assert folder.stat().st_mode & 0o777 == 0o700 and modes(folder) == {0o600} and len(stored(folder)) == 2


def test_an_open_directory_is_warned_of_and_its_files_are_closed(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The directory may hold other things, so that its own permissions stay."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o755)
    (folder / "notes").touch(0o644)
    assert not start().run(False, state(1), page(1))
    assert f"disk_cache_dir {str(folder)!r} is open to other users: run chmod 700 on it" in caplog.text
    for name in stored(folder) - {"notes"}:
        (folder / name).chmod(0o644)
    after = start()
    assert after.disk.exact("state", state(1).block_hash) and folder.stat().st_mode & 0o777 == 0o755
    (folder / "notes").unlink()
    assert modes(folder) == {0o600}


class Held:
    """Hold the thread before it writes, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        write = Directory.write

        def slowly(directory: Directory, file: Any, block: memoryview) -> None:
            self.began.set()
            assert self.go_on.wait(10)
            write(directory, file, block)

        monkeypatch.setattr(Directory, "write", slowly)


@pytest.mark.parametrize("how", ["drop", "drop_born"])
def test_files_dropped_while_they_are_written_are_deleted(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tiers, held = start(), Held(monkeypatch)
    transfer = tiers.transfer(False, state(1, born=7), page(1, born=7), state(2, 2, born=6))
    tiers.host.launch([transfer])
    assert held.began.wait(10) and not tiers.host.ended()
    if how == "drop":
        tiers.disk.drop([state(1).block_hash])
    else:
        tiers.disk.drop_born(7)
    held.go_on.set()
    run(tiers.host, transfer)
    assert [tiers.disk.exact("state", state(n).block_hash) for n in (1, 2)] == [None, True]
    assert tiers.disk.exact("kv", page(1).block_hash) is None
    assert not tiers.run(False, page(3))  # runs after the deletions
    assert stored(tmp_path / "cache") == {f"{state(2).block_hash.hex()}.state", f"{page(3).block_hash.hex()}.kv"}


def test_reset_while_files_are_written_and_read(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing from before a reset comes after it, and waiting work is not done."""
    tiers = start()
    assert not tiers.run(False, state(1))
    held = Held(monkeypatch)
    before = tiers.slot("state", 3).clone()
    moving = [tiers.transfer(False, state(2), page(2)), tiers.transfer(True, state(1, 3))]
    tiers.host.launch(moving[:1])
    assert held.began.wait(10)
    tiers.host.launch(moving[1:])
    threading.Timer(0.1, held.go_on.set).start()
    tiers.disk.clear()
    assert run(tiers.host, *moving) == dict.fromkeys(moving, True)
    assert stored(tmp_path / "cache") == set() and tiers.disk.num_bytes == 0
    assert torch.equal(tiers.slot("state", 3), before)
    assert not tiers.run(False, state(2))


def test_reads_go_before_writes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = start()
    assert not tiers.run(False, state(1))
    held, done = Held(monkeypatch), []
    read = Directory.read
    monkeypatch.setattr(Directory, "read", lambda *given: (read(*given), done.append("read")))
    write = Directory.write
    monkeypatch.setattr(Directory, "write", lambda *given: (write(*given), done.append("written")))
    moving = [tiers.transfer(False, state(2), page(2)), tiers.transfer(True, state(1, 3))]
    tiers.host.launch(moving[:1])
    assert held.began.wait(10)
    tiers.host.launch(moving[1:])
    held.go_on.set()
    assert run(tiers.host, *moving) == dict.fromkeys(moving, False)
    assert done == ["written", "read", "written"]


def test_waiting_does_not_wait_for_written_files(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers = start()
    assert not tiers.run(False, state(1))
    held = Held(monkeypatch)
    write = tiers.transfer(False, state(2))
    tiers.host.launch([write])
    assert held.began.wait(10)
    copy = Transfer(99, True, ((1, 2),), ())
    tiers.host.launch([copy])
    tiers.host.wait()
    assert tiers.host.ended() == {copy: False}
    held.go_on.set()
    run(tiers.host)


@pytest.mark.parametrize("moment", ["before", "asked"])
def test_a_launch_that_is_cut_short(start: Start, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Ctrl-C cuts it short: either nothing of it is done and it has failed, or it is done later."""
    tiers = start()
    assert not tiers.run(False, state(1), page(1))
    tiers.slot("state", 2).zero_()
    transfer = tiers.transfer(True, state(1, 2), page(1, 2))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as planted:
        planted.setattr(disk_tier.DiskTier, "ask" if moment == "asked" else "filing", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiers.host.launch([transfer])
    assert run(tiers.host, transfer) == {transfer: moment == "before"}
    assert bool(tiers.slot("state", 2).any()) == (moment == "asked")


def test_a_second_process_is_refused(start: Start, tmp_path: Path) -> None:
    tiers = start()
    with pytest.raises(ValueError, match="in use by another engine: close that first"):
        Directory(tmp_path / "cache")
    tiers.host.close()
    Directory(tmp_path / "cache").close()


def test_a_forgotten_tier_ends_its_thread_and_gives_the_directory_back(tmp_path: Path) -> None:
    tiers: Tiers | None = Tiers(tmp_path)
    assert tiers is not None and not tiers.run(False, state(1))
    tiers = None
    gc.collect()
    wait_until(lambda: not any(thread.name == "mambacache files" for thread in threading.enumerate()))
    Directory(tmp_path).close()


def test_a_transfer_ends_only_when_its_files_are_written(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    tiers, held = start(), Held(monkeypatch)
    transfer = tiers.transfer(False, state(1))
    tiers.host.launch([transfer])
    assert held.began.wait(10) and tiers.host.ended() == {}
    assert tiers.disk.exact("state", state(1).block_hash) is None, "it is not there yet"
    held.go_on.set()
    assert run(tiers.host, transfer) == {transfer: False}
    assert tiers.disk.exact("state", state(1).block_hash) is True


def test_the_log_is_not_flooded(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = start()
    files = [state(n) for n in range(9)]
    assert not tiers.run(False, *files)
    for path in (tmp_path / "cache").glob("*.state"):
        path.unlink()
    with caplog.at_level(logging.INFO):
        assert tiers.run(True, *files)
    assert len(caplog.records) == 1
