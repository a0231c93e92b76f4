"""Implement `place_decodes` in one program, which counts folds."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..indices import StateIndices
from .common.launch import Launcher, index_pointers
from .common.log import FOLD_FIELDS, WINDOW

ROWS = 256  # per turn
KV_ARRAYS = "kv_slot", "kv_len", "block_table_start", "block_table"
ARRAYS = "decode_src", "decode_dst", "log_slot", "log_start", "log_end", "decode_len", "late_len", "depths", "folds"


@triton.jit(do_not_specialize=["num_rows", "tokens_per_decode", "stride"])
def _place_decodes_kernel(
    starts,
    positions,
    kv_slot,
    kv_len,
    block_table_start,
    block_table,
    src,
    dst,
    slots,
    log_start,
    log_end,
    lengths,
    late_len,
    depths,
    folds,
    num_rows,
    tokens_per_decode,
    stride,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
):
    num_folds = 0
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = row < num_rows
        length, most = tl.load(lengths + row, mask=mask, other=0), tl.load(late_len + row, mask=mask, other=0)
        source, target = tl.load(src + row, mask=mask, other=0), tl.load(dst + row, mask=mask, other=0)
        begin, known_end = tl.load(log_start + row, mask=mask, other=0), tl.load(log_end + row, mask=mask, other=0)
        start = tl.load(starts + row * stride, mask=length > 0, other=0).to(tl.int32)
        late, end = most > 0, tl.where(length > 0, start % WINDOW, known_end)
        passed = late & (end < known_end)
        source, begin = tl.where(passed, target, source), tl.where(passed, 0, begin)
        length = tl.where(late, tl.minimum(most, WINDOW - end), length)
        target = tl.where(passed | (late & (end + length < WINDOW)), 0, target)
        tl.store(src + row, source, mask=mask)
        tl.store(dst + row, target, mask=mask)
        tl.store(log_start + row, begin, mask=mask)
        tl.store(log_end + row, end, mask=mask)
        tl.store(lengths + row, length, mask=mask)
        depth = tl.load(depths + row, mask=mask, other=0)

        folded = (target != 0) & (length > 0)
        fields = folds + 1 + (num_folds + tl.cumsum(folded.to(tl.int32), 0) - 1) * FOLD_FIELDS
        tl.store(fields, source, mask=folded)
        tl.store(fields + 1, target, mask=folded)
        tl.store(fields + 2, tl.load(slots + row, mask=folded, other=0), mask=folded)
        tl.store(fields + 3, begin, mask=folded)
        tl.store(fields + 4, end + length, mask=folded)
        num_folds += tl.sum(folded.to(tl.int32), 0)
        for t in range(tokens_per_decode):
            token, position, real = row * tokens_per_decode + t, start + t, t < length
            if positions is not None:
                tl.store(positions + token, tl.where(real, start + (depth >> 4 * t & 15), 0), mask=mask)
            if PAGE:
                table = block_table + tl.load(block_table_start + row, mask=mask, other=0)
                page = tl.load(table + position // PAGE, mask=real, other=0)
                tl.store(kv_slot + token, tl.where(real, page * PAGE + position % PAGE, -1), mask=mask)
        if PAGE:
            tl.store(kv_len + row, tl.where(length > 0, start + length, 0), mask=mask)
    tl.store(folds, num_folds)


_launch = Launcher(_place_decodes_kernel)


def place_decodes(indices: StateIndices, starts: Tensor, block_size: int | None) -> None:
    """See `mambacache.kernels.place_decodes`."""
    _launch(
        1,
        (
            starts,
            getattr(indices, "positions", None),
            *[None if block_size is None else getattr(indices, name) for name in KV_ARRAYS],
        ),
        index_pointers(indices, ARRAYS),
        (indices.num_decodes, indices.tokens_per_decode, starts.stride(0)),
        {"PAGE": block_size or 0, "ROWS": ROWS},
        num_warps=8,
    )
