"""Check paged attention on a GPU: against float64, its launches and reads, and results equal in every bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import triton
from torch import Tensor

from gpu_cases import BF16, FP16, FP32
from kernel_cases import Row, assert_bitwise, row_starts
from mambacache.kernels import paged_attention
from test_gpu_launches import is_ours, launched
from test_kernels_out import check_out
from test_kernels_paged_attention import Pages, inputs, run_and_check

pytestmark = pytest.mark.gpu

BOUND = {
    BF16: 2.5e-3,
    FP16: 6e-4,
    FP32: 4e-6,
}  # relative RMS: a bit above the loss by rounded weights and outputs; 20,000 values cancel to a hundredth of one
MAX_LAUNCHES = 4  # the write of pages, decode, the sum of its splits, prefill


@dataclass(frozen=True)
class Shape:
    """Hold heads of queries and keys, widths of keys and values, and tokens of a page and of a decode row."""

    dtype: torch.dtype
    heads: tuple[int, int]
    widths: tuple[int, int]
    block_size: int
    width: int

    def pages(self, blocks: int) -> Pages:
        return Pages(self.heads[1], self.widths, self.dtype, self.block_size, blocks, "cuda")

    def inputs(self, tokens: int, seed: int = 0) -> list[Tensor]:
        return [x.cuda() for x in inputs(tokens, self.heads, self.widths, self.dtype, seed)]


# Few shapes, since a kernel takes seconds to compile; but every width, group and page size meets the others.
SHAPES = {
    "grouped": Shape(BF16, (8, 2), (128, 128), 64, 1),
    "grouped, drafts": Shape(BF16, (8, 2), (128, 128), 64, 5),
    "wide": Shape(BF16, (16, 2), (256, 256), 64, 1),
    "wide, drafts": Shape(BF16, (16, 2), (256, 256), 64, 8),
    "latent": Shape(BF16, (3, 3), (192, 128), 64, 2),
    "small pages": Shape(FP16, (8, 1), (64, 64), 16, 4),
    "narrow": Shape(FP16, (2, 2), (8, 8), 256, 3),
    "fp32": Shape(FP32, (4, 1), (80, 80), 16, 2),
    "fp32, wide": Shape(FP32, (4, 2), (256, 256), 64, 1),
}
CONTEXTS = (0, 1, 63, 64, 65, 1000, 20000)
LENGTHS = (200, 1, 64, 130, 63, 70, 3)  # of prefill rows after these contexts


@dataclass
class Batch:
    """Hold a row of each kind after every context, and padding rows, in pages full of NaN."""

    pages: Pages
    decodes: list[Row]
    prefills: list[Row]
    tokens: list[Tensor]

    def run(self) -> Tensor:
        return self.call()()

    def call(self) -> Callable[..., Tensor]:
        indices = self.pages.indices(self.decodes, self.prefills, len(self.tokens[0]))
        return lambda **options: paged_attention(*self.tokens, self.pages.keys, self.pages.values, indices, **options)


def batch_of(shape: Shape, contexts: Sequence[int] = CONTEXTS, padding: int = 5) -> Batch:
    """Make decode rows of one token, two tokens, and so on, up to the shape's width."""
    pages, width = shape.pages(50_000 // shape.block_size), shape.width
    decodes = [pages.row(n, 1 + i % width, decode=True, seed=i, width=width) for i, n in enumerate(contexts)]
    decodes.insert(3, Row(0))
    prefills = [pages.row(n, length, seed=10 + n) for n, length in zip(contexts, LENGTHS, strict=False)]
    prefills.insert(2, Row(0))
    tokens = len(decodes) * width + sum(row.length for row in prefills) + padding
    return Batch(pages, decodes, prefills, shape.inputs(tokens))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_accuracy(shape: Shape) -> None:
    """Check too that nothing but the slots of the batch's tokens is written."""
    batch = batch_of(shape)
    run_and_check(batch.pages, batch.decodes, batch.prefills, batch.tokens, None, BOUND[shape.dtype])


@pytest.mark.parametrize("width", range(1, 9))
def test_every_width_of_decode_rows(width: int) -> None:
    shape = Shape(BF16, (8, 2), (128, 128), 64, width)
    pages = shape.pages(200)
    rows = [pages.row(254 + i, 1 + i % width, decode=True, seed=i, width=width) for i in range(2 * width)]
    run_and_check(pages, [*rows, Row(0)], [], shape.inputs((2 * width + 1) * width + 4), None, BOUND[BF16])


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_does_not_depend_on_its_batch(shape: Shape) -> None:
    """A row does not depend on padding rows, or on the number of programs that share its splits."""
    batch = batch_of(shape)
    together = batch.run()
    starts = row_starts(batch.decodes, batch.prefills)
    for i, (row, start) in enumerate(zip([*batch.decodes, *batch.prefills], starts, strict=True)):
        if not row.length:
            continue
        count = row.width if i < len(batch.decodes) else row.length
        tokens = [x[start : start + count].clone() for x in batch.tokens]
        rows = ([row], []) if i < len(batch.decodes) else ([], [row])
        alone = Batch(batch.pages, *rows, tokens).run()
        assert_bitwise(together[start : start + count], alone)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_steps_that_end_at_multiples_of_64_equal_a_single_step(shape: Shape) -> None:
    pages, tokens = shape.pages(100), shape.inputs(500)
    row = pages.row(70, 500)
    whole = Batch(pages, [], [row], tokens).run()
    for stop in (58, 122, 314):
        first, second = Row(stop, context=70, pages=row.pages), Row(500 - stop, context=70 + stop, pages=row.pages)
        y = Batch(pages, [], [first], [x[:stop] for x in tokens]).run()
        assert_bitwise(torch.cat([y, Batch(pages, [], [second], [x[stop:] for x in tokens]).run()]), whole)


@pytest.mark.parametrize("kind", ["decode", "prefill", "mixed"])
def test_launches(kind: str) -> None:
    """All launches are of our kernels, and none waits for the device."""
    batch = batch_of(SHAPES["grouped"], padding=0)
    if kind == "decode":
        batch.prefills, batch.tokens = [], [x[: len(batch.decodes)] for x in batch.tokens]
    if kind == "prefill":
        batch.decodes, batch.tokens = [], [x[len(batch.decodes) :] for x in batch.tokens]
    call = batch.call()
    names = launched(call)
    assert len(names) == {"decode": 3, "prefill": 2, "mixed": MAX_LAUNCHES}[kind] and all(map(is_ours, names)), names
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_batch_compiles_for_its_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put heads before tokens, as rotary embeddings leave them. No result changes."""
    compiled: list[object] = []
    for padding in (0, 5):
        batch = batch_of(SHAPES["wide"], padding=padding)
        expected = batch.run()
        batch.tokens = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in batch.tokens]
        assert_bitwise(batch.run(), expected)
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **options: compiled.append(options))
    assert not compiled


def test_into_an_unaligned_out() -> None:
    check_out(batch_of(SHAPES["grouped"]).call(), gap=3)


@pytest.mark.parametrize("name", ["grouped", "wide, drafts"])
def test_a_replayed_graph_follows_its_indices(name: str) -> None:
    """A graph captured with short rows and padding rows gives, for other rows, their results without a graph."""
    shape = SHAPES[name]
    pages = shape.pages(1000)
    long = [pages.row(context, shape.width, decode=True, seed=context) for context in (300, 9000, 17000, 64)]
    short = [Row(0, width=row.width, pages=row.pages) for row in long]
    short[1] = Row(1, width=shape.width, pages=long[1].pages, context=7, kv_held=8)
    tokens = shape.inputs(4 * shape.width + 2)
    captured, other = (pages.indices(rows, [], len(tokens[0])) for rows in (short, long))

    def call() -> Tensor:
        return paged_attention(*tokens, pages.keys, pages.values, captured)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for target, source in ((captured, other), (captured, pages.indices(short, [], len(tokens[0])))):
        for key, value in vars(source).items():
            if isinstance(value, Tensor):
                getattr(target, key).copy_(value)
        graph.replay()
        assert_bitwise(y, paged_attention(*tokens, pages.keys, pages.values, source))
    assert y[shape.width].any() and not y[: shape.width].any()


@pytest.mark.xdist_group("memory")  # one at a time
def test_pages_beyond_two_billion_elements() -> None:
    shape = SHAPES["grouped"]
    blocks = (2**31 + 2**28) // (shape.block_size * shape.heads[1] * shape.widths[0])
    outputs = []
    for size in (20, blocks):
        pages = shape.pages(20)
        if size > 20:
            pages.keys, pages.values = (
                torch.full((size, *x.shape[1:]), torch.nan, dtype=BF16, device="cuda")
                for x in (pages.keys, pages.values)
            )
        pages._free = iter(range(size - 1, 0, -1))
        decodes, prefills = [pages.row(300, 1, decode=True, seed=1)], [pages.row(100, 150, seed=2)]
        outputs.append(Batch(pages, decodes, prefills, shape.inputs(151)).run())
    assert_bitwise(*outputs)
