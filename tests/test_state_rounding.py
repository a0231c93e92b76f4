"""Float16 states that are rounded once a fold stay nearer to float64 than states that are rounded once a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
RESULT = json.loads((ROOT / "benchmarks" / "results" / "state-rounding-cpu.json").read_text())


@pytest.mark.parametrize("op", ["ssd", "selective_scan"])
@pytest.mark.parametrize("kind", ["noise", "noise around one"])
def test_states_rounded_at_folds_err_less_than_states_rounded_at_random(
    op: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import state_rounding

    torch.manual_seed(0)
    errors = state_rounding.measure(op, kind, state_rounding.PROMPT + 256)
    pairs = zip(errors["fold, to nearest"], errors["token, at random"], strict=True)
    assert all(2 * fold < token for fold, token in pairs)


def test_rounding_at_random_is_right_on_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from state_rounding import at_random

    torch.manual_seed(0)
    values = torch.tensor([1 + 2**-12, -3 - 2**-13, 1e-5, 0.0, 2.0**-24 / 3])
    found = at_random(values.expand(20_000, 5)).double()
    apart = torch.tensor([2.0**-10, 2.0**-9, 2.0**-24, 0.0, 2.0**-24], dtype=torch.float64)
    assert ((found.mean(0) - values).abs() <= 0.02 * apart).all()
    assert ((found - values).abs() < apart + 1e-300).all()


def test_the_page_on_vllm_gives_the_errors_that_were_measured() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    gains: dict[str, list[float]] = {"noise": [], "noise around one": [], "little noise": [], "constant": []}
    for kinds in RESULT["relative_errors_of_states"].values():
        for kind, ways in kinds.items():
            pairs = zip(ways["token, at random"], ways["fold, to nearest"], strict=True)
            gains[kind] += [token / fold for token, fold in pairs]
    noisy = gains["noise"] + gains["noise around one"]
    worst = max(max(ways["constant"]["fold, to nearest"]) for ways in RESULT["relative_errors_of_states"].values())
    assert f"{min(noisy):.1f} to {max(noisy):.1f} times nearer to float64" in page
    assert f"up to {1 / min(gains['little noise']):.1f} times as much" in page
    assert f"up to {1 / min(gains['constant']):.0f} times as large, {worst:.0%} of the state".replace("%", " %") in page


def test_the_page_on_vllm_gives_the_errors_of_each_dtype() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "state-dtypes-cpu.json").read_text())
    page = (ROOT / "docs" / "vllm.md").read_text().replace("e-", "e-0")
    assert f"after a prompt of {result['tokens']:,} random tokens" in page
    for dtypes in result["errors"].values():
        assert " | ".join(f"{each['state']:.1e}, {each['outputs']:.1e}" for each in dtypes.values()) in page


@pytest.mark.parametrize("op", ["gated_delta_rule", "kda", "ssd", "selective_scan"])
def test_narrow_states_cost_a_rounding_a_chunk(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import state_dtypes

    errors = state_dtypes.measure(op, 192)
    assert errors["float32"]["state"] < 1.01 * errors["float16"]["state"] < errors["bfloat16"]["state"] < 2**-7
