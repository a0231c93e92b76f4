"""Share Gluon code.

The interpreter does not run it.

Consecutive launches overlap. The first clears its flags before the second may begin. A flag is set when a task's stores
are visible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...device import is_hopper
from . import chunks, layout, prefetch
from .chunks import CHUNK
from .structs import aggregate

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared  # Triton 3.6
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def served(tensors: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> bool:
    """Return whether activations are on a Hopper, bf16 and aligned to 16 bytes."""
    if not is_hopper(tensors[0].get_device()):
        return False
    aligned = all(x.dtype == torch.bfloat16 and x.data_ptr() % 16 == 0 for x in tensors)
    return aligned and not any(stride % 8 for each in strides for stride in each[:-1])


@gluon.constexpr_function
def by_fours(rows, columns, warps):
    """Return a layout with four neighbours a thread; products give two."""
    registers = [[0, 1], [0, 2], [8, 0]] + [[0, bit] for bit in (16, 32, 64) if bit < columns]
    groups = [[bit, 0] for bit in (16, 32, 64) if bit < 16 * warps]
    return gl.DistributedLinearLayout(registers, [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]], groups, [], [rows, columns])


@gluon.jit
def wide(x):
    code: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return gl.inline_asm_elementwise(code, "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def narrow(x):
    """Convert to bf16 in pairs, even after a choice."""
    code: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(code, "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(tile, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return tile.reinterpret(DTYPE, SHAPE, LAYOUT)
else:  # Triton 3.6

    @gluon.jit
    def reinterpret(tile, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return tile._reinterpret(DTYPE, SHAPE, LAYOUT)


prefill_row = gluon.jit(chunks.prefill_row.fn)
tokens_of_chunk = gluon.jit(chunks.tokens_of_chunk.fn)
slot_elements = gluon.jit(layout.slot_elements.fn)
later_tile = gluon.jit(prefetch.later_tile.fn)


@aggregate
class Chunks:
    query_start_loc: gl.tensor
    chunk_start: gl.tensor
    seq_chunk_start: gl.tensor
    num_prefills: gl.tensor
    num_chunks: gl.tensor


@gluon.jit
def ends_of_prefills(chunks):
    end = gl.load(chunks.seq_chunk_start + chunks.num_prefills)
    return end, gl.load(chunks.query_start_loc + chunks.num_prefills)


@gluon.jit
def starts_of_task(task, chunks, HEADS: gl.constexpr, BACKWARDS: gl.constexpr):
    chunk = gl.minimum(task // HEADS, chunks.num_chunks - 1)
    if BACKWARDS:
        chunk = chunks.num_chunks - 1 - chunk
    start = gl.load(chunks.chunk_start + chunk)
    return chunk, start, gl.load(chunks.chunk_start + gl.minimum(chunk + 1, chunks.num_chunks - 1))


@gluon.jit
def tokens_between(task, starts, ends, num_chunks, HEADS: gl.constexpr):
    chunk, start, following = starts
    filled_chunks, last_end = ends
    there = task < num_chunks * HEADS
    end = gl.where(chunk + 1 < filled_chunks, following, last_end)
    count = gl.where((chunk < filled_chunks) & there, end - start, 0)
    head = task % HEADS
    return start.to(gl.int64), count, head, chunk * HEADS + head


@gluon.jit
def tokens_of_task(task, chunks, HEADS: gl.constexpr, BACKWARDS: gl.constexpr):
    """Return first token, token count (0 beyond the last task), head, and place."""
    ends = ends_of_prefills(chunks)
    starts = starts_of_task(task, chunks, HEADS, BACKWARDS)
    return tokens_between(task, starts, ends, chunks.num_chunks, HEADS)


@gluon.jit
def copy_tile(tile, place, STRIDE: gl.constexpr, count, columns, LOWER: gl.constexpr = False):
    """Begin to copy a chunk; lines from `count` and columns from `columns` on become zeros.

    LOWER also clears groups of 8 columns right of the diagonal.
    """
    LANES: gl.constexpr = tile.shape[1] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, tile.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    mask = (row < count) & (column < columns)
    if LOWER:
        mask = mask & (column // 8 <= row // 8)
    copy_async(tile, place + (row * STRIDE + column), mask=mask)  # 32-bit offsets


@aggregate
class Outputs:
    out: gl.tensor
    rows: gl.tensor
    STRIDE: gl.constexpr
    LAYOUT: gl.constexpr


@gluon.jit
def store_outputs(outputs, tile, o, t, count):
    """Store o^T through shared memory [64, BLOCK_V]."""
    STRIDE: gl.constexpr = outputs.STRIDE
    LAYOUT: gl.constexpr = outputs.LAYOUT
    tile.permute((1, 0)).store(o)
    step = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))[None, :]
    o = tile.load(LAYOUT).to(outputs.out.dtype.element_ty)
    mask = (step < count) & (row < outputs.rows)
    gl.store(outputs.out + t.to(gl.int64) * STRIDE + (step * STRIDE + row), o, mask=mask)


@gluon.jit
def clear_padding(outputs, end, num_tokens, BLOCK_ROWS: gl.constexpr):
    """Clear tokens from `end` on, then wait for the launch before, or the next could begin early."""
    STRIDE: gl.constexpr = outputs.STRIDE
    LAYOUT: gl.constexpr = outputs.LAYOUT
    step = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    zeros = gl.zeros([CHUNK, BLOCK_ROWS], outputs.out.dtype.element_ty, layout=LAYOUT)
    for first in range(end, num_tokens, CHUNK):
        place = outputs.out + gl.cast(first, gl.int64) * STRIDE + (step * STRIDE + row)
        gl.store(place, zeros, mask=(first + step < num_tokens) & (row < outputs.rows))
    wait_for_launch()


@gluon.constexpr_function
def _power_of_2(count):
    return 1 << (count - 1).bit_length()


@gluon.jit
def prefetch_states(state, COUNT: gl.constexpr):
    """Prefetch line by line: a bulk would delay later loads."""
    LINE: gl.constexpr = 1024 // state.dtype.element_ty.primitive_bitwidth
    LINES: gl.constexpr = (COUNT + LINE - 1) // LINE
    line = gl.arange(0, _power_of_2(LINES), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    place = (state + gl.minimum(line, LINES - 1) * LINE).to(gl.int64, bitcast=True)
    code: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_launch():
    code: gl.constexpr = "griddepcontrol.wait; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def clear_flags(flags, tasks):
    """Clear this program's flags; then the next launch may begin."""
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    step = gl.arange(0, 32 * WARPS, layout=layout) * gl.num_programs(0)
    for first in range(gl.program_id(0), tasks, gl.num_programs(0) * (32 * WARPS)):
        gl.store(flags + first + step, gl.zeros([32 * WARPS], gl.int32, layout=layout), mask=first + step < tasks)
    code: gl.constexpr = "fence.acq_rel.gpu; bar.sync 0; griddepcontrol.launch_dependents; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def set_flag(flag):
    """Publish this program's stores."""
    barrier()
    gl.atomic_xchg(flag, 1, sem="release")


