"""What decode over a token log shares.

With G_i, the sum of the log2 decays from the log's first entry up to entry i, the state behind n entries is
exp2(G_n) S + sum_i exp2(G_n - G_i) u_i k_i^T. Two launches: in the first one some programs take what is of keys alone,
log the new tokens', and leave what the states are to meet and what the entries weigh; the others go through the states
once and store none. The second launch folds the rows that have a dst. What a token gives depends on its entry and on
what stands before it alone, however tokens are cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from mambacache.plan import FOLD

from ...device import processors
from ...indices import ARRIVALS_WIDTH
from .delta_rule import dot
from .layout import slot_elements
from .prefetch import INTERPRETED, prefetch

WINDOW = tl.constexpr(FOLD)
ARRIVALS_STRIDE = tl.constexpr(ARRIVALS_WIDTH)
LEAST_DECAY = tl.constexpr(-34.6)  # of one token, in log2: beyond it differences of sums would lose their last bits
LEAST_WIDTH = 64
"""Of keys. With one channel a thread its own product is fused into the first sum with another thread's, which rounds
otherwise in each of both: then steps of other lengths would give other bits."""
ROWS, PROGRAM_TILES = 16, 4  # rows of a state that a program of decode takes at once, and how often at most
REGISTERS = 1 << 16  # of a processor, which hold so many programs of decode at once
FOLD_PROGRAMS = 1056
FOLD_SHARE = 4  # of the rows one of so many has programs of its own to be folded: of 16 about one is in each step
FOLD_FIELDS = tl.constexpr(5)  # of a row in `StateIndices.folds`

# Index arrays as the kernels take them.
DECODE_ARRAYS = "decode_src", "decode_dst", "decode_len", "log_slot", "log_start", "log_end", "depths", "arrivals"
FOLD_ARRAYS = ("folds",)


def most_tiles(rows: int) -> int:
    """Of the tiles that make up so many rows of a state how many a program may take: a power of 2."""
    return min(rows // ROWS & -(rows // ROWS), PROGRAM_TILES)


def registers(columns: int) -> int:
    """Of a thread, for tiles of so many columns: with what little some take more than 128 half the programs run."""
    return 128 if columns <= 128 else 255


def tile_bits(rows: int, columns: int, states: int, device: int) -> int:
    """log2 of the tiles that a program takes of each of so many states: as few as let all programs run at once."""
    bits, programs = most_tiles(rows).bit_length() - 1, states * (rows // ROWS)
    room = REGISTERS // (32 * registers(columns)) * processors(device)
    return next((few for few in range(bits) if programs >> few <= room), bits)


def fold_shape(columns: int) -> tuple[int, int]:
    """Rows of a state that a program of the fold takes at once, and its warps: registers hold that much."""
    return (64, 4) if columns <= 128 else (32, 8)


def scratch(like: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """fp32 tensors of so many elements in one piece of memory: multiples of 4, so that each starts at 16 bytes."""
    return torch.empty(sum(sizes), dtype=torch.float32, device=like.device).split(list(sizes))


@triton.jit
def slot_of(log, slot, stride):
    """A row's slot of one tensor of the log; `stride` is that of `slot_stride`."""
    return log + slot * slot_elements(stride, log)


@triton.jit
def row_log(slots, starts, ends, row):
    """A row's slot, its log's first entry, and that of the step's first token."""
    return tl.load(slots + row).to(tl.int64), tl.load(starts + row), tl.load(ends + row)


@triton.jit
def depth_of(depths, token):
    """On how many tokens of its row a token follows."""
    return depths >> 4 * token & 15


@triton.jit
def parent_place(depths, token, end):
    """Where in a log the token stands that another one follows on: the last before it whose depth is less by one."""
    place = end - 1
    for earlier in range(token):
        place = tl.where(depth_of(depths, earlier) == depth_of(depths, token) - 1, end + earlier, place)
    return place


@triton.jit
def task_of_fold(folds, task, HEADS: tl.constexpr, TILES: tl.constexpr):
    """Of one of the HEADS * TILES tasks of each fold its head and tile, src, dst, slot, and first and last entry."""
    fields = folds + 1 + task // (HEADS * TILES) * FOLD_FIELDS
    source, target, slot = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2).to(tl.int64)
    return task // TILES % HEADS, task % TILES, source, target, slot, tl.load(fields + 3), tl.load(fields + 4) - 1


@triton.jit
def wait_for_previous_launch():
    """A launch that may begin before the previous one is done reads nothing of it until then, and is not done itself.

    So all its programs wait, those without work too. Decode waits for everything before it lets the fold begin, so that
    the fold may read at once what decode does not write.
    """
    if not INTERPRETED:
        gdc_wait()


@triton.jit
def next_launch_may_begin():
    if not INTERPRETED:
        gdc_launch_dependents()


