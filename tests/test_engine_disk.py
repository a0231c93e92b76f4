"""Whole engines with files behind the host's memory: a restart hits what was hit before, and nothing wrong ever."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from disk_driver import HIT, MISS, PROMPTS, SMALL, Restarts, ask_all, is_thread_there
from engine_driver import Engines, Original, answer, ask, greedy, hits, report_of, run_until_idle, tokens_of
from mambacache import LLM
from mambacache.cli import main
from mambacache.engine import parts
from mambacache.kernels import copy_blocks
from mambacache.runner import identity
from mambacache.runner.directory import HEADER, Directory
from selection import full

MODELS = ("qwen3_next", "mamba2")


@pytest.fixture
def start(engine: Engines, tmp_path: Path) -> Iterator[Restarts]:
    with Restarts(engine, tmp_path / "cache") as restarts:
        yield restarts


@pytest.mark.parametrize("model", [MODELS[0], *full(MODELS[1])])
@pytest.mark.parametrize("options", [{}, SMALL, {**SMALL, "strict_reuse": True}])
def test_a_restart_hits_the_same_prefixes(
    start: Restarts, original: Callable[[str], Original], model: str, options: dict[str, Any]
) -> None:
    """Check that hits and tokens are the same, with states on the device, on the host or in files alone."""
    llm = start(model, **options)
    for _ in range(2):
        before = ask(llm, PROMPTS, greedy(4), together=False)
    llm = start(model, **options)
    after = ask(llm, PROMPTS, greedy(4), together=False)
    original(model).check_all(PROMPTS, after)
    assert [answer(output) for output in after] == [answer(output) for output in before]
    assert hits(after) == hits(before) == HIT
    reports = [report_of(output) for output in after]
    assert all(report.from_disk == report.hit and report.from_host == 0 for report in reports)
    stats, one = llm.stats, llm.sizes.state_bytes + 2 * llm.sizes.kv_block_bytes
    assert stats.disk_hit_tokens >= 128 * len(PROMPTS) and stats.failed_transfers == 0
    assert stats.bytes_from_disk >= one * len(PROMPTS)
    assert re.search(rf"^hit from files +{stats.disk_hit_tokens:,} \(", str(stats), re.M)


@pytest.mark.parametrize("strict", [False, True])
def test_the_next_turns_of_chats(start: Restarts, original: Callable[[str], Original], strict: bool) -> None:
    """They resume where answers ended, at states that are near, and with `strict_reuse` where prompts did."""
    prompts = [tokens_of(seed, 185) for seed in range(3)]
    first = ask(start(), prompts, greedy(10), together=False)
    turns = [[*prompt, *answer(output), 5, 6, 7] for prompt, output in zip(prompts, first, strict=True)]
    outputs = ask(start(strict_reuse=strict), turns, greedy(4), together=False)
    original("qwen3_next").check_all(turns, outputs)
    assert hits(outputs) == [128 if strict else 192] * 3


def test_blocks_are_bitwise_the_same_after_a_restart(start: Restarts) -> None:
    """Check the states and pages on the device that prompts hit."""
    blocks: list[dict[tuple[int, bytes], torch.Tensor]] = []
    for _ in range(2):
        llm = start()
        ask_all(llm)
        admission, held = llm.cache._admission, {}
        for kind, (pool, memory) in enumerate(
            ((admission.pool, llm.runner.states), (admission.pages.pool, llm.runner.pages))
        ):
            named = [(block_hash, block) for block, block_hash in enumerate(pool.hashes) if block_hash is not None]
            assert memory is not None and len(named) >= len(PROMPTS)
            copies = torch.empty(len(named), memory.block_bytes, dtype=torch.uint8, device=memory.slabs.device)
            rows = torch.tensor([[block, i] for i, (_, block) in enumerate(named)], dtype=torch.int32)
            copy_blocks(memory.slabs, copies, rows.to(copies.device))
            held |= {(kind, block_hash): copies[i] for i, (block_hash, _) in enumerate(named)}
        blocks.append(held)
    before, after = blocks
    assert after.keys() <= before.keys() and all(torch.equal(before[each], after[each]) for each in after)


def test_more_than_the_host_holds_is_written_at_the_end(start: Restarts) -> None:
    """Two states and a chain's pages at a time go through it."""
    sizes = start().sizes
    host = 2 * (sizes.state_bytes + 2 * sizes.kv_block_bytes)
    llm = start(host_cache_bytes=host)
    assert llm.sizes.num_host_states <= 2 and ask_all(llm) == MISS

    assert ask_all(start(host_cache_bytes=host)) == HIT


def test_files_of_an_engine_that_was_killed_are_hit(start: Restarts) -> None:
    llm = start(**SMALL)
    for _ in range(2):
        ask_all(llm)
    assert llm.stats.bytes_to_disk > 0
    llm._step_loop._tier.close()  # type: ignore[union-attr]  # as if killed: nothing more is written
    llm._step_loop._tier = None
    found = ask_all(start(**SMALL))
    assert sum(found) >= 128 * 3


