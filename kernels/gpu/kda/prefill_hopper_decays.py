"""Compute decays and decayed operands of a chunk in Gluon.

A thread sums its own run of tokens; then runs are added.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common import decays
from ..common.chunks import CHUNK
from ..common.decays import LOG2_E
from ..common.hopper import barrier, wide
from ..common.inverse import WARPS
from ..common.structs import aggregate

# Per token: its power is 0, and a sum of 64 keeps 10 bits for fractions.
MIN_LOG2_DECAY = gl.constexpr(-128.0)
log2_softplus = gluon.jit(decays.log2_softplus.fn)


@aggregate
class Part:
    """Hold up to 64 channels: inputs, then operands of pairs, the right operand in `g`."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    g: gl.shared_memory_descriptor
    q_norms: gl.shared_memory_descriptor
    k_norms: gl.shared_memory_descriptor


@aggregate
class Sums:
    """Hold log decays: of runs, up to runs, of halves, and to the halves' middles."""

    runs: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor
    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor
    to_first_middle: gl.shared_memory_descriptor
    to_second_middle: gl.shared_memory_descriptor


@aggregate
class Operands:
    """Point to a chunk's k_in, q_in and k_out, `size` apart, and to its decay."""

    start: gl.tensor
    size: gl.tensor
    decay: gl.tensor
    count: gl.tensor
    K: gl.constexpr


