"""State-space duality (Mamba2): decode over a token log, in two launches."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from log_window import WINDOW, slot_of, slot_units, weights_of, window_of
from torch import Tensor

from mambacache.kernels.gpu.common.chunks import row_and_tile
from mambacache.kernels.gpu.common.decays import LOG2_E, softplus
from mambacache.kernels.gpu.common.layout import layer_strides, power_of_2, slot_elements, slot_stride


def log_entry(x: Tensor, B: Tensor) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the log holds of one token: its input and B as they came, and its step size. x [F, H, P], B [F, G, N]."""
    return {"x": (x.shape[1:], x.dtype), "B": (B.shape[1:], B.dtype), "dt": (x.shape[1:2], torch.float32)}


@triton.jit(do_not_specialize=["log_stride", "tokens_per_decode"])
def _prepare_kernel(
    dt,
    A,
    B,
    C,
    dt_bias,
    log_B,
    log_dt,
    scores,
    totals,
    lengths,
    slots,
    starts,
    helds,
    rooms,
    log_stride,
    tokens_per_decode,
    DT_STRIDES: tl.constexpr,
    B_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """A program takes one group of heads of one row. It logs the new tokens' Bs and step sizes, and leaves what each
    token's C meets in its window in `scores` [F, H, 16], and `total` in `totals` [F, H]."""
    SHARING: tl.constexpr = HEADS // GROUPS
    row, group = row_and_tile(GROUPS)
    channel, entry = tl.arange(0, BLOCK_N), tl.arange(0, WINDOW)
    head, in_group = group * SHARING + tl.arange(0, BLOCK_HEADS), tl.arange(0, BLOCK_HEADS) < SHARING
    in_N = channel < N
    length = tl.load(lengths + row)
    start, count, room = window_of(tl.load(helds + row), tl.load(rooms + row), tl.load(starts + row))
    slot = tl.load(slots + row).to(tl.int64)
    log_B = slot_of(log_B, slot, log_stride) + group * N
    log_dt = slot_of(log_dt, slot, log_stride) + head
    rate = tl.load(A + head, mask=in_group, other=0).to(tl.float32) * LOG2_E
    bias = tl.load(dt_bias + head, mask=in_group, other=0).to(tl.float32)

    place, after = (start + entry) % CAPACITY, (start + entry + 1) % CAPACITY
    held, follows = entry < count, entry + 1 < count
    inputs = log_B + (place * (GROUPS * N))[:, None] + channel[None, :]
    inputs = tl.load(inputs, mask=held[:, None] & in_N[None, :], other=0).to(tl.float32)
    sizes = log_dt[None, :] + (after * HEADS)[:, None]
    following = tl.exp2(tl.load(sizes, mask=follows[:, None] & in_group[None, :], other=0) * rate[None, :])
    first = tl.load(log_dt + start % CAPACITY * HEADS, mask=tl.where(count > 0, in_group, False), other=0)
    first = tl.exp2(first * rate)
    for t in range(tokens_per_decode):
        token = row.to(tl.int64) * tokens_per_decode + t
        known, mine = tl.where(t < length, in_N, False), tl.where(t < length, in_group, False)
        raw = tl.load(B + token * B_STRIDES[0] + group * B_STRIDES[1] + channel, mask=known, other=0)
        reads = tl.load(C + token * C_STRIDES[0] + group * C_STRIDES[1] + channel, mask=known, other=0).to(tl.float32)
        size = tl.load(dt + token * DT_STRIDES[0] + head * DT_STRIDES[1], mask=mine, other=0).to(tl.float32)
        size = softplus(size + bias)
        spot = (start + count) % CAPACITY
        tl.store(log_B + spot * (GROUPS * N) + channel, raw, mask=known)
        tl.store(log_dt + spot * HEADS, size, mask=mine)

        decay = tl.exp2(size * rate)
        inputs = tl.where((entry == count)[:, None], raw.to(tl.float32)[None, :], inputs)
        following = tl.where((entry + 1 == count)[:, None], decay[None, :], following)
        first = tl.where(count == 0, decay, first)
        weights, total = weights_of(following, first)
        score = scores + ((token * HEADS + head) * WINDOW)[None, :] + entry[:, None]
        met = tl.sum(inputs * reads[None, :], axis=1)[:, None] * weights
        tl.store(score, met, mask=(entry >= 0)[:, None] & in_group[None, :])
        tl.store(totals + token * HEADS + head, total, mask=in_group)
        count += 1
        if count == room:
            start += count
            count, room = 0, WINDOW
            inputs, following = tl.zeros_like(inputs), tl.full(following.shape, 1.0, tl.float32)


@triton.jit
def _held_values(log_x, log_dt, start, count, value, HEADS: tl.constexpr, P: tl.constexpr, CAPACITY: tl.constexpr):
    """dt x [16, values] of a window's entries."""
    entry = tl.arange(0, WINDOW)
    place, held = (start + entry) % CAPACITY, entry < count
    values = log_x + (place * (HEADS * P))[:, None] + value[None, :]
    values = tl.load(values, mask=held[:, None] & (value >= 0)[None, :], other=0).to(tl.float32)
    return values * tl.load(log_dt + place * HEADS, mask=held, other=0)[:, None]


@triton.jit(do_not_specialize=["slot_stride", "log_stride", "tokens_per_decode"])
def _decode_kernel(
    x,
    A,
    C,
    D,
    state,
    out,
    log_x,
    log_B,
    log_dt,
    scores,
    totals,
    src,
    dst,
    lengths,
    slots,
    starts,
    helds,
    rooms,
    slot_stride,
    log_stride,
    tokens_per_decode,
    X_STRIDES: tl.constexpr,
    C_STRIDES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """A program takes BLOCK_P rows of one head's state past the tokens of one row, and logs their inputs."""
    TILES: tl.constexpr = P // BLOCK_P
    STATE: tl.constexpr = state.dtype.element_ty
    row, tile = row_and_tile(HEADS * TILES)
    head = tile // TILES
    group = head // (HEADS // GROUPS)
    value = tile % TILES * BLOCK_P + tl.arange(0, BLOCK_P)
    channel, entry = tl.arange(0, BLOCK_N), tl.arange(0, WINDOW)
    in_N = channel < N

    state += head * P * N
    element = value[:, None] * N + channel[None, :]
    slot_stride = slot_elements(slot_stride, state)
    source = tl.load(src + row)
    read = tl.where(source != 0, in_N, False)[None, :]
    S = tl.load(state + source * slot_stride + element, mask=read, other=0).to(tl.float32)
    length, target = tl.load(lengths + row), tl.load(dst + row)
    held, room, start = tl.load(helds + row), tl.load(rooms + row), tl.load(starts + row)
    slot = tl.load(slots + row).to(tl.int64)
    log_x = slot_of(log_x, slot, log_stride) + head * P
    log_B = slot_of(log_B, slot, log_stride) + group * N
    log_dt = slot_of(log_dt, slot, log_stride) + head
    rate = tl.load(A + head).to(tl.float32) * LOG2_E
    skip = tl.load(D + head).to(tl.float32)
    count, left = tl.minimum(held, room), room
    values = _held_values(log_x, log_dt, start, count, value, HEADS, P, CAPACITY)
    for t in range(tokens_per_decode + 1):
        if count == left:
            tl.debug_barrier()  # this launch's entries are seen
            for i in range(count):
                spot = (start + i) % CAPACITY
                size = tl.load(log_dt + spot * HEADS)
                added = size * tl.load(log_x + spot * (HEADS * P) + value).to(tl.float32)
                inputs = tl.load(log_B + spot * (GROUPS * N) + channel, mask=in_N, other=0).to(tl.float32)
                S = tl.exp2(size * rate) * S + added[:, None] * inputs[None, :]
            # Stored is what consumed known tokens alone: those of the log, and the row's first.
            written = tl.where((target != 0) & (t <= 1) & (t <= length), in_N, False)[None, :]
            tl.store(state + target * slot_stride + element, S.to(STATE), mask=written)
            S = S.to(STATE).to(tl.float32)
            target = 0
            start += count
            count, left = tl.where(t == 0, held - room, 0), WINDOW
            values = _held_values(log_x, log_dt, start, count, value, HEADS, P, CAPACITY)
        if t < tokens_per_decode:
            token = row.to(tl.int64) * tokens_per_decode + t
            computed = t < length
            known, mine = tl.where(computed, in_N, False), tl.where(computed, value < P, False)
            reads = C + token * C_STRIDES[0] + group * C_STRIDES[1] + channel
            reads = tl.load(reads, mask=known, other=0).to(tl.float32)
            raw = tl.load(x + token * X_STRIDES[0] + head * X_STRIDES[1] + value, mask=mine, other=0)
            spot = (start + count) % CAPACITY
            size = tl.load(log_dt + spot * HEADS, mask=computed, other=0)
            score = tl.load(scores + (token * HEADS + head) * WINDOW + entry)
            total = tl.load(totals + token * HEADS + head)
            tl.store(log_x + spot * (HEADS * P) + value, raw, mask=mine)
            own = raw.to(tl.float32)
            values = tl.where((entry == count)[:, None], (size * own)[None, :], values)
            y = total * tl.sum(S * reads[None, :], axis=1) + tl.sum(score[:, None] * values, axis=0) + skip * own
            y = tl.where(computed, y, 0.0).to(out.dtype.element_ty)
            tl.store(out + token * OUT_STRIDE + head * P + value, y)
            count += 1


def decode(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Mapping[str, Tensor],
    rows: Mapping[str, Tensor],
    tokens: int,
    out: Tensor,
    scratch: tuple[Tensor, Tensor],
    block_p: int = 8,
    num_warps: int = 1,
    prepare_warps: int = 4,
) -> None:
    """Fills `out` [F, H, P] for rows of so many `tokens`. `scratch` holds at least F H 16 elements in fp32, and F H."""
    heads, P = x.shape[1:]
    groups, N = B.shape[1:]
    strides = layer_strides(x, dt, B, C)
    count, stride = len(rows["src"]), slot_units(log["x"])
    places = [rows[name] for name in ("lengths", "slot", "start", "held", "room")]
    shape = {
        "C_STRIDES": strides[3],
        "HEADS": heads,
        "GROUPS": groups,
        "N": N,
        "BLOCK_N": power_of_2(N),
        "CAPACITY": log["x"].shape[1],
    }
    _prepare_kernel[(groups * count,)](
        dt, A, B, C, dt_bias, log["B"], log["dt"], *scratch, *places, stride, tokens, DT_STRIDES=strides[1],
        B_STRIDES=strides[2], BLOCK_HEADS=power_of_2(heads // groups), num_warps=prepare_warps, **shape,
    )  # fmt: skip
    _decode_kernel[(heads * (P // block_p) * count,)](
        x, A, C, D, state, out, log["x"], log["B"], log["dt"], *scratch, rows["src"], rows["dst"], *places,
        slot_stride(state), stride, tokens, X_STRIDES=strides[0], OUT_STRIDE=out.stride(0), P=P, BLOCK_P=block_p,
        num_warps=num_warps, **shape,
    )  # fmt: skip
