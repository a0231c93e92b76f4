"""Check the code of all launches for GPUs from Ampere to Blackwell, compiled where none of them is present."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_for import Launch, compile_for
from mambacache.kernels import device

OLDEST = Path(__file__).resolve().parent.parent / "build/triton-3.6.0"  # from `make test-full`
NEWEST = None  # the installed Triton
GPUS = {10 * major + minor: gpu for (major, minor), gpu in device.GPUS.items()}
HOPPER = 90  # launches overlap from there on
ALL = [(capability, triton) for triton in (OLDEST, NEWEST) for capability in GPUS]
FEW = [(80, OLDEST), (120, NEWEST)]
CHOSEN = ALL if os.environ.get("MAMBACACHE_CAPABILITIES") == "all" else FEW

QUICK = r"(gated_delta_rule of qwen3-next|kda|ssd of nemotron-h-8b) / \d, mixed|paged_attention of qwen3-next"

PRODUCTS = {
    "gated_delta_rule": {"_fold", "_prepare", "_scan", "_delta_prefill", "_delta_prepare", "_delta_scan"},
    "kda": {"_prepare", "_scan", "_kda_prepare", "_kda_scan", "_kda_persistent_scan"},
    "ssd": {"_fold", "_prepare", "_scan", "_ssd_scan"},
    "paged_attention": {"_attention_decode", "_attention_prefill"},
}
"""This lists the kernels that multiply tiles, without the ending `_kernel`."""

LEAST = 60  # launches
MOST_SPILLED = 160  # bytes of a thread
MOST_BARRIERS = 16  # of a portable scan; 27 and more if warps do not have lines of their own
PORTABLE = {
    "gated_delta_rule of qwen3-next / 1, m": 220,
    "gated_delta_rule of olmo-hybrid / 1, mixed: _scan": 220,
    "gated_delta_rule of qwen3-next / 1, float16": 220,
    "gated_delta_rule of qwen3-next / 1, float32: _prepare": 4600,
    "gated_delta_rule of qwen3-next / 1, float32: _scan": 730,
    "kda of kimi-linear / 1, mixed: _prepare": 172,
    "kda of kimi-linear / 1, float16: _prepare": 634,
    "kda of kimi-linear / 1, many: _scan": 260,
    "kda of kimi-linear / 1, float32": 770,
    "ssd of nemotron-h-8b / 8, mixed: _scan": 320,
    "ssd of nemotron-h-8b / 1, many: _scan": 320,
    "ssd of nemotron-h-8b / 8, float16: _scan": 320,
    "ssd of nemotron-h-8b / 8, float32: _prepare": 2200,
    "ssd of nemotron-h-8b / 8, float32: _scan": 660,
    "ssd of falcon-h1-7b / 1, mixed: _scan": 330,
    "ssd of falcon-h1-7b / 1, float32: _prepare": 5100,
    "ssd of falcon-h1-7b / 1, float32: _scan": 2000,
}
LARGE_TILES = {
    **PORTABLE,
    "gated_delta_rule of qwen3-next / 1, many: _scan": 330,
    "gated_delta_rule of olmo-hybrid / 1, mixed: _prepare": 250,
    "gated_delta_rule of olmo-hybrid / 1, mixed: _scan": 470,
    "paged_attention of qwen3-next: _attention_prefill": 600,
}
OWN = {
    "gated_delta_rule of qwen3-next / 1, mixed: _delta_prepare": 210,
    "gated_delta_rule of qwen3-next / 1, many: _delta_prefill": 190,
    "gated_delta_rule of qwen3-next / 1, uneven: _delta_prepare": 210,
    "gated_delta_rule of olmo-hybrid / 1, mixed: _prepare": 900,
    "gated_delta_rule of qwen3-next / 1, float16: _prepare": 400,
    "gated_delta_rule of qwen3-next / 1, float32": 6200,
    "kda of kimi-linear / 1, mixed: _kda_prepare": 1300,
    "kda of kimi-linear / 1, float16: _prepare": 1100,
    "kda of kimi-linear / 1, float32": 3500,
    "ssd of falcon-h1-7b / 1, mixed: _scan": 2050,
    "ssd of nemotron-h-8b / 8, float16: _scan": 430,
    "ssd of nemotron-h-8b / 8, float32: _scan": 4200,
    "ssd of falcon-h1-7b / 1, float32: _prepare": 1700,
    "ssd of falcon-h1-7b / 1, float32: _scan": 7500,
}


def most_spilled(launch: Launch, capability: int) -> int:
    """Return the bound of a launch: a tenth more than is known."""
    large = GPUS[capability].shared_memory >= GPUS[80].shared_memory
    known = OWN if capability == HOPPER else LARGE_TILES if large else PORTABLE
    return max((most for name, most in known.items() if str(launch).startswith(name)), default=MOST_SPILLED)


def faults(launch: Launch, capability: int) -> list[str]:
    """Return the faults of a launch's code for a compute capability."""
    has = set(launch.instructions)
    multiplies = bool(has & ({"mma.sync", "wgmma"} if capability == HOPPER else {"mma.sync"}))
    op = launch.case.split()[0]
    in_fp32 = op == "paged_attention" and launch.case.endswith("float32")  # without tensor cores
    shall_multiply = not in_fp32 and launch.kernel.removesuffix("_kernel") in PRODUCTS.get(op, ())
    found = {
        f"takes {launch.shared} bytes of shared memory": launch.shared > GPUS[capability].shared_memory * 1024,
        f"spills {launch.spilled} bytes with {launch.registers} registers": launch.spilled
        > most_spilled(launch, capability),
        "stores nothing": "st.global" not in has,  # a lone trap
        f"waits at {launch.barriers} barriers": launch.kernel == "_scan_kernel"
        and launch.case.endswith("many")
        and launch.barriers > MOST_BARRIERS,
        "multiplies without tensor cores": shall_multiply and not multiplies,
        "multiplies tiles, and is not listed": multiplies and not shall_multiply,
        "has wgmma": "wgmma" in has and capability != HOPPER,
        "has tcgen05": "tcgen05" in has,
        "has griddepcontrol": "griddepcontrol" in has and capability < HOPPER,
        "overlaps": launch.overlaps and capability < HOPPER,
        "does not wait for the launch that it overlaps": launch.overlaps and "griddepcontrol" not in has,
    }
    return [f"{launch} {fault}" for fault, is_so in found.items() if is_so]


