"""The trained recall model on a GPU gives right answers, hits, and bitwise the same states, with graphs and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from watched import run, run_to_its_end

MODES = ("eager", "FULL_DECODE_ONLY", "default")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def answer(folder: Path, mode: str, *gpus: str, **settings: str) -> None:
    run_to_its_end(folder / f"{mode}.log", "recall_run.py", mode, folder / f"{mode}.pt", *gpus, **settings)


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[torch.Tensor]]:
    """Return the states that each mode leaves."""
    folder = tmp_path_factory.mktemp("recall")
    for mode in MODES:
        answer(folder, mode)
    return {mode: torch.load(folder / f"{mode}.pt") for mode in MODES}


def test_replayed_graphs_leave_the_states_that_eager_steps_leave(states: dict[str, list[torch.Tensor]]) -> None:
    """Compare modes where nothing is compiled: torch.compile rounds the inputs of our kernels otherwise."""
    for eager, replayed in zip(states["eager"], states["FULL_DECODE_ONLY"], strict=True):
        assert eager.any() and torch.equal(eager, replayed)


@pytest.mark.parametrize(("gpu", "arch"), [("sm80", "sm80"), ("sm89", "sm89"), ("sm120", "sm89")])
def test_code_of_another_gpu_gives_right_answers(gpu: str, arch: str, tmp_path: Path) -> None:
    """Run vLLM's Triton kernels with `arch`. A Hopper cannot run Triton's code for Blackwell; ours is Ampere's."""
    answer(tmp_path, "FULL_DECODE_ONLY", MAMBACACHE_GPU=gpu, TRITON_OVERRIDE_ARCH=arch)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_give_right_answers(tmp_path: Path) -> None:
    answer(tmp_path, "FULL_DECODE_ONLY", "2")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_dummy_steps_of_an_idle_rank_change_none_of_its_states(tmp_path: Path) -> None:
    run("idle_rank_run.py", "recall", tmp_path)


def test_an_engine_that_slept_answers_as_before(tmp_path: Path) -> None:
    answer(tmp_path, "sleep")


def test_a_request_with_bad_logits_costs_itself_alone(tmp_path: Path) -> None:
    run("nan_run.py", "nan", tmp_path)


@pytest.mark.parametrize("mode", ["connector", "size", "sleep"])
def test_states_and_kv_come_back_from_host_memory(mode: str, tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "log", "offload_run.py", mode)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_have_states_and_kv_in_host_memory(tmp_path: Path) -> None:
    run_to_its_end(tmp_path / "log", "offload_run.py", "connector", "2")