@gluon.constexpr_function
def _by_run(VEC):
    run, width = VEC.size_per_thread
    tokens, channels = VEC.threads_per_warp
    return gl.BlockedLayout([1, run, width], [tokens, 1, channels], [4, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _all_runs(VEC, runs):
    tokens, channels = VEC.threads_per_warp
    return gl.BlockedLayout([1, runs, VEC.size_per_thread[1]], [tokens, 1, channels], [4, 1, 1], [2, 1, 0])


@gluon.jit
def _add(x, y):
    return x + y


@gluon.jit
def _inverse(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _store(place, x, channels, operands):
    K: gl.constexpr = operands.K
    RUN: gl.constexpr = x.type.layout.size_per_thread[0]
    BY_RUN: gl.constexpr = _by_run(x.type.layout)
    C: gl.constexpr = x.shape[1]
    run = gl.arange(0, CHUNK // RUN, layout=gl.SliceLayout(1, gl.SliceLayout(2, BY_RUN)))[:, None, None]
    step = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(2, BY_RUN)))[None, :, None]
    channel = gl.arange(0, C, layout=gl.SliceLayout(0, gl.SliceLayout(1, BY_RUN)))[None, None, :]
    place += run * (RUN * K) + channel
    x = gl.convert_layout(gl.reshape(x.to(gl.bfloat16), [CHUNK // RUN, RUN, C]), BY_RUN)
    gl.store(place + step * K, x, mask=(run * RUN + step < operands.count) & (channel < channels))


@gluon.jit
def log_decays(g_s, bias, rate, count, VEC: gl.constexpr):
    rates = gl.where(gl.arange(0, CHUNK, layout=gl.SliceLayout(1, VEC)) < count, rate, 0.0)
    gates = wide(g_s.load(VEC)) * LOG2_E + bias[None, :]
    return gl.maximum(rates[:, None] * log2_softplus(gates), MIN_LOG2_DECAY)


@gluon.jit
def _runs(decays, runs_s):
    """Return running sums [runs, tokens of a run, C]; store totals in `runs_s`."""
    VEC: gl.constexpr = decays.type.layout
    C: gl.constexpr = decays.shape[1]
    RUN: gl.constexpr = VEC.size_per_thread[0]
    BY_RUN: gl.constexpr = _by_run(VEC)
    sums = gl.convert_layout(gl.reshape(decays, [CHUNK // RUN, RUN, C]), BY_RUN)
    sums = gl.associative_scan(sums, 1, _add)
    last = gl.arange(0, RUN, layout=gl.SliceLayout(0, gl.SliceLayout(2, BY_RUN)))[None, :, None] == RUN - 1
    runs_s.store(gl.sum(gl.where(last, sums, -0.0), axis=1))
    barrier()
    return sums


@gluon.jit
def _halves(runs):
    """Sum runs [runs, C] over each half."""
    RUNS: gl.constexpr = runs.shape[0]
    in_first = gl.arange(0, RUNS, layout=gl.SliceLayout(1, runs.type.layout))[:, None] < RUNS // 2
    return gl.sum(gl.where(in_first, runs, -0.0), axis=0), gl.sum(gl.where(in_first, -0.0, runs), axis=0)


@gluon.jit
def near_sums(decays, sums_s):
    """Return sums from the chunk's middle to each token [64, C], and of its halves [C]."""
    VEC: gl.constexpr = decays.type.layout
    RUNS: gl.constexpr = sums_s.runs.shape[0]
    CHANNELS: gl.constexpr = gl.SliceLayout(0, VEC)
    BY_RUN: gl.constexpr = _by_run(VEC)
    ALL: gl.constexpr = _all_runs(VEC, RUNS)
    sums = _runs(decays, sums_s.runs)
    runs = sums_s.runs.load(gl.SliceLayout(0, ALL))
    first, second = _halves(runs)
    own = gl.arange(0, RUNS, layout=gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None, None]
    run = gl.arange(0, RUNS, layout=gl.SliceLayout(0, gl.SliceLayout(2, ALL)))[None, :, None]
    starts = gl.sum(gl.where(run < own, runs[None, :, :], -0.0), axis=1)
    first, second = gl.convert_layout(first, CHANNELS), gl.convert_layout(second, CHANNELS)
    sums += gl.convert_layout(starts, gl.SliceLayout(1, BY_RUN))[:, None, :]
    return gl.convert_layout(gl.reshape(sums, [CHUNK, decays.shape[1]]), VEC) - first[None, :], (first, second)


@gluon.jit
def far_sums(decays, sums_s):
    """Return the sums of `near_sums`, rounded differently; fill `sums_s`."""
    VEC: gl.constexpr = decays.type.layout
    RUNS: gl.constexpr = sums_s.runs.shape[0]
    BY_RUN: gl.constexpr = _by_run(VEC)
    BY_CHANNEL: gl.constexpr = gl.BlockedLayout([RUNS, 1], [1, 32], [1, WARPS], [1, 0])
    sums = _runs(decays, sums_s.runs)
    runs = sums_s.runs.load(BY_CHANNEL)
    run = gl.arange(0, RUNS, layout=gl.SliceLayout(1, BY_CHANNEL))[:, None]
    first, second = _halves(runs)
    starts = gl.associative_scan(runs, 0, _add) - runs - first[None, :]
    sums_s.starts.store(starts)
    sums_s.first.store(first)
    sums_s.second.store(second)
    sums_s.to_first_middle.store(gl.sum(gl.where(run == RUNS // 4, starts, -0.0), axis=0))
    sums_s.to_second_middle.store(gl.sum(gl.where(run == 3 * RUNS // 4, starts, -0.0), axis=0))
    barrier()
    sums += sums_s.starts.load(gl.SliceLayout(1, BY_RUN))[:, None, :]
    return gl.convert_layout(gl.reshape(sums, [CHUNK, decays.shape[1]]), VEC)


@gluon.jit
def halvings(decays, sums_s, LIMIT: gl.constexpr):
    """Return how often to halve spans of 32 tokens until no half decays by more than LIMIT.

    The count depends on this chunk alone, so that a row never depends on its batch.
    """
    VEC: gl.constexpr = decays.type.layout
    C: gl.constexpr = decays.shape[1]
    RUN: gl.constexpr = VEC.size_per_thread[0]
    RUNS: gl.constexpr = CHUNK // RUN
    CHANNELS: gl.constexpr = gl.SliceLayout(0, VEC)
    OF_RUN: gl.constexpr = gl.SliceLayout(1, _by_run(VEC))
    second, third = -sums_s.to_first_middle.load(CHANNELS), sums_s.to_second_middle.load(CHANNELS)
    first, fourth = sums_s.first.load(CHANNELS) - second, sums_s.second.load(CHANNELS) - third
    least = gl.min(gl.minimum(gl.minimum(first, second), gl.minimum(third, fourth)), axis=0)
    sums = gl.reshape(decays, [RUNS, RUN, C])
    far = gl.zeros([RUNS, C], gl.int32, layout=OF_RUN)
    for _level in gl.static_range(4):
        far += (gl.convert_layout(gl.min(sums, axis=1), OF_RUN) < -LIMIT).to(gl.int32)
        if sums.shape[1] > 1:
            sums = gl.sum(gl.reshape(sums, [RUNS, sums.shape[1] // 2, 2, C]), axis=2)
        else:
            sums *= 2  # twice the worst half bounds a longer span
    return gl.where(least < -LIMIT, 1 + gl.max(gl.reshape(far, [RUNS * C]), axis=0), 0)


@gluon.jit
def _normalised(x_s, norms_s, LAYOUT: gl.constexpr):
    return wide(x_s.load(LAYOUT)) * norms_s.load(gl.SliceLayout(1, LAYOUT))[:, None]


@gluon.jit
def _store_total(total, halves, channels):
    channel = gl.arange(0, halves[0].shape[0], layout=halves[0].type.layout)
    gl.store(total + channel, gl.exp2(halves[0] + halves[1]), mask=channel < channels)


@gluon.jit
def store_near(operands, part_s, sums, halves, part):
    """Store a part's operands, and operands of pairs that meet in the chunk's middle."""
    LAYOUT: gl.constexpr = sums.type.layout
    queries = _normalised(part_s.q, part_s.q_norms, LAYOUT)
    keys = _normalised(part_s.k, part_s.k_norms, LAYOUT)
    first = part * sums.shape[1]
    channels = operands.K - first
    k_in = operands.start + first
    q_in, k_out = k_in + operands.size, k_in + 2 * operands.size
    to_start, to_end = gl.exp2(halves[0])[None, :], gl.exp2(halves[1])[None, :]
    from_middle = gl.exp2(sums)
    queries *= from_middle
    part_s.q.store(queries.to(gl.bfloat16))
    _store(q_in, queries * to_start, channels, operands)
    left = keys * from_middle
    part_s.k.store(left.to(gl.bfloat16))
    _store(k_in, left * to_start, channels, operands)
    right = keys * _inverse(from_middle)
    part_s.g.store(right.to(gl.bfloat16))
    _store(k_out, right * to_end, channels, operands)
    _store_total(operands.decay + first, halves, channels)


@gluon.jit
def store_far(operands, part_s, sums, halves, part):
    """Store a part's operands without factors of the chunk's middle."""
    LAYOUT: gl.constexpr = sums.type.layout
    queries = _normalised(part_s.q, part_s.q_norms, LAYOUT)
    keys = _normalised(part_s.k, part_s.k_norms, LAYOUT)
    first = part * sums.shape[1]
    channels = operands.K - first
    k_in = operands.start + first
    q_in, k_out = k_in + operands.size, k_in + 2 * operands.size
    from_start = gl.exp2(sums + halves[0][None, :])
    _store(k_in, keys * from_start, channels, operands)
    _store(q_in, queries * from_start, channels, operands)
    _store(k_out, keys * gl.exp2(halves[1][None, :] - sums), channels, operands)
    _store_total(operands.decay + first, halves, channels)
