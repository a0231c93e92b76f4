"""Run the second launch of prefill in Gluon, one program per processor, with the same bits as `scan`.

Programs claim turns, a tile each, since processors finish the first launch at very different times.

While chunk n is computed, chunk n + 2 is copied, also across turns. Turns may have one chunk each, so they are claimed
two ahead. Batch rows without chunks come last (`StateIndices.prefill_rows`), so no turn is skipped.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from ..common.chunks import CHUNK, ROW_FIELDS, SRC_FIELD
from ..common.hopper import Outputs, by_fours, clear_padding, prefetch_states, store_outputs, wait_for_flags
from ..common.launch import Launcher
from ..common.layout import SLOT_UNIT
from .scan import LAST_STAGES, copy_first, copy_last, first_products, last_products, shared_tiles

STAGES = gl.constexpr(3)  # as many turns are claimed


@gluon.jit
def _tile(turn, TILES_OF_ROW: gl.constexpr, TILES: gl.constexpr, BLOCK_V: gl.constexpr):
    return turn % TILES_OF_ROW // TILES, turn % TILES * BLOCK_V


@gluon.jit
def _row(rows, turn, num_turns, TILES_OF_ROW: gl.constexpr):
    """Return a turn's start, end, origin, first chunk and end of chunks; no chunks past the last turn."""
    fields = rows + gl.minimum(turn, num_turns - 1) // TILES_OF_ROW * ROW_FIELDS
    start, end, context = gl.load(fields), gl.load(fields + 1), gl.load(fields + 2)
    first, last = gl.load(fields + 3), gl.load(fields + 4)
    return start, end, start - context % CHUNK, first, gl.where(turn < num_turns, last, first)


@gluon.jit
def _tokens(row, chunk):
    """Return a chunk's first token and number of tokens: 0 past the last chunk."""
    start, end, origin, first, last = row
    boundary = origin + (chunk - first) * CHUNK
    t = gl.maximum(boundary, start)
    return t.to(gl.int64), gl.where(chunk < last, gl.minimum(boundary + CHUNK, end) - t, 0)


