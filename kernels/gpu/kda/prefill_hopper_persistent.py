"""Run the second launch in Gluon, one program per processor, with the same bits as `prefill_hopper_scan`.

Programs claim turns, a tile each, since processors finish the first launch at different times. While chunk n is
computed, chunk n + 2 is copied, also across turns. Turns may have one chunk each, so they are claimed two ahead. Rows
without chunks come last, so no turn is skipped.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..common.chunks import CHUNK, ROW_FIELDS, SRC_FIELD
from ..common.hopper import (
    Outputs,
    by_fours,
    clear_padding,
    prefetch_states,
    slot_elements,
    store_outputs,
    wait_for_flags,
)
from ..common.launch import Launcher
from ..common.structs import aggregate
from .prefill_hopper_scan import (
    LAST_STAGES,
    Chunk,
    Scratch,
    Shape,
    allocate_stages,
    copy_first,
    copy_last,
    first_products,
    last_products,
)

STAGES = gl.constexpr(3)  # as many turns are claimed
MIN_TURNS = 8  # per program: with fewer, some may get none


@aggregate
class Plan:
    v: gl.tensor
    scratch: Scratch
    totals: gl.tensor
    flags: gl.tensor
    rows: gl.tensor
    num_turns: gl.tensor
    num_tokens: gl.tensor


@aggregate
class Row:
    """Hold a part of `PrefillRow`."""

    start: gl.tensor
    end: gl.tensor
    origin: gl.tensor
    first_chunk: gl.tensor
    last_chunk: gl.tensor


@aggregate
class Ahead:
    """Hold the chunk copied last. From chunk `ready` on, scratch may not be ready."""

    turn: gl.tensor
    row: Row
    chunk: gl.tensor
    ready: gl.tensor


@gluon.jit
def _tile(turn, shape):
    """Return a turn's head and first line."""
    TILES: gl.constexpr = (shape.V + shape.BLOCK_V - 1) // shape.BLOCK_V
    return turn % (shape.HEADS * TILES) // TILES, turn % TILES * shape.BLOCK_V


@gluon.jit
def _fields(plan, turn, shape):
    TILES: gl.constexpr = (shape.V + shape.BLOCK_V - 1) // shape.BLOCK_V
    return plan.rows + gl.minimum(turn, plan.num_turns - 1) // (shape.HEADS * TILES) * ROW_FIELDS


@gluon.jit
def _row(plan, turn, shape):
    """Return a turn's row; no chunks past the last turn."""
    fields = _fields(plan, turn, shape)
    start, end, context = gl.load(fields), gl.load(fields + 1), gl.load(fields + 2)
    first, last = gl.load(fields + 3), gl.load(fields + 4)
    return Row(start, end, start - context % CHUNK, first, gl.where(turn < plan.num_turns, last, first))


@gluon.jit
def _tokens(row, chunk):
    """Return a chunk's first token and token count, 0 past the last chunk."""
    boundary = row.origin + (chunk - row.first_chunk) * CHUNK
    t = gl.maximum(boundary, row.start)
    return t.to(gl.int64), gl.where(chunk < row.last_chunk, gl.minimum(boundary + CHUNK, row.end) - t, 0)


@gluon.jit
def _copy_ahead(stages, stage, plan, ahead, next_turn, shape):
    """Copy the chunk after `ahead`; return its `Ahead`."""
    turn, row, chunk, ready = ahead.turn, ahead.row, ahead.chunk, ahead.ready
    chunk += 1
    if chunk >= row.last_chunk:
        turn, row = next_turn, _row(plan, next_turn, shape)
        chunk, ready = row.first_chunk, row.first_chunk
    head, first_row = _tile(turn, shape)
    ready = wait_for_flags(plan.flags + head, shape.HEADS, chunk, row.last_chunk, ready)
    t, count = _tokens(row, chunk)
    v = plan.v + (head * shape.V_STRIDES[1] + first_row)
    copy_first(stages, stage, plan.scratch, v, Chunk(t, head * plan.num_tokens + t, count), shape.V - first_row, shape)
    return Ahead(turn, row, chunk, ready)


@gluon.jit
def _copy_last_of(stages, stage, plan, row, chunk, head, shape):
    t, count = _tokens(row, chunk)
    totals = plan.totals + head * shape.K
    copy_last(stages, stage, plan.scratch, totals, chunk, Chunk(t, head * plan.num_tokens + t, count), shape)


@gluon.jit
def _state_of(state, slot_stride, plan, turn, shape):
    """Point to a turn's tile, and return its lines to read: 0 without a state."""
    slot = gl.load(_fields(plan, turn, shape) + SRC_FIELD)
    head, first_row = _tile(turn, shape)
    there = gl.where((slot != 0) & (turn < plan.num_turns), shape.V - first_row, 0)
    return state + slot * slot_stride + (head * shape.V + first_row) * shape.K, there


