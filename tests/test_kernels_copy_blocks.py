"""Copy blocks from pool to pool, by the reference and by the GPU's kernel in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu_cases import DEVICE
from mambacache.kernels import api, copy_blocks, gpu

Copy = Callable[[Tensor, Tensor, Tensor], None]


def pool(blocks: int, width: int, gap: int, seed: int) -> Tensor:
    """Return random blocks that lie `gap` bytes apart."""
    buffer = torch.randint(256, (blocks, width + gap), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return buffer[:, :width]


def int32(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)


def check_copies(width: int, gap: int, pairs: Tensor, copy: Copy = copy_blocks) -> None:
    """Check that named blocks arrive, and that nothing else changes on either side, gaps included."""
    source, target = pool(9, width, 0, 1), pool(7, width, gap, 2)
    before, whole = source.clone(), target.as_strided((7, width + gap), (width + gap, 1))
    expected = whole.clone()
    for block, into in pairs.tolist():
        expected[into, :width] = source[block]
    copy(source, target, pairs)
    assert torch.equal(whole, expected)
    assert torch.equal(source, before)


CASES = [
    pytest.param(16, 0, int32((1, 1)), id="one access"),
    pytest.param(16384 * 2 + 48, 0, int32((3, 1), (1, 4), (8, 2)), id="tiles and a rest"),
    pytest.param(256, 32, int32(*((8 - i, i) for i in range(7))), id="strided"),
    pytest.param(256, 0, int32(), id="none"),
]


@pytest.mark.parametrize(("width", "gap", "pairs"), CASES)
def test_reference(width: int, gap: int, pairs: Tensor) -> None:
    check_copies(width, gap, pairs)


@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU itself runs it")
@pytest.mark.parametrize(("width", "gap", "pairs"), CASES)
def test_interpreted(width: int, gap: int, pairs: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "backend", lambda x: gpu)
    check_copies(width, gap, pairs)


@pytest.mark.parametrize(
    ("source", "target", "pairs", "message"),
    [
        (pool(3, 32, 0, 1), pool(3, 48, 0, 1), int32((1, 1)), "target has shape"),
        (
            pool(3, 24, 0, 1),
            pool(3, 24, 0, 1),
            int32((1, 1)),
            "source must be contiguous, and begin at multiples of 16",
        ),
        (pool(3, 24, 8, 1), pool(3, 24, 8, 1), int32((1, 1)), "A block has 24 bytes"),
        (pool(3, 32, 0, 1), pool(3, 32, 8, 1), int32((1, 1)), "target must be contiguous"),
        (pool(3, 32, 0, 1), pool(3, 32, 0, 1), int32((1, 1)).long(), "pairs is int64"),
        (pool(3, 32, 0, 1), pool(3, 32, 0, 1), int32((1, 1), (2, 2)).view(1, 4), "pairs has shape"),
        (pool(3, 32, 0, 1).view(torch.int32), pool(3, 32, 0, 1), int32((1, 1)), "source is int32"),
    ],
)
def test_refused(source: Tensor, target: Tensor, pairs: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copy_blocks(source, target, pairs)
