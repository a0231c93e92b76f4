"""Serve a model that keeps states in files and KV by vLLM's ExampleConnector: `python disk_run.py PART DIRECTORY`.

Each PART is a process on the folders of the process before. Every token is compared with Hugging Face's.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Any

import torch
from request_run import FEW_PAGES, MODEL, Served
from safetensors.torch import load_file, save_file
from vllm.config import KVTransferConfig
from watched import LAST_ANSWER

from engine_driver import tokens_of
from mambacache.runner.directory import Folder
from tiny_models import save_tiny_model

PROMPTS = [tokens_of(seed, 200) for seed in range(100, 116)]
HIT, MISS = [192] * 16, [0] * 16


def serve(folder: Path, model: str) -> Served:
    kv = folder / f"kv of {model}"
    kv.mkdir(exist_ok=True)
    transfer = KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"shared_storage_path": str(kv)},
    )
    settings = {"state_bytes": "700KB", "state_host_bytes": "200KB", "state_disk_dir": str(folder / "states")}
    options: dict[str, Any] = {"kv_transfer_config": transfer, "max_num_batched_tokens": 4096}
    return Served(folder / model, **FEW_PAGES | options, additional_config={"mambacache": settings})


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("states/0.0/*.state"))


def first(folder: Path) -> None:
    """Host memory has room for some states, and the files for all."""
    save_tiny_model("qwen3_next_moe", folder / "model", **MODEL)
    served = serve(folder, "model")
    assert served.hits_one_by_one(PROMPTS) == MISS
    served.watch.check_idle()
    stats = served.scheduler.prefix_cache.stats
    assert stats.host_states["free"] + stats.host_states["committed"] == 8
    assert len(files(folder)) == 16 and stats.bytes_to_disk
    assert served.hits_one_by_one(PROMPTS) == HIT
    assert served.scheduler.prefix_cache.stats.disk_hit_tokens >= 192 * 4
    served.watch.check_idle()


def again(folder: Path) -> None:
    served = serve(folder, "model")
    assert served.hits_one_by_one(PROMPTS) == HIT
    stats = served.scheduler.prefix_cache.stats
    assert stats.disk_hit_tokens == stats.hit_tokens == 192 * 16 and not stats.failed_transfers
    assert stats.bytes_to_disk == 0
    served.watch.check_idle()


def damaged(folder: Path) -> None:
    """Two files are damaged, and two are cut: they are deleted, and written again."""
    for number, path in enumerate(files(folder)[:4]):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content[: -1 if number % 2 else None])
    served = serve(folder, "model")
    found = served.hits_one_by_one(PROMPTS)
    assert sorted(found) == MISS[:4] + HIT[:12], found
    assert served.scheduler.prefix_cache.stats.failed_transfers == 4
    served.watch.check_idle()
    assert len(files(folder)) == 16


def other(folder: Path) -> None:
    """Another model's KV is there, and its states: only the weights differ, and one number of them by little."""
    save_tiny_model("qwen3_next_moe", folder / "other", **MODEL)
    path = folder / "other" / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in sorted(weights) if name.endswith("o_proj.weight"))
    weights[name][0, 0] += 1.0
    save_file(weights, path, metadata={"format": "pt"})
    served = serve(folder, "other")
    assert served.hits_one_by_one(PROMPTS) == MISS
    assert served.scheduler.prefix_cache.stats.disk_hit_tokens == 0
    served.watch.check_idle()
    assert len(files(folder)) == 32


def full(folder: Path) -> None:
    """Writes fail: states are read that were written before, and the others stay in memory."""

    def fail(self: Folder, file: Any, block: memoryview) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    Folder.write = fail  # type: ignore[method-assign]
    served = serve(folder, "model")
    assert served.hits_one_by_one(PROMPTS) == HIT
    for seed in range(200, 206):
        assert served.hits_one_by_one([tokens_of(seed, 200)] * 2) == [0, 192]
        served.watch.check_idle()
    stats = served.scheduler.prefix_cache.stats
    assert stats.failed_transfers and stats.bytes_to_disk == 0 and len(files(folder)) == 32


def reset(folder: Path) -> None:
    """A reset deletes all files. States are then written, for this process alone: weights may be others."""
    served = serve(folder, "model")
    assert served.hits_one_by_one(PROMPTS[:2]) == HIT[:2]
    served.reset()
    assert not files(folder)
    assert served.hits_one_by_one(PROMPTS * 2) == MISS + HIT
    assert served.scheduler.prefix_cache.stats.disk_hit_tokens > 2 * 192
    served.watch.check_idle()
    assert len(files(folder)) == 16


def after_reset(folder: Path) -> None:
    served = serve(folder, "model")
    assert served.hits_one_by_one(PROMPTS[:4]) == MISS[:4]


PARTS = {part.__name__: part for part in (first, again, damaged, other, full, reset, after_reset)}

if __name__ == "__main__":
    torch._dynamo.config.disable = True  # vLLM compiles a count of log-probabilities, eager or not
    PARTS[sys.argv[1]](Path(sys.argv[2]))
    print(LAST_ANSWER, flush=True)