@gluon.jit(do_not_specialize=["num_prefills", "slot_stride", "num_tokens"])
def _kda_persistent_scan_kernel(
    v,
    tiles,
    operands,
    totals,
    state,
    out,
    flags,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    HEADS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
    V_STRIDES: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
):
    TILES: gl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    TILES_OF_ROW: gl.constexpr = HEADS * TILES
    WARPS: gl.constexpr = BLOCK_V // 16
    STATE: gl.constexpr = state.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    CARRIED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    FOURS: gl.constexpr = by_fours(BLOCK_V, BLOCK_K, WARPS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [WARPS, 1], [1, 0])
    stages = allocate_stages(STAGES, BLOCK_K, BLOCK_V)
    shape = Shape(HEADS, K, V, BLOCK_V, V_STRIDES)
    num_turns = num_prefills * TILES_OF_ROW
    slot_stride = slot_elements(slot_stride, state)
    state_row = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, FOURS))[:, None]
    channel = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, FOURS))[None, :]
    wide_tokens = gl.cast(num_tokens, gl.int64)
    size = wide_tokens * (HEADS * K)
    scratch = Scratch(operands, operands + size, operands + 2 * size, tiles, tiles + wide_tokens * (HEADS * CHUNK))

    claimed, flags = flags, flags + 1
    turn = gl.atomic_add(claimed, 3, sem="relaxed")
    next_turn, later_turn = turn + 1, turn + 2
    plan = Plan(v, scratch, totals, flags, rows, num_turns, wide_tokens)
    row = _row(plan, turn, shape)
    ahead = Ahead(turn, row, row.first_chunk - 1, row.first_chunk)
    for i in gl.static_range(STAGES - 1):
        ahead = _copy_ahead(stages, i, plan, ahead, next_turn, shape)
        if i == 0:
            _copy_last_of(stages, 0, plan, row, row.first_chunk, _tile(turn, shape)[0], shape)
    first_state, there = _state_of(state, slot_stride, plan, turn, shape)
    loaded = gl.load(first_state + state_row * K + channel, mask=(state_row < there) & (channel < K), other=0)
    zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, layout=PRODUCT)
    last_o, last_out, last_t, last_count, last_rows = zeros.to(gl.bfloat16), out, row.start.to(gl.int64), 0, 0
    done = 0
    while turn < num_turns:
        head, first_row = _tile(turn, shape)
        state_of_head = state + (head * V + first_row) * K
        inside = (state_row < V - first_row) & (channel < K)
        next_row = _row(plan, next_turn, shape)
        if V % BLOCK_V == 0 and BLOCK_K == K:
            source, rows_there = _state_of(state, slot_stride, plan, next_turn, shape)
            prefetch_states(source, BLOCK_V * K)
        S = gl.convert_layout(loaded, CARRIED).to(gl.float32)
        dst = 0
        for chunk in range(row.first_chunk, row.last_chunk):
            dst = gl.load(chunk_dst + chunk)
            stage, last_stage = done % STAGES, done % LAST_STAGES
            free = (done + STAGES - 1) % STAGES
            done += 1
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            products = first_products(S, stages, stage, zeros)

            after, after_row, after_head = chunk + 1, row, head
            if after == row.last_chunk:
                after, after_row = next_row.first_chunk, next_row
                after_head = _tile(next_turn, shape)[0]
            _copy_last_of(stages, done % LAST_STAGES, plan, after_row, after, after_head, shape)
            outputs = Outputs(last_out, last_rows, OUT_STRIDE, OUT)
            store_outputs(outputs, stages.v.index(free), last_o, last_t, last_count)
            last_out, last_rows = out + (head * V + first_row), V - first_row
            last_t, last_count = _tokens(row, chunk)

            S, o = last_products(S, products, stages, stage, last_stage, zeros)
            follows = gl.where(ahead.turn == turn, next_turn, later_turn)
            ahead = _copy_ahead(stages, free, plan, ahead, follows, shape)
            S, o = warpgroup_mma_wait(0, deps=[S, o])
            last_o = o.to(gl.bfloat16)
            if STATE != gl.float32:
                S = S.to(STATE).to(gl.float32)
            if (dst != 0) & (chunk + 1 < row.last_chunk):
                stored = gl.convert_layout(S.to(STATE), FOURS)
                gl.store(state_of_head + dst * slot_stride + state_row * K + channel, stored, mask=inside)
        # The load would wait for the store of the last state.
        source, rows_there = _state_of(state, slot_stride, plan, next_turn, shape)
        loaded = gl.load(source + state_row * K + channel, mask=(state_row < rows_there) & (channel < K), other=0)
        if dst != 0:
            stored = gl.convert_layout(S.to(STATE), FOURS)
            gl.store(state_of_head + dst * slot_stride + state_row * K + channel, stored, mask=inside)
        turn, row = next_turn, next_row
        next_turn, later_turn = later_turn, gl.atomic_add(claimed, 1, sem="relaxed")
    async_copy.wait_group(0)
    last = stages.v.index((done + STAGES - 1) % STAGES)
    store_outputs(Outputs(last_out, last_rows, OUT_STRIDE, OUT), last, last_o, last_t, last_count)
    end = gl.load(query_start_loc + num_prefills)
    for index in range(gl.program_id(0), TILES_OF_ROW, gl.num_programs(0)):
        first_row = index % TILES * BLOCK_V
        padded = Outputs(out + (index // TILES * V + first_row), V - first_row, OUT_STRIDE, OUT)
        clear_padding(padded, end, num_tokens, BLOCK_V)


persistent_scan = Launcher(_kda_persistent_scan_kernel)
