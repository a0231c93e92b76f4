"""Check whole engines with damaged files, a full disk or a failing thread: they lose hits, and nothing else."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from disk_driver import HIT, MISS, PROMPTS, SMALL, Restarts, ask_all, is_thread_there
from engine_driver import Engines, Original, ask, greedy, hits, tokens_of
from mambacache.runner.directory import Directory
from selection import full


@pytest.fixture
def start(engine: Engines, tmp_path: Path) -> Iterator[Restarts]:
    with Restarts(engine, tmp_path / "cache") as restarts:
        yield restarts


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-200] ^= 4
    path.write_bytes(data)


def foreign(path: Path) -> None:
    path.write_bytes(b"something else")


def gone(path: Path) -> None:
    path.unlink()


def no_file(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("kind", ["state", *full("kv")])
@pytest.mark.parametrize("damage", [cut_short, flipped, foreign, gone, no_file])
def test_damaged_files_cost_hits(
    start: Restarts,
    original: Callable[[str], Original],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    kind: str,
) -> None:
    ask_all(start())
    llm = start()
    for path in (tmp_path / "cache").glob(f"*.{kind}"):
        damage(path)
    outputs = ask(llm, PROMPTS, greedy(4), together=False)
    original("qwen3_next").check_all(PROMPTS, outputs)
    assert hits(outputs) == MISS and llm.stats.failed_transfers >= len(PROMPTS)
    assert "is not what was written there, and is deleted" in caplog.text or "cannot be read" in caplog.text


def test_a_full_disk_costs_hits(
    start: Restarts,
    original: Callable[[str], Original],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as planted:
        planted.setattr(Directory, "write", full)
        llm = start(**SMALL)
        for _ in range(2):
            outputs = ask(llm, PROMPTS, greedy(4), together=False)
            original("qwen3_next").check_all(PROMPTS, outputs)
        assert hits(outputs) == HIT and llm.stats.failed_transfers > 0
        llm = start(**SMALL)
    assert caplog.text.count("No space left on device") == 1
    assert ask_all(llm) == MISS and ask_all(start(**SMALL)) == HIT


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_directory_that_cannot_be_written(
    start: Restarts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, call: str
) -> None:
    """Check that the engine goes on without the directory."""
    ask_all(start(**SMALL))
    start.close()  # missing files are written now
    real = getattr(Path, call)

    def refuse(path: Path, *given: Any, **options: Any) -> Any:
        if tmp_path / "cache" in (path, path.parent):
            raise PermissionError(errno.EROFS, "Read-only file system")
        return real(path, *given, **options)

    monkeypatch.setattr(Path, call, refuse)
    llm = start(**SMALL)
    assert ask_all(llm) == MISS and ask_all(llm) == HIT
    assert caplog.text.count("Read-only file system") == 1 and "not used" in caplog.text


def test_a_directory_that_vanishes(
    start: Restarts, original: Callable[[str], Original], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask_all(start(**SMALL))
    llm = start(**SMALL)
    shutil.rmtree(tmp_path / "cache")
    for _ in range(2):
        outputs = ask(llm, PROMPTS, greedy(4), together=False)
        original("qwen3_next").check_all(PROMPTS, outputs)
    assert hits(outputs) == HIT and "cannot be read" in caplog.text and "cannot be written" in caplog.text
    llm.reset_prefix_cache()
    assert "delete it before the next start" in caplog.text and ask_all(llm) == MISS
    assert ask_all(start(**SMALL)) == MISS


@pytest.mark.parametrize("error", [*full(RuntimeError("planted")), SystemExit()])
def test_faults_in_the_thread_cost_hits(
    start: Restarts, original: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    for name, every in (("read", 4), ("write", 5)):
        call, calls = getattr(Directory, name), count(1)

        def sometimes(*given: Any, call: Any = call, calls: Any = calls, every: int = every) -> None:
            if next(calls) % every == 0:
                raise error
            call(*given)

        monkeypatch.setattr(Directory, name, sometimes)
    hit_tokens = 0
    for _ in range(4):
        llm = start(**SMALL)
        for _ in range(2):
            outputs = ask(llm, PROMPTS, greedy(4), together=False)
            original("qwen3_next").check_all(PROMPTS, outputs)
        hit_tokens += llm.stats.disk_hit_tokens
        assert llm.stats.failed_transfers > 0
    assert hit_tokens > 0


def test_ctrl_c_in_between(
    start: Restarts, original: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check interrupts while a step waits for files and while the engine closes: later answers are right."""
    ask_all(start(**SMALL))
    llm = start(**SMALL)
    tier = llm._step_loop._tier
    assert tier is not None
    wait, waits = tier.wait, count()

    def interrupted() -> None:
        if next(waits) % 3 == 0:
            raise KeyboardInterrupt
        wait()

    monkeypatch.setattr(tier, "wait", interrupted)
    interrupts = 0
    for prompt in [*PROMPTS, *PROMPTS]:
        try:
            outputs = ask(llm, [prompt], greedy(4))
        except KeyboardInterrupt:
            interrupts += 1
            outputs = ask(llm, [prompt], greedy(4))
        original("qwen3_next").check_all([prompt], outputs)
    assert interrupts >= 3 and llm.stats.disk_hit_tokens > 0

    ended = tier.ended

    def closed_in_the_midst() -> None:
        monkeypatch.setattr(tier, "ended", ended)
        raise KeyboardInterrupt

    monkeypatch.setattr(tier, "wait", closed_in_the_midst)
    monkeypatch.setattr(  # no file is written before it was waited for
        tier, "ended", lambda: {transfer: failed for transfer, failed in ended().items() if not transfer.files}
    )
    ask(llm, [tokens_of(99, 200)], greedy(2))
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert not is_thread_there()
    outputs = ask(start(**SMALL), PROMPTS, greedy(4), together=False)
    original("qwen3_next").check_all(PROMPTS, outputs)
    assert sum(hits(outputs)) > 0
