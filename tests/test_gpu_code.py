"""Check the code of all launches for GPUs from Ampere to Blackwell, compiled where none of them is present."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile_for import Launch, compile_for

OLDEST = Path(__file__).resolve().parent.parent / "build/triton-3.6.0"  # from `make test-full`
NEWEST = None  # the installed Triton
KIB_PER_BLOCK = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
HOPPER = 90  # launches overlap from there on
ALL = [(capability, triton) for triton in (OLDEST, NEWEST) for capability in KIB_PER_BLOCK]
FEW = [(80, OLDEST), (86, OLDEST), (90, NEWEST), (120, OLDEST)]
CHOSEN = ALL if os.environ.get("MAMBACACHE_CAPABILITIES") == "all" else FEW

PRODUCTS = {
    "gated_delta_rule": {"_fold", "_prepare", "_scan", "_delta_prefill", "_delta_prepare", "_delta_scan"},
    "kda": {"_prepare", "_scan", "_kda_prepare", "_kda_scan", "_kda_persistent_scan"},
    "ssd": {"_fold", "_scan", "_ssd_scan"},
    "paged_attention": {"_attention_decode", "_attention_prefill"},
}
"""This lists the kernels that multiply tiles, without the ending `_kernel`."""

LEAST = 45  # launches
MOST_SPILLED = 128  # bytes of a thread
LARGE_TILES = {
    "gated_delta_rule of qwen3-next / 1, mixed: _scan": 560,
    "gated_delta_rule of qwen3-next / 1, many: _scan": 1050,
    "gated_delta_rule of olmo-hybrid / 1, mixed: _scan": 1050,
    "kda of kimi-linear / 1, mixed: _prepare": 192,
    "kda of kimi-linear / 1, mixed: _scan": 264,
    "ssd of falcon-h1-7b": 1100,
}
SMALL_TILES = {"ssd of falcon-h1-7b": 1100}
OWN = {
    "gated_delta_rule of olmo-hybrid / 1, mixed: _prepare": 700,
    "gated_delta_rule of qwen3-next / 1, float32": 4900,
    "kda of kimi-linear / 1, mixed: _kda_prepare": 960,
    "kda of kimi-linear / 1, float32": 3000,
    "ssd of falcon-h1-7b": 1100,
}
SPILLED = {80: LARGE_TILES, 86: SMALL_TILES, 89: SMALL_TILES, 90: OWN, 100: LARGE_TILES, 120: SMALL_TILES}
"""This maps the beginning of the name of a launch that spills more to its most bytes, by compute capability."""


def faults(launch: Launch, capability: int) -> list[str]:
    """Return the faults of a launch's code for a compute capability."""
    has = set(launch.instructions)
    multiplies = bool(has & ({"mma.sync", "wgmma"} if capability == HOPPER else {"mma.sync"}))
    shall_multiply = launch.kernel.removesuffix("_kernel") in PRODUCTS.get(launch.case.split()[0], ())
    bound = max(
        (most for name, most in SPILLED[capability].items() if str(launch).startswith(name)), default=MOST_SPILLED
    )
    found = {
        f"takes {launch.shared} bytes of shared memory": launch.shared > KIB_PER_BLOCK[capability] * 1024,
        f"spills {launch.spilled} bytes with {launch.registers} registers": launch.spilled > bound,
        "stores nothing": "st.global" not in has,  # a lone trap
        "multiplies without tensor cores": shall_multiply and not multiplies,
        "multiplies tiles, and is not listed": multiplies and not shall_multiply,
        "has wgmma": "wgmma" in has and capability != HOPPER,
        "has tcgen05": "tcgen05" in has,
        "has griddepcontrol": "griddepcontrol" in has and capability < HOPPER,
        "overlaps": launch.overlaps and capability < HOPPER,
        "does not wait for the launch that it overlaps": launch.overlaps and "griddepcontrol" not in has,
    }
    return [f"{launch} {fault}" for fault, is_so in found.items() if is_so]


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


SOUND = Launch("kda of kimi-linear / 1, mixed", "_scan_kernel", ("mma.sync", "st.global"), 50_000, 255, 100, False)


@pytest.mark.parametrize(
    ("capability", "changes", "fault"),
    [
        (86, {"shared": 102_400}, "takes 102400 bytes"),
        (80, {"spilled": 132}, "spills 132 bytes"),
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
