"""Lay out a chunk's tokens in registers as tensor cores leave products, so threads exchange nothing."""

from __future__ import annotations

import triton
import triton.language as tl

from ..common.chunks import CHUNK
from ..common.structs import aggregate

# Tensor cores leave a thread two neighbours. Columns are channels in another order, so that it loads four.
LOADED = tl.constexpr(4)


@aggregate
class TokenTile:
    """Hold tokens and channels of the elements that threads load, and whether both are in bounds."""

    step: tl.tensor
    channel: tl.tensor
    inside: tl.tensor


@triton.jit
def column_channels(BLOCK: tl.constexpr):
    """Return the channel [BLOCK] of each column."""
    column = tl.arange(0, BLOCK)
    return column // 16 * 16 + column % 8 // 2 * LOADED + column % 16 // 8 * 2 + column % 2


@triton.jit
def token_tile(first, count, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tile of a chunk's first `count` tokens and of BLOCK channels from `first` on."""
    quad = tl.arange(0, 4)[:, None, None, None, None, None]
    line = tl.arange(0, 8)[None, :, None, None, None, None]
    warp = tl.arange(0, CHUNK // 16)[None, None, :, None, None, None]
    half = tl.arange(0, 2)[None, None, None, :, None, None]
    group = tl.arange(0, BLOCK // 16)[None, None, None, None, :, None]
    step = warp * 16 + half * 8 + line
    channel = first + group * 16 + quad * LOADED + tl.arange(0, LOADED)[None, None, None, None, None, :]
    return TokenTile(step, channel, (step < count) & (first + group * 16 + quad * LOADED < CHANNELS))


@triton.jit
def load_tokens(tile, x, STRIDE: tl.constexpr, OTHER: tl.constexpr = 0):
    """Load [CHUNK, BLOCK] from x. Tokens are STRIDE elements apart."""
    SHAPE: tl.constexpr = [CHUNK, tile.channel.shape[4] * 16]
    loaded = tl.load(x + (tile.step * STRIDE + tile.channel), mask=tile.inside, other=OTHER)
    parts = tl.reshape(loaded, [4, 8, CHUNK // 16, 2, SHAPE[1] // 16, 2, 2])
    return tl.reshape(tl.permute(parts, (2, 3, 1, 4, 5, 0, 6)), SHAPE)


@triton.jit
def store_tokens(tile, x, STRIDE: tl.constexpr, values):
    """Invert `load_tokens`."""
    GROUPS: tl.constexpr = values.shape[1] // 16
    parts = tl.reshape(values, [CHUNK // 16, 2, 8, GROUPS, 2, 4, 2])
    parts = tl.reshape(tl.permute(parts, (5, 2, 0, 1, 3, 4, 6)), [4, 8, CHUNK // 16, 2, GROUPS, LOADED])
    tl.store(x + (tile.step * STRIDE + tile.channel), parts, mask=tile.inside)