@gluon.jit
def wait_for_flags(flags, stride, task, end, ready):
    """Wait for `task` if before `end` and not before `ready`. Return the first later task that may not be done.

    Each warp waits, since it copies for itself.
    """
    code: gl.constexpr = """
    {
    .reg .pred done, there, set;
    .reg .b32 lane, flag, votes, left;
    .reg .b64 place, offset;
    mov.b32 $0, $4;
    setp.lt.s32 done, $2, $4;
    @done bra.uni END;
    sub.s32 left, $3, $2;
    mov.u32 lane, %laneid;
    setp.lt.s32 there, lane, left;
    mul.wide.s32 offset, lane, $5;
    add.s64 place, $1, offset;
    AGAIN:
    mov.b32 flag, 1;
    @there ld.acquire.gpu.global.b32 flag, [place];
    setp.ne.s32 set, flag, 0;
    vote.sync.ballot.b32 votes, set, 0xffffffff;
    and.b32 flag, votes, 1;
    setp.eq.s32 set, flag, 0;
    @set bra.uni AGAIN;
    not.b32 votes, votes;
    brev.b32 votes, votes;
    clz.b32 votes, votes;
    add.s32 $0, $2, votes;
    END:
    }
    """
    place = (flags + task * stride).to(gl.int64, bitcast=True)
    arguments = [place, task, end, ready, stride * 4]
    return gl.inline_asm_elementwise(code, "=&r,l,r,r,r,r,~{memory}", arguments, dtype=gl.int32, is_pure=False, pack=1)
