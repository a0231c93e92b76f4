"""Implement the ops of experts in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .common.launch import NO_POINTERS, Launcher
from .common.layout import cdiv, check_dense, power_of_2, stride_alignment
from .common.prefetch import INTERPRETED

RANKED_SLOTS = 4096  # more are counted by blocks
RANK_BLOCK, RANK_TILE = 16, 512
COUNT_BLOCK, COUNT_TILE = 256, 32
CHOOSE_TILE = 512  # probabilities per program
TILE_WIDTH = 1024  # elements per program


@triton.jit(do_not_specialize=["slots"])
def _rank_kernel(
    experts,
    tokens,
    places,
    offsets,
    slots,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count slots before every slot and every expert's end, by the key expert * slots + slot."""
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_slot = query < slots
    expert = tl.load(experts + query, mask=is_slot, other=0).to(tl.int32)
    key = tl.where(is_slot, expert * slots + query, (query - slots + 1) * slots)
    place = tl.zeros([BLOCK], tl.int32)
    for first in range(0, slots, TILE):
        other = first + tl.arange(0, TILE)
        other_expert = tl.load(experts + other, mask=other < slots, other=EXPERTS).to(tl.int32)
        before = (other_expert * slots + other)[None, :] < key[:, None]
        place += tl.sum(before.to(tl.int32), axis=1)
    tl.store(places + query, place, mask=is_slot)
    tl.store(tokens + place, query // CHOICES, mask=is_slot)
    tl.store(offsets + query - slots, place, mask=(query >= slots) & (query < slots + EXPERTS))


@triton.jit(do_not_specialize=["slots", "blocks"])
def _count_kernel(
    experts,
    counts,
    slots,
    blocks,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count slots per expert and block."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(experts + slot, mask=slot < slots, other=EXPERTS).to(tl.int32)
    for first in range(0, EXPERTS, TILE):
        expert = first + tl.arange(0, TILE)
        count = tl.sum((chosen[None, :] == expert[:, None]).to(tl.int32), axis=1)
        tl.store(counts + expert * blocks + block, count, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["slots", "blocks"])
def _place_kernel(
    experts,
    ends,
    tokens,
    places,
    offsets,
    slots,
    blocks,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Place slots behind their expert's earlier slots; `ends` are running sums."""
    block, lane = tl.program_id(0), tl.arange(0, BLOCK)
    slot = block * BLOCK + lane
    is_slot = slot < slots
    chosen = tl.load(experts + slot, mask=is_slot, other=EXPERTS).to(tl.int32)
    before = (chosen[None, :] == chosen[:, None]) & (lane[None, :] < lane[:, None])
    last = chosen * blocks + block - 1
    place = tl.load(ends + last, mask=is_slot & (last >= 0), other=0) + tl.sum(before.to(tl.int32), axis=1)
    tl.store(places + slot, place, mask=is_slot)
    tl.store(tokens + place, slot // CHOICES, mask=is_slot)
    tl.store(offsets + slot, tl.load(ends + slot * blocks + blocks - 1, mask=slot < EXPERTS), mask=slot < EXPERTS)


_launch_rank, _launch_count, _launch_place = map(Launcher, (_rank_kernel, _count_kernel, _place_kernel))


def group_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `mambacache.kernels.group_by_expert`."""
    experts = experts.contiguous()
    slots, choices = experts.numel(), experts.shape[1]
    tokens = torch.empty(slots, dtype=torch.int32, device=experts.device)
    places = torch.empty_like(experts, dtype=torch.int32)
    offsets = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    if slots <= RANKED_SLOTS:
        _launch_rank(
            cdiv(slots + num_experts, RANK_BLOCK),
            (experts, tokens, places, offsets),
            NO_POINTERS,
            (slots,),
            {"EXPERTS": num_experts, "CHOICES": choices, "BLOCK": RANK_BLOCK, "TILE": RANK_TILE},
            num_warps=4,
        )
        return tokens, places, offsets
    blocks = cdiv(slots, COUNT_BLOCK)
    counts = torch.empty(num_experts * blocks, dtype=torch.int32, device=experts.device)
    _launch_count(
        blocks,
        (experts, counts),
        NO_POINTERS,
        (slots, blocks),
        {"EXPERTS": num_experts, "BLOCK": COUNT_BLOCK, "TILE": COUNT_TILE},
        num_warps=4,
    )
    ends = counts.cumsum(0, dtype=torch.int32)
    _launch_place(
        max(blocks, cdiv(num_experts, COUNT_BLOCK)),
        (experts, ends, tokens, places, offsets),
        NO_POINTERS,
        (slots, blocks),
        {"EXPERTS": num_experts, "CHOICES": choices, "BLOCK": COUNT_BLOCK},
        num_warps=8,
    )
    return tokens, places, offsets


@triton.jit
def _exp(x):
    """Match torch; the interpreter has no libdevice."""
    return tl.exp(x) if INTERPRETED else libdevice.exp(x)


@triton.jit(do_not_specialize=["tokens", "row_stride"])
def _choose_kernel(
    logits,
    weights,
    experts,
    tokens,
    row_stride,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):
    """Choose the likeliest expert, then the next."""
    token = (tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)).to(tl.int64)[:, None]
    expert, choice = tl.arange(0, BLOCK_EXPERTS)[None, :], tl.arange(0, BLOCK_CHOICES)[None, :]
    inside, is_expert = token < tokens, expert < EXPERTS
    x = tl.load(logits + token * row_stride * UNIT + expert, mask=inside & is_expert, other=float("-inf"))
    x = x.to(tl.float32)
    power = _exp(x - tl.max(x, axis=1)[:, None])
    total = tl.sum(power, axis=1)[:, None]
    left = power / total
    left = tl.where(left == left, left, 0)  # NaN tokens need distinct experts too
    left = tl.where(is_expert, left, -1)
    chosen = tl.zeros([BLOCK_TOKENS, BLOCK_CHOICES], tl.int32)
    share = tl.zeros([BLOCK_TOKENS, BLOCK_CHOICES], tl.float32)
    for i in tl.static_range(CHOICES):
        highest, best = tl.max(left, axis=1, return_indices=True)
        chosen = tl.where(choice == i, best[:, None], chosen)
        share = tl.where(choice == i, highest[:, None], share)
        left = tl.where(expert == best[:, None], -1, left)
    if NORMALIZE:
        share /= tl.sum(share, axis=1)[:, None]
    share = tl.where(total == total, share, float("nan"))
    mask = inside & (choice < CHOICES)
    tl.store(weights + token * CHOICES + choice, share.to(weights.dtype.element_ty), mask=mask)
    tl.store(experts + token * CHOICES + choice, chosen.to(tl.int64), mask=mask)


_launch_choose = Launcher(_choose_kernel)


def choose_experts(logits: Tensor, choices: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """See `mambacache.kernels.choose_experts`."""
    check_dense(logits=logits)
    tokens, num_experts = logits.shape
    weights = torch.empty(tokens, choices, dtype=logits.dtype, device=logits.device)
    experts = torch.empty_like(weights, dtype=torch.int64)
    unit, block_experts = stride_alignment(logits), power_of_2(num_experts)
    block_tokens = max(CHOOSE_TILE // block_experts, 1)
    if tokens:
        _launch_choose(
            cdiv(tokens, block_tokens),
            (logits, weights, experts),
            NO_POINTERS,
            (tokens, logits.stride(0) // unit),
            {
                "EXPERTS": num_experts,
                "CHOICES": choices,
                "NORMALIZE": normalize,
                "UNIT": unit,
                "BLOCK_TOKENS": block_tokens,
                "BLOCK_EXPERTS": block_experts,
                "BLOCK_CHOICES": power_of_2(choices),
            },
            num_warps=1,
        )
    return weights, experts


@triton.jit
def _silu(x):
    """Match torch bit for bit."""
    return tl.div_rn(x, 1 + _exp(-x))


@triton.jit
def _tile(rows, WIDTH: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Return lines, channels and mask."""
    TILES: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    row = tl.program_id(0) // TILES * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    channel = (tl.program_id(0) % TILES * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH))[None, :]
    return row, channel, (row < rows)[:, None] & (channel < WIDTH)


@triton.jit(do_not_specialize=["rows", "row_stride"])
def _silu_and_mul_kernel(
    x,
    out,
    rows,
    row_stride,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    X: tl.constexpr = x.dtype.element_ty
    row, channel, mask = _tile(rows, WIDTH, BLOCK_ROWS, BLOCK_WIDTH)
    row = row.to(tl.int64)[:, None]
    x += row * row_stride * UNIT + channel
    gate = tl.load(x, mask=mask, other=0).to(tl.float32)
    up = tl.load(x + WIDTH, mask=mask, other=0).to(tl.float32)
    tl.store(out + row * WIDTH + channel, (_silu(gate).to(X).to(tl.float32) * up).to(X), mask=mask)


@triton.jit(do_not_specialize=["tokens", "row_stride", "shared_stride", "gate_stride"])
def _combine_kernel(
    rows,
    weights,
    places,
    shared,
    gate,
    out,
    tokens,
    row_stride,
    shared_stride,
    gate_stride,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    SHARED_UNIT: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    X: tl.constexpr = rows.dtype.element_ty
    token, channel, mask = _tile(tokens, WIDTH, BLOCK_TOKENS, BLOCK_WIDTH)
    inside = token < tokens
    total = tl.zeros([BLOCK_TOKENS, BLOCK_WIDTH], tl.float32)
    for choice in tl.static_range(CHOICES):
        slot = token.to(tl.int64) * CHOICES + choice
        place = tl.load(places + slot, mask=inside, other=0).to(tl.int64)
        weight = tl.load(weights + slot, mask=inside, other=0)
        row = rows + (place * row_stride * UNIT)[:, None] + channel
        product = tl.load(row, mask=mask, other=0).to(tl.float32) * weight.to(tl.float32)[:, None]
        if X == weight.dtype:
            product = product.to(X).to(tl.float32)
        total += product
    token = token.to(tl.int64)
    if shared is not None:
        opened = tl.load(gate + token * gate_stride, mask=inside, other=0).to(tl.float32)
        opened = tl.div_rn(tl.full(opened.shape, 1, tl.float32), 1 + _exp(-opened)).to(X).to(tl.float32)
        place = shared + (token * shared_stride * SHARED_UNIT)[:, None] + channel
        added = (opened[:, None] * tl.load(place, mask=mask, other=0).to(tl.float32)).to(X)
        total = total.to(X).to(tl.float32) + added.to(tl.float32)
    tl.store(out + token[:, None] * WIDTH + channel, total.to(X), mask=mask)


_launch_silu_and_mul, _launch_combine = Launcher(_silu_and_mul_kernel), Launcher(_combine_kernel)


def silu_and_mul(x: Tensor) -> Tensor:
    """See `mambacache.kernels.silu_and_mul`."""
    check_dense(x=x)
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    unit, block_width = stride_alignment(x), min(power_of_2(width), TILE_WIDTH // 2)
    block_rows = TILE_WIDTH // block_width
    if rows:
        _launch_silu_and_mul(
            cdiv(rows, block_rows) * cdiv(width, block_width),
            (x, out),
            NO_POINTERS,
            (rows, x.stride(0) // unit),
            {"WIDTH": width, "UNIT": unit, "BLOCK_ROWS": block_rows, "BLOCK_WIDTH": block_width},
            num_warps=4,
        )
    return out


def combine_experts(
    rows: Tensor, weights: Tensor, places: Tensor, shared: Tensor | None, gate: Tensor | None
) -> Tensor:
    """See `mambacache.kernels.combine_experts`."""
    check_dense(rows=rows, shared=shared)
    weights, places = weights.contiguous(), places.contiguous()
    (tokens, choices), width = places.shape, rows.shape[1]
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    unit, block_width = stride_alignment(rows), min(power_of_2(width), TILE_WIDTH)
    block_tokens = TILE_WIDTH // block_width
    shared_stride, shared_unit = (0, 1) if shared is None else (shared.stride(0), stride_alignment(shared))
    if tokens:
        _launch_combine(
            cdiv(tokens, block_tokens) * cdiv(width, block_width),
            (rows, weights, places, shared, gate, out),
            NO_POINTERS,
            (tokens, rows.stride(0) // unit, shared_stride // shared_unit, 0 if gate is None else gate.stride(0)),
            {
                "WIDTH": width,
                "UNIT": unit,
                "SHARED_UNIT": shared_unit,
                "CHOICES": choices,
                "BLOCK_TOKENS": block_tokens,
                "BLOCK_WIDTH": block_width,
            },
            num_warps=4,
            enable_fp_fusion=False,  # products must round before the sum
        )
    return out
