"""Run prefill for bf16 in one Gluon launch; only rounding differs from the Triton launches.

While a chunk's products are in flight, the next chunk's decays and scores are computed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..common.chunks import CHUNK, ROW_FIELDS, SRC_FIELD
from ..common.decays import LOG2_E
from ..common.hopper import Outputs, barrier, by_fours, clear_padding, prefetch_states, prefill_row
from ..common.launch import Launcher
from ..common.layout import SLOT_UNIT
from ..common.structs import aggregate
from .prefill_hopper_steps import (
    AT_ONCE,
    Rates,
    Vectors,
    chunk_at,
    copy_rows,
    load_steps,
    store_decays,
    vector_of,
    wait_for_copies,
)
from .prefill_triton import PREFETCH_CHUNKS, ROWS

WARPS = gl.constexpr(4)


@aggregate
class Tiles:
    """Hold stages of x, B and C in shared memory."""

    x: gl.shared_memory_descriptor
    B: gl.shared_memory_descriptor
    C: gl.shared_memory_descriptor


@aggregate
class Inputs:
    """Hold a head's x, B and C, and their strides and widths."""

    x: gl.tensor
    B: gl.tensor
    C: gl.tensor
    X_STRIDE: int
    B_STRIDE: int
    C_STRIDE: int
    lines: gl.tensor
    N: int


