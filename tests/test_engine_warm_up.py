"""That what an engine runs before its first request takes all forms of prefill."""

from __future__ import annotations

import pytest

from kernel_cases import Row, plan_arrays
from mambacache.engine.parts import warm_up_batches
from mambacache.kernels import StateIndices
from mambacache.kernels.gpu.common.chunks import keep_busy
from mambacache.kernels.gpu.kda.prefill import MIN_TURNS

PROCESSORS = 132  # of an H100 or H200


def form(lengths: list[int], heads: int) -> str:
    """What prefill of the gated delta rule goes by, for values of 128 channels."""
    if 2 * heads * len(lengths) <= PROCESSORS:
        return "few"
    indices = StateIndices.from_arrays(plan_arrays([], [Row(length) for length in lengths]), "cpu")
    return "busy" if keep_busy(indices, heads, PROCESSORS) else "uneven"


@pytest.mark.parametrize("heads", [4, 8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("room", [2048, 8192, 16384])
def test_every_form_of_prefill_is_among_the_batches(heads: int, room: int) -> None:
    batches = warm_up_batches(room, room, 64)
    assert {form(lengths, heads) for lengths in batches} == {"few", "busy", "uneven"}


@pytest.mark.parametrize("heads", [4, 8, 16, 24, 32, 48, 64])
@pytest.mark.parametrize("room", [2048, 8192, 16384])
def test_every_form_of_the_prefill_of_kda_is_among_the_batches(heads: int, room: int) -> None:
    """It goes by states in turn if it is busy and has many of them; rows of few are `uneven`."""

    def kda_form(lengths: list[int]) -> str:
        found, many = form(lengths, heads), heads * len(lengths) >= MIN_TURNS * PROCESSORS
        return "uneven" if found == "busy" and not many else found

    possible = {"few", "uneven", "busy"} if heads * 64 >= MIN_TURNS * PROCESSORS else {"few", "uneven"}
    assert {kda_form(lengths) for lengths in warm_up_batches(room, room, 64)} == possible


@pytest.mark.parametrize("room", [1, 2, 33, 64, 320, 8192])
@pytest.mark.parametrize("longest", [1, 16, 320, 8192])
@pytest.mark.parametrize("rows", [1, 2, 64, 1000])
def test_batches_fit_into_every_budget(room: int, longest: int, rows: int) -> None:
    for lengths in warm_up_batches(room, min(longest, room), rows):
        assert 0 < len(lengths) <= rows and sum(lengths) <= room and 0 < min(lengths) <= max(lengths) <= longest
