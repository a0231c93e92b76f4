"""Compute decays and copy chunks for the scan in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ..common.chunks import CHUNK
from ..common.decays import LOG2_E, MIN_PAIRWISE_LOG_DECAY, softplus
from ..common.hopper import barrier, copy_async, reinterpret
from ..common.structs import aggregate

AT_ONCE = gl.constexpr(4)  # chunks per computation of decays


@aggregate
class Rates:
    """Hold a head's parameters and bounds of step sizes."""

    decay: gl.tensor
    bias: gl.tensor
    dt_min: gl.tensor
    dt_max: gl.tensor


@aggregate
class Vectors:
    """Hold fp32 vectors [2, AT_ONCE, 64]: see `store_decays`."""

    decays: gl.shared_memory_descriptor
    sums: gl.shared_memory_descriptor
    offsets: gl.shared_memory_descriptor
    to_end: gl.shared_memory_descriptor


@gluon.jit
def _add_both(x0, x1, y0, y1):
    return x0 + y0, x1 + y1


@gluon.jit
def chunk_at(n, origin, row):
    """Return chunk n's first token and token count, at most 0 past the last chunk."""
    boundary = origin + n * CHUNK
    t = gl.maximum(boundary, row.start)
    return t, gl.minimum(boundary + CHUNK, row.end) - t


@gluon.jit
def load_steps(dt, dt_stride, first, origin, row, LAYOUT: gl.constexpr):
    """Load dt [AT_ONCE, 64] from chunk `first` on, a warp per chunk, and count tokens."""
    chunk = first + gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, LAYOUT))
    step = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    t, count = chunk_at(chunk, origin, row)
    count = count[:, None]
    place = dt + (t.to(gl.int64) * dt_stride)[:, None] + step * dt_stride
    return gl.load(place, mask=step < count, other=0), count


@gluon.jit
def store_decays(vectors, half, steps, rates):
    """Store decays, log2 of bounded decays, the same less the step's log2, and steps decayed to the chunk's end."""
    size, count = steps
    step = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, size.type.layout))[None, :]
    size = size.to(gl.float32) + rates.bias
    size = gl.where(step < count, gl.minimum(gl.maximum(softplus(size), rates.dt_min), rates.dt_max), 0.0)
    log_decay = size * rates.decay
    clamped = gl.maximum(log_decay, MIN_PAIRWISE_LOG_DECAY * LOG2_E)
    log_decay, sums = gl.associative_scan((log_decay, clamped), 1, _add_both)
    # The last sum is the second of lane 31.
    last: gl.constexpr = "shfl.sync.idx.b32 $0, $3, 31, 31, -1; mov.b32 $1, $0;"
    total = gl.inline_asm_elementwise(last, "=&r,=r,r,r", [sums], dtype=gl.float32, is_pure=True, pack=2)
    log2 = gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [size], dtype=gl.float32, is_pure=True, pack=1
    )
    vectors.decays.index(half).store(gl.exp2(log_decay))
    vectors.sums.index(half).store(sums)
    vectors.offsets.index(half).store(sums - log2)
    vectors.to_end.index(half).store(gl.exp2(total - sums) * size)


@gluon.jit
def vector_of(vector, half, index):
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    return reinterpret(vector, gl.float32, [2 * AT_ONCE, CHUNK], flat).index(half * AT_ONCE + index)


@gluon.jit
def copy_rows(tile, place, STRIDE: gl.constexpr, count, columns):
    """Copy as `copy_tile` does; a thread has one address, and lines a constant apart."""
    WIDTH: gl.constexpr = tile.shape[1]
    LANES: gl.constexpr = WIDTH // 8
    WARPS: gl.constexpr = gl.num_warps()
    AT_ONCE: gl.constexpr = 32 // LANES * WARPS if 32 // LANES * WARPS < CHUNK else CHUNK
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    row = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    first = gl.arange(0, CHUNK // AT_ONCE, layout=OF_ROWS)[:, None, None] * AT_ONCE
    place += row * STRIDE + column
    mask = (row < count - first) & (column < columns)
    copy_async(tile.reshape([CHUNK // AT_ONCE, AT_ONCE, WIDTH]), place + first * STRIDE, mask=mask)


@gluon.constexpr_function
def _wait_code(left):
    return f"cp.async.wait_group {left}; mov.u32 $0, 0;"


@gluon.jit
def wait_for_copies(LEFT: gl.constexpr):
    """Wait for all but LEFT groups of copies; products then see earlier stores to shared memory.

    `async_copy.wait_group` would put its barrier before the fence.
    """
    code: gl.constexpr = _wait_code(LEFT)
    gl.inline_asm_elementwise(code, "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)
    fence_async_shared()
    barrier()