@gluon.jit
def _copy_chunk(tiles, stage, inputs, chunk):
    """Begin to copy a chunk; past the last chunk copies would store zeros."""
    t, count = chunk
    t = t.to(gl.int64)
    if count > 0:
        copy_rows(tiles.B.index(stage), inputs.B + t * inputs.B_STRIDE, inputs.B_STRIDE, count, inputs.N)
        copy_rows(tiles.C.index(stage), inputs.C + t * inputs.C_STRIDE, inputs.C_STRIDE, count, inputs.N)
        copy_rows(tiles.x.index(stage), inputs.x + t * inputs.X_STRIDE, inputs.X_STRIDE, count, inputs.lines)
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["num_prefills", "slot_stride", "num_tokens", "dt_stride", "dt_head_stride", "dt_min", "dt_max"]
)
def _ssd_scan_kernel(
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    state,
    out,
    query_start_loc,
    rows,
    chunk_dst,
    num_prefills,
    slot_stride,
    num_tokens,
    dt_stride,
    dt_head_stride,
    dt_min,
    dt_max,
    X_STRIDES: gl.constexpr,
    B_STRIDES: gl.constexpr,
    C_STRIDES: gl.constexpr,
    Z_STRIDES: gl.constexpr,
    OUT_STRIDE: gl.constexpr,
    HEADS: gl.constexpr,
    GROUPS: gl.constexpr,
    P: gl.constexpr,
    N: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CONCURRENT: gl.constexpr,
):
    """Carry 64 lines of a head's state through a row's chunks."""
    TILES: gl.constexpr = (P + ROWS - 1) // ROWS
    BF16: gl.constexpr = gl.bfloat16
    STATE: gl.constexpr = state.dtype.element_ty
    OUTPUT: gl.constexpr = BF16 if z is None else gl.float32  # in shared memory
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, CHUNK, 16])
    CARRIED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OF_STEP: gl.constexpr = gl.SliceLayout(0, PRODUCT)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)
    LEFT_CARRIED: gl.constexpr = gl.DotOperandLayout(0, CARRIED, 2)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // ROWS, ROWS // 8], [WARPS, 1], [1, 0])
    BY_CHUNK: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [WARPS, 1], [1, 0])  # a warp per chunk
    program = gl.program_id(0)
    sequence, index = program // (HEADS * TILES), program % (HEADS * TILES)
    head = index // TILES
    first_line = index % TILES * ROWS
    lines_left = P - first_line
    out += head * P + first_line
    out_step = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, OUT))[:, None]
    out_line = gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))[None, :]

    if sequence == num_prefills:
        end = gl.load(query_start_loc + num_prefills)
        clear_padding(Outputs(out, lines_left, OUT_STRIDE, OUT), end, num_tokens, ROWS)
        return

    row = prefill_row(rows, sequence)
    # Before this program's state: see `later_tile`.
    later = index + CONCURRENT
    later_row = gl.minimum(sequence + later // (HEADS * TILES), num_prefills - 1)
    later_slot = gl.load(rows + later_row * ROW_FIELDS + SRC_FIELD)
    rate = gl.load(A + head).to(gl.float32) * LOG2_E
    bias, skip = 0.0, 0.0
    if dt_bias is not None:
        bias = gl.load(dt_bias + head).to(gl.float32)
    if D is not None:
        skip = gl.load(D + head).to(gl.float32)
    origin = row.start - row.context % CHUNK  # after these loads: `row.origin` may be scheduled otherwise

    by_state: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, BLOCK_N], BF16)
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, CHUNK], BF16)
    by_value: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, ROWS], BF16)
    of_outputs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([CHUNK, ROWS], OUTPUT)
    by_chunk: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    B_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_N], by_state)
    C_tiles = gl.allocate_shared_memory(BF16, [STAGES, CHUNK, BLOCK_N], by_state)
    tiles = Tiles(gl.allocate_shared_memory(BF16, [STAGES, CHUNK, ROWS], by_value), B_tiles, C_tiles)
    scores_s = gl.allocate_shared_memory(BF16, [CHUNK, CHUNK], square)
    out_s = gl.allocate_shared_memory(OUTPUT, [CHUNK, ROWS], of_outputs)
    # In one allocation, the compiler would put barriers between stores.
    vectors = Vectors(
        gl.allocate_shared_memory(gl.float32, [2, AT_ONCE, CHUNK], by_chunk),
        gl.allocate_shared_memory(gl.float32, [2, AT_ONCE, CHUNK], by_chunk),
        gl.allocate_shared_memory(gl.float32, [2, AT_ONCE, CHUNK], by_chunk),
        gl.allocate_shared_memory(gl.float32, [2, AT_ONCE, CHUNK], by_chunk),
    )
    x += head * X_STRIDES[1] + first_line
    B += head // (HEADS // GROUPS) * B_STRIDES[1]
    C += head // (HEADS // GROUPS) * C_STRIDES[1]
    dt += head * dt_head_stride
    inputs = Inputs(x, B, C, X_STRIDES[0], B_STRIDES[0], C_STRIDES[0], lines_left, N)
    for n in gl.static_range(STAGES):
        _copy_chunk(tiles, n, inputs, chunk_at(n, origin, row))
    steps = load_steps(dt, dt_stride, 0, origin, row, BY_CHUNK)

    slot_stride = gl.cast(slot_stride, gl.int64) * (SLOT_UNIT * 8 // STATE.primitive_bitwidth)
    FOURS: gl.constexpr = by_fours(ROWS, BLOCK_N, WARPS)
    line = first_line + gl.arange(0, ROWS, layout=gl.SliceLayout(1, FOURS))[:, None]
    channel = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, FOURS))[None, :]
    inside = (line < P) & (channel < N)
    line_element = line * N
    later_state = state + later_slot * slot_stride + later % (HEADS * TILES) * (ROWS * N)
    state += head * P * N
    S = gl.load(state + row.slot * slot_stride + line_element + channel, mask=inside & (row.slot != 0), other=0)
    S = gl.convert_layout(S, CARRIED).to(gl.float32)
    if TILES * ROWS == P and BLOCK_N == N and row.last_chunk - row.first_chunk <= PREFETCH_CHUNKS:
        prefetch_states(later_state, ROWS * N)

    dst = gl.load(chunk_dst + row.first_chunk, mask=row.first_chunk < row.last_chunk, other=0)
    rates = Rates(rate, bias, dt_min, dt_max)
    store_decays(vectors, 0, steps, rates)
    steps = load_steps(dt, dt_stride, AT_ONCE, origin, row, BY_CHUNK)
    zeros = gl.zeros([ROWS, CHUNK], gl.float32, layout=PRODUCT)
    wait_for_copies(STAGES - 1)
    scores = warpgroup_mma(tiles.B.index(0), tiles.C.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    earlier = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, PRODUCT))[:, None]
    earlier = earlier <= gl.arange(0, CHUNK, layout=OF_STEP)[None, :]
    for n in range(0, row.last_chunk - row.first_chunk):
        stage, next_stage = n % STAGES, (n + 1) % STAGES
        half = n // AT_ONCE % 2
        own = n % AT_ONCE
        t, count = chunk_at(n, origin, row)
        following = row.first_chunk + n + 1 < row.last_chunk
        next_dst = gl.load(chunk_dst + row.first_chunk + n + 1, mask=following, other=0)

        read = gl.convert_layout(S.to(BF16), LEFT)
        y = warpgroup_mma(read, tiles.C.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        values = tiles.x.index(stage).permute((1, 0)).load(LEFT)
        wide = gl.convert_layout(values, PRODUCT).to(gl.float32)
        to_end = vector_of(vectors.to_end, half, own).load(OF_STEP)[None, :]
        S *= vector_of(vectors.decays, half, own).slice(CHUNK - 1, 1).load(gl.SliceLayout(0, CARRIED))[None, :]
        added = gl.convert_layout((to_end * wide).to(BF16), LEFT_CARRIED)
        S = warpgroup_mma(added, tiles.B.index(stage), S, is_async=True)

        weight = vector_of(vectors.sums, half, own).load(OF_STEP)[None, :]
        weight -= vector_of(vectors.offsets, half, own).load(gl.SliceLayout(1, PRODUCT))[:, None]
        weight = gl.exp2(gl.where(earlier, weight, float("-inf")))
        scores_s.store((scores * weight).to(BF16))
        decay = vector_of(vectors.decays, half, own).load(OF_STEP)[None, :]
        y = decay * warpgroup_mma_wait(1, deps=[y])
        values = tiles.x.index(stage).permute((1, 0)).load(LEFT)
        if D is not None:
            y = gl.fma(gl.full_like(y, 0.0) + skip, gl.convert_layout(values, PRODUCT).to(gl.float32), y)
        wait_for_copies(STAGES - 2)
        y = warpgroup_mma(values, scores_s, y, is_async=True)
        next_C = tiles.C.index(next_stage).permute((1, 0))
        scores = warpgroup_mma(tiles.B.index(next_stage), next_C, zeros, use_acc=False, is_async=True)

        if n % AT_ONCE == AT_ONCE - 1:
            store_decays(vectors, 1 - half, steps, rates)
            steps = load_steps(dt, dt_stride, n + 1 + AT_ONCE, origin, row, BY_CHUNK)
        S = warpgroup_mma_wait(2, deps=[S])
        if STATE != gl.float32:
            S = S.to(STATE).to(gl.float32)
        if dst != 0:
            gl.store(
                state + dst * slot_stride + line_element + channel, gl.convert_layout(S.to(STATE), FOURS), mask=inside
            )
        y = warpgroup_mma_wait(1, deps=[y])
        out_s.permute((1, 0)).store(y.to(OUTPUT))
        barrier()  # also before the stage is overwritten
        _copy_chunk(tiles, stage, inputs, chunk_at(n + STAGES, origin, row))
        stored = (out_step < count) & (out_line < lines_left)
        y = out_s.load(OUT)
        if z is not None:
            gate = z + t.to(gl.int64) * Z_STRIDES[0] + head * Z_STRIDES[1] + first_line
            gate = gl.load(gate + (out_step * Z_STRIDES[0] + out_line), mask=stored, other=0).to(gl.float32)
            y *= gate / (1 + gl.exp(-gate))
        place = out + t.to(gl.int64) * OUT_STRIDE + (out_step * OUT_STRIDE + out_line)
        gl.store(place, y.to(out.dtype.element_ty), mask=stored)
        scores = warpgroup_mma_wait(0, deps=[scores])
        dst = next_dst
    async_copy.wait_group(0)


scan = Launcher(_ssd_scan_kernel)