@triton.jit
def _count(arrivals, last, ORDER: tl.constexpr):
    """Counts this program; after the last one comes 0 again, as the next launch needs it."""
    code: tl.constexpr = (
        """
    {
    .reg .pred first;
    mov.u32 $0, %tid.x;
    setp.eq.u32 first, $0, 0;
    @first red."""
        + ORDER
        + """.gpu.global.inc.u32 [$1], $2;
    }
    """
    )
    place = [arrivals.to(tl.int64, bitcast=True), last]
    tl.inline_asm_elementwise(code, "=&r,l,r,~{memory}", place, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def arrive(arrivals, PREPARING: tl.constexpr, waiting):
    """Of a row, one of the PREPARING programs: what it stored can be seen by the waiting ones once all have come."""
    if not INTERPRETED:
        tl.debug_barrier()
        _count(arrivals, PREPARING + waiting - 1, "release")


@triton.jit
def wait_for_arrivals(arrivals, PREPARING: tl.constexpr, waiting):
    """Programs of one warp start in their order: those that prepare a row run, or are done, when a later one waits."""
    if not INTERPRETED:
        code: tl.constexpr = """
        {
        .reg .pred missing;
        AGAIN:
        ld.acquire.gpu.global.u32 $0, [$1];
        setp.lt.u32 missing, $0, $2;
        @missing bra AGAIN;
        bar.warp.sync 0xffffffff;
        }
        """  # no lane may count while another one still looks
        place = [arrivals.to(tl.int64, bitcast=True), PREPARING]
        tl.inline_asm_elementwise(code, "=&r,l,r,~{memory}", place, dtype=tl.int32, is_pure=False, pack=1)
        _count(arrivals, PREPARING + waiting - 1, "relaxed")


@triton.jit
def tile_rows(BLOCK_ROWS: tl.constexpr):
    """The rows of a tile, [4, BLOCK_ROWS / 4]: a warp has 4 at once, and a thread neighbours, as entries store them."""
    SHARE: tl.constexpr = BLOCK_ROWS // 4
    return tl.arange(0, 4)[:, None] * SHARE + tl.arange(0, SHARE)[None, :]


@triton.jit
def tile_columns(BLOCK_COLUMNS: tl.constexpr):
    """The columns of a tile, [1, 1, BLOCK_COLUMNS / 32, 32].

    8 threads read a line of memory, of which each has 4 neighbours: of the sum over a row three steps of five are left
    to be exchanged, and what a row is multiplied with serves all of a thread's rows.
    """
    column = tl.arange(0, BLOCK_COLUMNS // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    return column[None, None]


@triton.jit
def load_state(place, mask, again):
    """Elements of a state in fp32, on their way out of the L2 cache unless the fold reads them again: what was
    prepared stays."""
    if again:
        S = tl.load(place, mask=mask, other=0)
    else:
        S = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
    return S.to(tl.float32)


@triton.jit
def for_rows(place, columns, mask):
    """What each of the rows is multiplied with, [4, 1, BLOCK_COLUMNS / 32, 32]."""
    SHAPE: tl.constexpr = [4, 1, columns.shape[2], 32]
    return tl.load(tl.broadcast_to(place + columns, SHAPE), mask=mask, other=0)


@triton.jit
def entry_scores(place):
    """[4, 1, 16]"""
    return tl.load(tl.broadcast_to(place + tl.arange(0, WINDOW)[None, None, :], [4, 1, WINDOW]))


@triton.jit
def prefetch_entries(log, start, end, STRIDE: tl.constexpr, SIZE: tl.constexpr):
    """Asks for SIZE elements of each entry of a row: loads of them would wait behind those of the state."""
    entry = tl.maximum(tl.minimum(tl.arange(0, WINDOW), end - 1), start)
    prefetch(log + (entry * STRIDE)[:, None], SIZE)


@triton.jit
def entry_values(log, start, end, value, STRIDE: tl.constexpr):
    """[4, rows / 4, 16] in fp32 from a log's entries, STRIDE elements apart; zeros for those that are not the row's."""
    entry = tl.arange(0, WINDOW)
    place = log + (entry * STRIDE)[None, None, :] + value[:, :, None]
    inside = (entry >= start) & (entry < end)
    return tl.load(place, mask=inside[None, None, :] & (value >= 0)[:, :, None], other=0).to(tl.float32)


@triton.jit
def row_sums(met, logged):
    """[4, rows / 4], from what the state gives of a row, [4, rows / 4, 32], and what its log's entries do: each thread
    first adds what it has of both."""
    SHARE: tl.constexpr = met.shape[1]
    met = tl.sum(tl.reshape(met, [4, SHARE, 8, 4]), axis=3)
    return tl.sum(met + tl.sum(tl.reshape(logged, [4, SHARE, 8, WINDOW // 8]), axis=3), axis=2)


@triton.jit
def fold_update(values, keys, acc):
    """acc + values [rows, 16] keys [16, columns], in fp32: bf16 keys are exact, values a sum of three parts."""
    if keys.dtype == tl.bfloat16:
        high = values.to(tl.bfloat16)
        rest = values - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return acc + tl.dot(high, keys, tl.dot(middle, keys, tl.dot(low, keys)))
    else:
        return dot(values, keys.to(tl.float32), acc)