@gluon.jit
def _copy_ahead(
    copies,
    stage,
    sources,
    plan,
    ahead,
    next_turn,
    V_STRIDES: gl.constexpr,
    HEADS: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
):
    """Run `copy_first` for the chunk after `ahead`, and return this chunk's `ahead`.

    `ahead` is a turn, its batch row, a chunk, and the first chunk that may not be ready.
    """
    TILES: gl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    TILES_OF_ROW: gl.constexpr = HEADS * TILES
    flags, rows, num_turns, wide_tokens = plan
    turn, row, chunk, ready = ahead
    chunk += 1
    if chunk >= row[4]:
        turn, row = next_turn, _row(rows, next_turn, num_turns, TILES_OF_ROW)
        chunk, ready = row[3], row[3]
    head, first_row = _tile(turn, TILES_OF_ROW, TILES, BLOCK_V)
    k_in, v, inverse = sources
    ready = wait_for_flags(flags + head, HEADS, chunk, row[4], ready)
    t, count = _tokens(row, chunk)
    sources_of_head = k_in, v + (head * V_STRIDES[1] + first_row), inverse
    first = head * wide_tokens + t
    copy_first(copies, stage, sources_of_head, first, t, count, V - first_row, V_STRIDES[0], K, BLOCK_V // 16)
    return turn, row, chunk, ready


@gluon.jit
def _copy_last_of(
    copies, stage, sources, row, chunk, head, wide_tokens, HEADS: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr
):
    q_in, k_out, scores, totals = sources
    t, count = _tokens(row, chunk)
    sources_of_head = q_in, k_out, scores, totals + head * K
    copy_last(copies, stage, sources_of_head, head * wide_tokens + t, count, chunk, HEADS, K, WARPS)


@gluon.jit
def _state_of(
    state,
    rows,
    turn,
    num_turns,
    slot_stride,
    TILES_OF_ROW: gl.constexpr,
    TILES: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_V: gl.constexpr,
):
    """Return a pointer to a turn's tile, and its lines to read: 0 without a state."""
    slot = gl.load(rows + gl.minimum(turn, num_turns - 1) // TILES_OF_ROW * ROW_FIELDS + SRC_FIELD)
    head, first_row = _tile(turn, TILES_OF_ROW, TILES, BLOCK_V)
    there = gl.where((slot != 0) & (turn < num_turns), V - first_row, 0)
    return state + slot * slot_stride + (head * V + first_row) * K, there


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
    V_STRIDES: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCK_V: gl.constexpr,
):
    TILES: gl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    TILES_OF_ROW: gl.constexpr = HEADS * TILES
    WARPS: gl.constexpr = BLOCK_V // 16
    STATE: gl.constexpr = state.dtype.element_ty
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    CARRIED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_K, 16])
    FOURS: gl.constexpr = by_fours(BLOCK_V, BLOCK_K, WARPS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_V, BLOCK_V // 8], [WARPS, 1], [1, 0])
    first_copies, last_copies = shared_tiles(STAGES, BLOCK_K, BLOCK_V)
    v_tiles, inverses = first_copies[1], first_copies[2]
    num_turns = num_prefills * TILES_OF_ROW
    slot_stride = gl.cast(slot_stride, gl.int64) * (SLOT_UNIT * 8 // STATE.primitive_bitwidth)
    state_row = gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, FOURS))[:, None]
    channel = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, FOURS))[None, :]
    wide_tokens = gl.cast(num_tokens, gl.int64)
    size = wide_tokens * (HEADS * K)
    first_sources = operands, v, tiles
    last_sources = operands + size, operands + 2 * size, tiles + wide_tokens * (HEADS * CHUNK), totals

    claimed, flags = flags, flags + 1
    turn = gl.atomic_add(claimed, 3, sem="relaxed")
    next_turn, later_turn = turn + 1, turn + 2
    row = _row(rows, turn, num_turns, TILES_OF_ROW)
    ahead = turn, row, row[3] - 1, row[3]
    plan = flags, rows, num_turns, wide_tokens
    for i in gl.static_range(STAGES - 1):
        ahead = _copy_ahead(first_copies, i, first_sources, plan, ahead, next_turn, V_STRIDES, HEADS, K, V, BLOCK_V)
        if i == 0:
            first_head = _tile(turn, TILES_OF_ROW, TILES, BLOCK_V)[0]
            _copy_last_of(last_copies, 0, last_sources, row, row[3], first_head, wide_tokens, HEADS, K, WARPS)
    first_state, there = _state_of(state, rows, turn, num_turns, slot_stride, TILES_OF_ROW, TILES, K, V, BLOCK_V)
    loaded = gl.load(first_state + state_row * K + channel, mask=(state_row < there) & (channel < K), other=0)
    zeros = gl.zeros([BLOCK_V, CHUNK], gl.float32, layout=PRODUCT)
    last_o, last_out, last_t, last_count, last_rows = zeros.to(gl.bfloat16), out, row[0].to(gl.int64), 0, 0
    done = 0
    while turn < num_turns:
        head, first_row = _tile(turn, TILES_OF_ROW, TILES, BLOCK_V)
        state_of_head = state + (head * V + first_row) * K
        inside = (state_row < V - first_row) & (channel < K)
        next_row = _row(rows, next_turn, num_turns, TILES_OF_ROW)
        if V % BLOCK_V == 0 and BLOCK_K == K:
            source, rows_there = _state_of(
                state, rows, next_turn, num_turns, slot_stride, TILES_OF_ROW, TILES, K, V, BLOCK_V
            )
            prefetch_states(source, BLOCK_V * K)
        S = gl.convert_layout(loaded, CARRIED).to(gl.float32)
        dst = 0
        for chunk in range(row[3], row[4]):
            dst = gl.load(chunk_dst + chunk)
            stage, last_stage = done % STAGES, done % LAST_STAGES
            free = (done + STAGES - 1) % STAGES
            done += 1
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            products = first_products(S, first_copies, stage, zeros)

            after, after_row, after_head = chunk + 1, row, head
            if after == row[4]:
                after, after_row = next_row[3], next_row
                after_head = _tile(next_turn, TILES_OF_ROW, TILES, BLOCK_V)[0]
            last_free = done % LAST_STAGES
            _copy_last_of(
                last_copies, last_free, last_sources, after_row, after, after_head, wide_tokens, HEADS, K, WARPS
            )
            outputs = Outputs(last_out, last_rows, OUT_STRIDE, OUT)
            store_outputs(outputs, v_tiles.index(free), last_o, last_t, last_count)
            last_out, last_rows = out + (head * V + first_row), V - first_row
            last_t, last_count = _tokens(row, chunk)

            S, o = last_products(S, products, inverses.index(stage), last_copies, last_stage, zeros)
            follows = gl.where(ahead[0] == turn, next_turn, later_turn)
            ahead = _copy_ahead(
                first_copies, free, first_sources, plan, ahead, follows, V_STRIDES, HEADS, K, V, BLOCK_V
            )
            S, o = warpgroup_mma_wait(0, deps=[S, o])
            last_o = o.to(gl.bfloat16)
            if STATE != gl.float32:
                S = S.to(STATE).to(gl.float32)
            if (dst != 0) & (chunk + 1 < row[4]):
                stored = gl.convert_layout(S.to(STATE), FOURS)
                gl.store(state_of_head + dst * slot_stride + state_row * K + channel, stored, mask=inside)
        # Load before the last state is stored: the load would wait for the store.
        source, rows_there = _state_of(
            state, rows, next_turn, num_turns, slot_stride, TILES_OF_ROW, TILES, K, V, BLOCK_V
        )
        loaded = gl.load(source + state_row * K + channel, mask=(state_row < rows_there) & (channel < K), other=0)
        if dst != 0:
            stored = gl.convert_layout(S.to(STATE), FOURS)
            gl.store(state_of_head + dst * slot_stride + state_row * K + channel, stored, mask=inside)
        turn, row = next_turn, next_row
        next_turn, later_turn = later_turn, gl.atomic_add(claimed, 1, sem="relaxed")
    async_copy.wait_group(0)
    last = v_tiles.index((done + STAGES - 1) % STAGES)
    store_outputs(Outputs(last_out, last_rows, OUT_STRIDE, OUT), last, last_o, last_t, last_count)
    end = gl.load(query_start_loc + num_prefills)
    for index in range(gl.program_id(0), TILES_OF_ROW, gl.num_programs(0)):
        first_row = index % TILES * BLOCK_V
        padded = Outputs(out + (index // TILES * V + first_row), V - first_row, OUT_STRIDE, OUT)
        clear_padding(padded, end, num_tokens, BLOCK_V)


persistent_scan = Launcher(_kda_persistent_scan_kernel)
