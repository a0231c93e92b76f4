"""Check paged attention against softmax in float64, in pages full of NaN."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_cases import Row, assert_bitwise, bits, plan_arrays, random, row_starts
from mambacache.kernels import StateIndices, paged_attention

BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative RMS


class Pages:
    """Hand out pages of keys and values in random order. Places that nothing wrote hold NaN."""

    def __init__(
        self,
        heads: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        block_size: int = 16,
        blocks: int = 600,
        device: str = "cpu",
    ) -> None:
        self.block_size, self.device = block_size, device
        shape = blocks, block_size, heads
        self.keys, self.values = (torch.full((*shape, w), torch.nan, dtype=dtype, device=device) for w in widths)
        self._free = iter((np.random.default_rng(0).permutation(blocks - 1) + 1).tolist())

    def take(self, tokens: int) -> tuple[int, ...]:
        return tuple(next(self._free) for _ in range(-(-tokens // self.block_size)))

    def place(self, pages: tuple[int, ...], start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the page and the offset in it of positions `start` to `stop`."""
        position = torch.arange(start, stop, device=self.device)
        table = torch.tensor([*pages, 0], device=self.device)
        return table[position // self.block_size], position % self.block_size

    def row(
        self, context: int, length: int, *, decode: bool = False, held: int = 0, seed: int = 0, width: int | None = None
    ) -> Row:
        """Return a row with pages that hold its context, and its first tokens up to position `held`.

        A decode row may be padded to `width` tokens.
        """
        pages, held = self.take(context + length), max(context, held)
        for i, pool in enumerate((self.keys, self.values)):
            content = random(held, *pool.shape[2:], seed=2 * seed + i, dtype=pool.dtype)
            pool[self.place(pages, 0, held)] = content.to(self.device)
        return Row(length, 1, 1, context, width=width or length, pages=pages, kv_held=held)

    def indices(self, decodes: list[Row], prefills: list[Row], num_tokens: int) -> StateIndices:
        arrays = plan_arrays(decodes, prefills, num_tokens=num_tokens, block_size=self.block_size)
        return StateIndices.from_arrays(arrays, self.device)


def inputs(
    total: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    shapes = (heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1])
    return [random(total, *shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def oracle(q: Tensor, keys: Tensor, values: Tensor, positions: range, scale: float) -> Tensor:
    """Return softmax attention of one row in float64, for keys [tokens, HKV, D]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    late = torch.arange(len(keys), device=q.device) > torch.tensor(positions, device=q.device)[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(late, -torch.inf).softmax(-1), values)


def run_and_check(
    pages: Pages,
    decodes: list[Row],
    prefills: list[Row],
    inputs: list[Tensor],
    scale: float | None,
    bound: float,
) -> None:
    """Check that outputs are within `bound` (relative RMS), padding gives zeros, and only the rows' slots are written.

    The batch ends with padding: the tokens that the inputs have left.
    """
    q, k, v = inputs
    starts = row_starts(decodes, prefills)
    indices = pages.indices(decodes, prefills, len(q))
    before = pages.keys.clone(), pages.values.clone()

    y = paged_attention(q, k, v, pages.keys, pages.values, indices, scale)

    padding = torch.ones(len(y), dtype=torch.bool)
    written = torch.zeros(pages.keys.shape[:2], dtype=torch.bool, device=pages.device)
    for row, start in zip([*decodes, *prefills], starts, strict=True):
        if not row.length:
            continue
        padding[start : start + row.length] = False
        expected = []
        for pool, old, new in ((pages.keys, before[0], k), (pages.values, before[1], v)):
            place = pages.place(row.pages, 0, row.context + row.length)
            content = old[place]
            content[row.kv_held :] = new[start + row.kv_held - row.context : start + row.length].to(pool.dtype)
            assert torch.equal(pool[place], content)
            expected.append(content.to(q.dtype))
        written[pages.place(row.pages, row.kv_held, row.context + row.length)] = True
        positions = range(row.context, row.context + row.length)
        wanted = oracle(q[start : start + row.length], *expected, positions, scale or q.shape[2] ** -0.5)
        error = y[start : start + row.length].double() - wanted
        assert error.square().mean() <= bound**2 * wanted.square().mean(), (row.context, row.length)
    assert padding.sum() > 3 and not y[padding.to(y.device)].any()
    for pool, old in zip((pages.keys, pages.values), before, strict=True):
        assert torch.equal(bits(pool)[~written], bits(old)[~written])


@pytest.mark.parametrize(
    ("heads", "widths"),
    [((4, 2), (16, 16)), ((4, 4), (24, 16)), ((6, 1), (32, 64))],
    ids=["gqa", "mla", "one-key-head"],
)
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("scale", [None, 1.0])
def test_mixed_batch(
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    scale: float | None,
    block_size: int = 16,
    page_dtype: torch.dtype | None = None,
) -> None:
    pages = Pages(heads[1], widths, page_dtype or dtype, block_size)
    decodes = [
        pages.row(40, 3, decode=True, seed=1),
        pages.row(15, 1, decode=True, seed=2, width=3),
        Row(0),
        pages.row(300, 2, decode=True, seed=3, width=3),
    ]
    prefills = [
        pages.row(0, 70, seed=4),
        pages.row(33, 1, seed=5),
        Row(0),
        pages.row(64, 50, held=90, seed=6),  # shares pages beyond its hit: those tokens write nothing
        pages.row(50, 170, seed=7),
        pages.row(0, 2, seed=8),
    ]
    tokens = inputs(12 + 293 + 3, heads, widths, dtype)
    run_and_check(pages, decodes, prefills, tokens, scale, BOUND[dtype])


def test_heads_before_tokens() -> None:
    """Put heads before tokens, as rotary embeddings do: the distance of heads grows with the batch."""
    pages = Pages(2, (16, 24), torch.float32)
    tokens = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs(81, (4, 2), (16, 24), torch.float32)]
    rows = [pages.row(40, 2, decode=True), pages.row(127, 2, decode=True)]
    run_and_check(pages, rows, [pages.row(3, 70, seed=1)], tokens, None, BOUND[torch.float32])


def test_a_row_does_not_depend_on_its_batch() -> None:
    heads, widths = (4, 2), (16, 16)
    pages = Pages(2, widths, torch.float32)
    rows = [pages.row(0, 90, seed=1), pages.row(50, 20, seed=2), pages.row(0, 33, seed=3), pages.row(200, 64, seed=4)]
    q, k, v = inputs(sum(row.length for row in rows), heads, widths, torch.float32)
    together = paged_attention(q, k, v, pages.keys, pages.values, pages.indices([], rows, len(q)))
    bounds = [*row_starts([], rows), len(q)]
    for row, (start, stop) in zip(rows, pairwise(bounds), strict=True):
        alone = paged_attention(
            q[start:stop],
            k[start:stop],
            v[start:stop],
            pages.keys,
            pages.values,
            pages.indices([], [row], stop - start),
        )
        assert_bitwise(together[start:stop], alone)


def test_a_long_prompt_in_blocks_of_queries() -> None:
    """Take more queries than the op handles at once, after a context."""
    heads, widths = (2, 1), (16, 16)
    pages = Pages(1, widths, torch.float32, block_size=64)
    row = pages.row(100, 2300)
    q, k, v = inputs(row.length, heads, widths, torch.float32)
    y = paged_attention(q, k, v, pages.keys, pages.values, pages.indices([], [row], len(q)))
    keys, values = (pool[list(row.pages)].flatten(0, 1)[:2400] for pool in (pages.keys, pages.values))
    for start in (0, 1000, 2000, 2290):
        wanted = oracle(q[start : start + 10], keys, values, range(100 + start, 110 + start), 0.25)
        torch.testing.assert_close(y[start : start + 10].double(), wanted, atol=1e-5, rtol=1e-5)


def test_errors() -> None:
    pages = Pages(2, (16, 16), torch.float32)
    row = pages.row(0, 4)
    indices = pages.indices([], [row], 4)
    q, k, v = inputs(4, (4, 2), (16, 16), torch.float32)
    good: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "key_pages": pages.keys,
        "value_pages": pages.values,
        "indices": indices,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"q": q[:3]}, "q has 3 tokens, but the indices were made for 4"),
        ({"q": q[:, :3]}, "3 query heads cannot share 2 key heads"),
        ({"k": k[..., :8]}, r"k has shape \[4, 2, 8\]"),
        ({"v": v[0]}, r"v has shape \[2, 16\], but it must be \[F, HKV, DV\]"),
        ({"value_pages": pages.values[:4]}, "value_pages has shape"),
        ({"key_pages": pages.keys[..., :8]}, "key_pages has shape"),
        ({"scale": 0.0}, "scale is 0.0, but it must be positive"),
        ({"indices": StateIndices.from_arrays(plan_arrays([], [row]), "cpu")}, "The indices lack positions"),
    ]
    for change, message in cases:
        with pytest.raises(ValueError, match=message):
            paged_attention(**(good | change))