def test_salts_share_nothing(start: Restarts) -> None:
    ask_all(start(), salt="one")
    llm = start()
    assert ask_all(llm, salt="other") == ask_all(start(), salt="") == MISS
    assert ask_all(start(), salt="one") == HIT


def changed(tiny_model: Callable[[str], Path], tmp_path: Path, by: float) -> Path:
    """Copy a checkpoint, and add `by` to one of its values."""
    path = Path(shutil.copytree(tiny_model("qwen3_next"), tmp_path / f"model {by}"))
    weights = load_file(path / "model.safetensors")
    name = min(name for name, each in weights.items() if each.dim() == 2)
    weights[name][3, 5] += by
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def test_changed_weights_miss(start: Restarts, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    ask_all(start())
    assert ask_all(start(changed(tiny_model, tmp_path, 2**-12))) == MISS
    assert ask_all(start(changed(tiny_model, tmp_path, 0.0))) == HIT  # the same weights, elsewhere


@pytest.mark.parametrize("options", [{"state_dtype": "bfloat16"}, *full({"dtype": "bfloat16"}, {"block_size": 128})])
def test_another_layout_misses(start: Restarts, options: dict[str, Any]) -> None:
    ask_all(start())
    draft = {"draft": lambda request, limit: []} if "max_draft_tokens" in options else {}
    llm = start(**options, **draft)
    assert ask_all(llm) == MISS and llm.stats.loads == 0
    assert ask_all(start()) == HIT


def test_another_version_misses(start: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_all(start())
    with monkeypatch.context() as another:
        another.setattr(identity, "source_digest", lambda: "of another version")
        assert ask_all(start()) == MISS
    assert ask_all(start()) == HIT


def test_reset_deletes(start: Restarts, tmp_path: Path) -> None:
    ask_all(start())
    llm = start()
    assert len(start.files()) >= 3 * len(PROMPTS)
    llm.reset_prefix_cache()
    assert start.files() == [] and ask_all(llm) == MISS
    llm.reset_prefix_cache()
    assert ask_all(start()) == MISS
    assert ask_all(start()) == HIT  # on files from after the reset


@pytest.mark.parametrize("deletes", [True, False])
def test_weights_that_change_in_memory(
    start: Restarts, original: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch, deletes: bool
) -> None:
    """After a reset, files are of the weights as they are then: the checkpoint's own have no use for them, even where
    nothing could be deleted."""
    llm = start()
    ask_all(llm)
    if not deletes:
        monkeypatch.setattr(Directory, "remove", lambda *_: None)
    weights = next(each for each in llm.runner.model.module.parameters() if each.dim() == 2)
    with torch.no_grad():
        weights += 0.01
    llm.reset_prefix_cache()
    assert ask_all(llm) == MISS and ask_all(llm) == HIT
    llm = start()
    outputs = ask(llm, PROMPTS, greedy(4), together=False)
    assert hits(outputs) == MISS
    original("qwen3_next").check_all(PROMPTS, outputs)


def test_reset_in_the_midst_of_a_read(
    start: Restarts, original: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_all(start())
    llm = start()
    reading, go_on = threading.Event(), threading.Event()
    read = Directory.read

    def slowly(*given: Any) -> None:
        reading.set()
        assert go_on.wait(10)
        read(*given)

    monkeypatch.setattr(Directory, "read", slowly)
    llm.submit(PROMPTS[0], greedy(4))
    threading.Timer(0.1, go_on.set).start()
    llm._step_loop._plan()
    llm._step_loop._move()
    assert reading.wait(10)
    llm.reset_prefix_cache()
    outputs = list(run_until_idle(llm).values())
    original("qwen3_next").check_all(PROMPTS[:1], outputs)
    assert hits(outputs) == [0] and llm.stats.disk_hit_tokens == 0


def test_the_bound_holds(start: Restarts, original: Callable[[str], Original], tmp_path: Path) -> None:
    sizes = start().sizes
    bound = 3 * (sizes.state_bytes + 2 * sizes.kv_block_bytes) + 3 * 3 * 1000
    for _ in range(2):
        llm = start(**SMALL, disk_cache_bytes=bound)
        outputs = ask(llm, PROMPTS, greedy(4), together=False)
        original("qwen3_next").check_all(PROMPTS, outputs)
        llm.close()
        assert 0 < sum(path.stat().st_size for path in start.files()) <= bound
    outputs = ask(start(disk_cache_bytes=bound), PROMPTS[::-1], greedy(4), together=False)
    assert hits(outputs) == [128, 128, 128, 0, 0], "those that were used last"


def test_spare_states_evict_no_file_when_an_engine_is_closed(start: Restarts) -> None:
    """States at intervals are spare: the directory has room for the states at the prompts' ends and their KV."""
    sizes = start().sizes
    one = sizes.state_bytes + HEADER.size + 2 * (sizes.kv_block_bytes + HEADER.size)
    bound = len(PROMPTS) * one + sizes.state_bytes // 2
    assert ask_all(start(checkpoint_interval=64, disk_cache_bytes=bound)) == MISS
    assert ask_all(start(disk_cache_bytes=bound)) == HIT


@pytest.mark.parametrize("bound", [0, 1, None])
def test_a_bound_that_holds_nothing_is_refused(start: Restarts, bound: int | None) -> None:
    """And what was there stays: `None` stands for a byte less than a state and a page take."""
    sizes = start(**SMALL).sizes
    least = sizes.state_bytes + sizes.kv_block_bytes + 2 * HEADER.size
    ask(start(**SMALL), PROMPTS[:1], greedy(2))
    start.close()
    before = sorted(start.files())
    with pytest.raises(ValueError, match=f"one state and one KV block take {least:,} bytes: raise disk_cache_bytes"):
        start(**SMALL, disk_cache_bytes=least - 1 if bound is None else bound)
    assert before and sorted(start.files()) == before
    start(**SMALL, disk_cache_bytes=least)


def test_closing_ends_the_thread_and_gives_the_directory_back(start: Restarts, engine: Engines, tmp_path: Path) -> None:
    llm = start()
    with pytest.raises(ValueError, match="in use by another engine: close that first"):
        engine(disk_cache_dir=tmp_path / "cache", host_cache_bytes=1 << 26)
    assert is_thread_there()
    llm.close()
    assert not is_thread_there()
    start()


@pytest.mark.parametrize("part", ["load_tokenizer", "load_model", "ModelRunner", "_host_tier", "default_sampling"])
@pytest.mark.parametrize("error", [ValueError("planted"), KeyboardInterrupt()])
def test_a_failed_start_gives_the_directory_back(
    start: Restarts, monkeypatch: pytest.MonkeyPatch, part: str, error: BaseException
) -> None:
    """However long its exception is kept, and whatever was there already."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as planted:
        planted.setattr(parts, part, fail)
        with pytest.raises(type(error)) as kept:
            start(**SMALL)
    assert not is_thread_there()
    start(**SMALL)
    assert kept.value is error and is_thread_there()


def test_a_read_that_takes_longer_than_computing_is_left_alone(start: Restarts) -> None:
    ask_all(start())
    llm = start(disk_bytes_per_token=1)
    assert ask_all(llm) == MISS and llm.stats.bytes_from_disk == 0
    assert ask_all(start()) == HIT


def test_a_prefix_that_several_wait_for_is_read_once(start: Restarts, original: Callable[[str], Original]) -> None:
    shared = [[*tokens_of(60, 200), *tokens_of(seed, 30)] for seed in range(61, 64)]
    ask(start(), [shared[0][:200]], greedy(2))
    llm = start(max_num_seqs=4)
    outputs = ask(llm, shared, greedy(3))
    original("qwen3_next").check_all(shared, outputs)
    assert [report_of(output).from_disk for output in outputs] == [192] * 3
    one = llm.sizes.state_bytes + 3 * llm.sizes.kv_block_bytes
    assert llm.stats.loads == 1 and llm.stats.bytes_from_disk == one


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_cache_dir": "x"}, "needs host_cache_bytes, through which its files go"),
        ({"disk_cache_bytes": 1}, "there is no disk_cache_dir: set it, or leave both out"),
        ({"disk_cache_dir": "x", "host_cache_bytes": 1 << 24, "disk_cache_bytes": -1}, "set it to 0 or more"),
        ({"disk_bytes_per_token": -1}, "set it to 0 or more"),
        ({"disk_cache_dir": 7, "host_cache_bytes": 1 << 24}, "set it to a string or a path"),
    ],
)
def test_refused(text_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(text_model, device="cpu", max_num_seqs=2, **options)


def test_not_used_without_a_cache(text_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cache"
    options = {"host_cache_bytes": 1 << 24, "disk_cache_dir": path}
    with LLM(text_model, device="cpu", max_num_seqs=2, enable_prefix_caching=False, **options):
        assert "and not used: nothing is cached" in caplog.text and not path.exists()


def test_on_the_command_line(text_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One answer after the other, each in a process of its own as far as engines know."""
    flags = ["--device", "cpu", "--host-cache-bytes", "64MB", "--disk-cache-dir", str(tmp_path / "cache")]
    flags += ["--disk-cache-bytes", "64MB", "--max-num-seqs", "2"]
    said = []
    for _ in range(2):
        assert main(["generate", str(text_model), "x" * 200, "--max-tokens", "4", *flags]) == 0
        said.append(capsys.readouterr())
    assert said[0].out == said[1].out and "hit 0 of 0" in said[0].err and "hit 192 of 192" in said[1].err
