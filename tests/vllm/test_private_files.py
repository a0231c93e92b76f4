"""Nobody else reads, plants or breaks the files in the temporary folder, and none stays behind."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.vllm import metrics, private_files, sizing
from mambacache.vllm.log import logger

SERVER = """
import sys
from types import SimpleNamespace
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.vllm import metrics, sizing
config = SimpleNamespace(additional_config={}, instance_id=sys.argv[1],
    parallel_config=SimpleNamespace(data_parallel_index=0), model_config=SimpleNamespace(served_model_name="tiny"))
metrics.show(config.instance_id)
sizing.write_sizes(config, sizing.Sizes(7))
metrics.Counters(config).tell(PrefixCache(CacheConfig(num_state_blocks=4)), idle=True)
print("up", flush=True)
sys.stdin.read()
"""


def configured(instance: str = "17", rank: int = 0) -> SimpleNamespace:
    """Return the part of a vLLM configuration that the files need."""
    return SimpleNamespace(
        additional_config={},
        instance_id=instance,
        parallel_config=SimpleNamespace(data_parallel_index=rank),
        model_config=SimpleNamespace(served_model_name="tiny"),
    )


def tell(rank: int = 0) -> None:
    metrics.Counters(configured(rank=rank)).tell(PrefixCache(CacheConfig(num_state_blocks=4)), idle=True)


def show_and_tell() -> None:
    metrics.show("17")
    tell()


def shown() -> str:
    """Return the text of /metrics in a front end of `configured`."""
    registry, collector = CollectorRegistry(), metrics.Shown()
    collector.instance_id = "17"
    registry.register(collector)
    return generate_latest(registry).decode()


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


@contextmanager
def server(instance: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process that has written its files, until the end of its input."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVER, instance],
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
    finally:
        process.communicate()


def test_a_link_in_place_of_a_file_leaves_its_target_alone(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("9")
    sizing.write_sizes(configured(), sizing.Sizes(7))
    tell()
    for path in files(tmp_path):
        if path != victim:
            path.unlink()
            for planted in (path, Path(f"{path}.new"), path.with_suffix(".new")):
                if not planted.is_symlink():
                    planted.symlink_to(victim)
    with pytest.raises(ValueError, match="the scheduler found no number of states from its workers"):
        sizing.read_sizes(configured())
    assert not shown()
    sizing.write_sizes(configured(), sizing.Sizes(8))
    tell()
    assert victim.read_text() == "9" and not victim.is_symlink()
    assert sizing.read_sizes(configured()).blocks == 8
    assert 'mambacache:hit_tokens_total{engine="0"' in shown()


def test_nobody_else_may_read_the_files(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        sizing.write_sizes(configured(), sizing.Sizes(7))
        tell()
    finally:
        os.umask(old)
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert [path.stat().st_mode & 0o777 for path in folders] == [0o700]
    assert [path.stat().st_mode & 0o777 for path in files(tmp_path)] == [0o600, 0o600]


@pytest.mark.parametrize("kind", ["link", "open to others", "another user's", "file", "no folder"])
def test_a_foreign_folder_is_refused_in_a_sentence(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = tmp_path / f"{private_files.PREFIX}17", tmp_path / "target"
    target.mkdir(0o700)
    if kind == "link":
        path.symlink_to(target)
    elif kind == "open to others":
        path.mkdir()
        path.chmod(0o770)
    elif kind == "another user's":
        path.mkdir(0o700)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    elif kind == "file":
        path.write_text("9")
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ValueError, match=r"the workers cannot write the number of states \(.*\): set TMPDIR") as raised:
        sizing.write_sizes(configured(), sizing.Sizes(7))
    assert "\n" not in str(raised.value)
    with pytest.raises(ValueError, match="the scheduler found no number of states from its workers"):
        sizing.read_sizes(configured())
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: said.append(text % args))
    counters, states = metrics.Counters(configured()), PrefixCache(CacheConfig(num_state_blocks=4))
    for _ in range(2):
        counters.tell(states, idle=True)
    assert [sentence.split(" (")[0] for sentence in said] == ["mambacache: /metrics has no new counters"]
    assert not shown() and not files(target)


def test_a_file_of_another_user_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sizing.write_sizes(configured(), sizing.Sizes(7))
    tell()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not shown()
    with pytest.raises(ValueError, match=r"0\.blocks is no file of this user"):
        sizing.read_sizes(configured())


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_file_costs_its_own_counters_only(seed: int, tmp_path: Path) -> None:
    tell(0)
    alone = shown()
    tell(1)
    (broken,) = (path for path in files(tmp_path) if b'engine="1"' in path.read_bytes())
    rng = random.Random(seed)
    content = bytearray(broken.read_bytes())
    for _ in range(20):
        content[rng.randrange(len(content))] = rng.randrange(256)
    for each in (b"\xff", b'a{b="c', content, content[: rng.randrange(len(content))], rng.randbytes(99)):
        broken.write_bytes(each)
        assert set(alone.splitlines()) <= set(shown().splitlines())
    broken.unlink()
    for special in (broken.mkdir, lambda: os.mkfifo(broken)):
        special()
        assert shown() == alone
        broken.rmdir() if broken.is_dir() else broken.unlink()


def test_the_next_start_removes_files_of_killed_processes_only(tmp_path: Path) -> None:
    mine = tmp_path / f"{private_files.PREFIX}notes"
    mine.mkdir(0o700)
    (mine / "notes.txt").write_text("mine")
    with server("1", tmp_path) as alive:
        with server("2", tmp_path) as killed:
            seen = files(tmp_path)
            assert len(seen) == 5
            killed.send_signal(signal.SIGKILL)
        with server("3", tmp_path):
            remaining = files(tmp_path)
        assert len(remaining) == 5 and len(set(remaining) & set(seen)) == 3
        assert alive.poll() is None
    assert files(tmp_path) == [mine / "notes.txt"]
    assert list(tmp_path.iterdir()) == [mine]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_process_that_ends_removes_its_folder(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    process = multiprocessing.get_context(method).Process(target=show_and_tell)
    process.start()
    process.join()
    assert process.exitcode == 0 and list(tmp_path.iterdir()) == []


def interrupt(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, others: Callable[[], object]) -> None:
    """Have other processes run just before the next call of a function."""
    call = getattr(module, name)

    def late(*args: Any, **named: Any) -> Any:
        monkeypatch.setattr(module, name, call)
        others()
        return call(*args, **named)

    monkeypatch.setattr(module, name, late)


@pytest.mark.parametrize(("module", "name"), [(os, "open"), (fcntl, "flock")])
def test_a_start_makes_the_folder_that_another_start_removed(
    module: ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, module, name, private_files.remove_left)
    private_files.made_folder_of("17").write("0.blocks", b"7")
    private_files.remove_left()
    assert [path.read_bytes() for path in files(tmp_path)] == [b"7"]


def test_a_start_leaves_the_folder_that_was_made_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = tmp_path / f"{private_files.PREFIX}17", []
    path.mkdir(0o700)

    def others() -> None:
        private_files.remove_left()
        assert not path.exists()
        made.append(private_files.made_folder_of("17"))

    interrupt(monkeypatch, fcntl, "flock", others)
    private_files.remove_left()
    made[0].write("0.blocks", b"7")
    assert (path / "0.blocks").read_bytes() == b"7"