def test_the_launches_of_a_few_cases(tmp_path: Path) -> None:
    launches = compile_for(86, NEWEST, tmp_path, QUICK)
    assert len(launches) >= 9
    wrong = [fault for launch in launches for fault in faults(launch, 86)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.full
@pytest.mark.parametrize(
    ("capability", "triton"), CHOSEN, ids=[f"{c}-{'newest' if t is None else t.name}" for c, t in CHOSEN]
)
def test_every_launch(capability: int, triton: Path | None, tmp_path: Path) -> None:
    if triton is not None and not triton.exists():
        pytest.skip(f"`make build/{triton.name}` downloads it")
    launches = compile_for(capability, triton, tmp_path)
    assert len(launches) >= LEAST
    wrong = [fault for launch in launches for fault in faults(launch, capability)]
    assert not wrong, "\n".join(wrong)


SOUND = Launch("kda of kimi-linear / 1, mixed", "_scan_kernel", ("mma.sync", "st.global"), 50_000, 255, 100, 3, False)


@pytest.mark.parametrize(
    ("capability", "changes", "fault"),
    [
        (86, {"shared": 102_400}, "takes 102400 bytes"),
        (86, {"spilled": 164}, "spills 164 bytes"),
        (86, {"case": "kda of kimi-linear / 1, many", "barriers": 17}, "waits at 17 barriers"),
        (100, {"instructions": ()}, "stores nothing"),
        (80, {"instructions": ("st.global",)}, "multiplies without"),
        (120, {"instructions": ("wgmma", "mma.sync", "st.global")}, "has wgmma"),
        (100, {"instructions": ("tcgen05", "mma.sync", "st.global")}, "has tcgen05"),
        (89, {"instructions": ("mma.sync", "st.global", "griddepcontrol")}, "has griddepcontrol"),
        (89, {"overlaps": True}, "overlaps"),
        (90, {"overlaps": True}, "does not wait"),
        (90, {"kernel": "_fold_kernel"}, "is not listed"),
    ],
)
def test_a_fault_is_found(capability: int, changes: dict[str, Any], fault: str) -> None:
    assert faults(SOUND, capability) == []
    assert any(fault in each for each in faults(replace(SOUND, **changes), capability))
