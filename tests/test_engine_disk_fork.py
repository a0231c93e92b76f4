"""A process that is forked off has no thread for files: it ends as any other, and they stay its parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import torch
from mambacache import LLM, SamplingParams
from mambacache.runner.directory import Directory

torch.set_num_threads(1)
model, path, under_way, resets = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "True", sys.argv[4] == "True"
options = dict(device="cpu", max_num_seqs=2, host_cache_bytes=1 << 24, disk_cache_dir=path)
options |= dict(checkpoint_budget_bytes=1 << 18, kv_cache_bytes=1 << 18)
prompt, params = [7] * 200, SamplingParams(max_tokens=2, temperature=0.0)
go_on, began, write = threading.Event(), threading.Event(), Directory.write

def slowly(*given):
    began.set()
    go_on.wait()
    write(*given)

def held():
    try:
        Directory(path)
    except ValueError:
        return True

def here():
    return {each.name for each in path.iterdir()}

def hit():
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids, llm.stats.disk_hit_tokens

llm = LLM(model, **options)
first = hit()
llm.close()
Directory.write = slowly
llm = LLM(model, **options)
assert hit() == (first[0], 192)
if under_way:
    llm.generate([[8] * 200], params, use_tqdm=False)
    llm._step_loop._move(flush=True)
    llm._step_loop._move(flush=True)
    assert began.wait(10)
before = here()
if not (child := os.fork()):
    signal.alarm(20)  # it may hang
    if resets:
        llm.reset_prefix_cache()
    llm.close()
    assert held() and here() == before
    sys.exit()
assert os.waitpid(child, 0)[1] == 0, "the child"
assert held() and here() == before
go_on.set()
assert hit()[0] == first[0]
llm.close()
assert here() > before if under_way else here() == before
llm = LLM(model, **options)
assert hit() == (first[0], 192)
llm.close()
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("under_way", [False, True])
@pytest.mark.parametrize("resets", [False, True])
def test_a_forked_process_ends_and_leaves_the_files_alone(
    tiny_model: Callable[[str], Path], tmp_path: Path, under_way: bool, resets: bool
) -> None:
    given = [str(tiny_model("qwen3_next")), str(tmp_path / "cache"), str(under_way), str(resets)]
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *given], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-3000:]
