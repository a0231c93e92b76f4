"""Read states and token logs in decode.

Each row's first programs prepare its new tokens. The others wait, then read tiles of states.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .log import (
    WINDOW,
    depth_of,
    entry_values,
    load_state,
    prefetch_entries,
    tile_columns,
    tile_rows,
    wait_for_arrivals,
)
from .structs import aggregate


@aggregate
class Tiles:
    """Hold states [HEADS, V, K], tiles, and a row's preparing programs."""

    HEADS: tl.constexpr
    V: tl.constexpr
    K: tl.constexpr
    BLOCK_V: tl.constexpr
    BLOCK_K: tl.constexpr
    MOST: tl.constexpr
    PREPARING: tl.constexpr


@aggregate
class States:
    """Hold a row's state, its log of values, and outputs; the fold reads `folded` states again."""

    state: tl.tensor
    source: tl.tensor
    folded: tl.tensor
    log: tl.tensor
    out: tl.tensor
    OUT_STRIDE: tl.constexpr


@aggregate
class Tile:
    """Hold a state's tile [4, BLOCK_V / 4, BLOCK_K / 32, 32] and its lines of entries."""

    S: tl.tensor
    entries: tl.tensor
    head: tl.tensor
    value: tl.tensor
    channel: tl.tensor
    in_K: tl.tensor


@aggregate
class Program:
    """Hold a program's place among readers, negative if it prepares, and its row's number of readers."""

    index: tl.tensor
    row: tl.tensor
    first_tile: tl.tensor
    tile_bits: tl.tensor
    waiting: tl.tensor


@triton.jit
def decode_program(num_rows, tile_bits, TILES: tl.constexpr, PREPARING: tl.constexpr):
    waiting = TILES >> tile_bits
    index = tl.program_id(0) - num_rows * PREPARING
    first_tile = index << tile_bits
    row = tl.where(index < 0, tl.program_id(0) // PREPARING, first_tile // TILES)
    return Program(index, row, first_tile, tile_bits, waiting)


@triton.jit
def read_states(program, row, states, arrivals, inputs, tiles, READ: tl.constexpr, ONE_TOKEN: tl.constexpr):
    """Store outputs and entries of a program's tiles.

    `READ(inputs, token, tile)` returns a token's output, its entry in fp32 and the entry to log.
    """
    HEADS: tl.constexpr = tiles.HEADS
    V: tl.constexpr = tiles.V
    K: tl.constexpr = tiles.K
    BLOCK_V: tl.constexpr = tiles.BLOCK_V
    TILES: tl.constexpr = V // BLOCK_V
    ASKED: tl.constexpr = tiles.MOST * BLOCK_V
    first_tile, count = program.first_tile % (HEADS * TILES), 1 << program.tile_bits
    head, first_value = first_tile // TILES, first_tile % TILES * BLOCK_V
    log = states.log + head * V
    state = states.state + (head * V + first_value) * K
    prefetch_entries(log + first_value // ASKED * ASKED, row.start, row.end, HEADS * V, ASKED)
    wait_for_arrivals(arrivals, tiles.PREPARING, program.waiting)
    lane, channel, entry = tile_rows(BLOCK_V), tile_columns(tiles.BLOCK_K), tl.arange(0, WINDOW)
    in_K = channel < K
    element = lane[:, :, None, None] * K + channel
    read = tl.broadcast_to(tl.where(states.source != 0, in_K, False), element.shape)
    for i in range(count):
        value = first_value + i * BLOCK_V + lane
        S = load_state(state + i * (BLOCK_V * K) + element, read, states.folded)
        entries = entry_values(log, row, value, HEADS * V)
        for t in range(1 if ONE_TOKEN else row.tokens):
            token = row.row.to(tl.int64) * row.tokens + t
            computed = t < row.length
            o, own, logged = READ(inputs, token, Tile(S, entries, head, value, channel, in_K))
            o = tl.where(computed, o, 0.0).to(states.out.dtype.element_ty)
            tl.store(states.out + token * states.OUT_STRIDE + head * V + value, o)
            tl.store(log + (row.end + t) * (HEADS * V) + value, logged, mask=tl.where(computed, value < V, False))
            if t + 1 < row.length:
                place, following = row.end + depth_of(row.depths, t), row.end + depth_of(row.depths, t + 1)
                entries = tl.where((entry == place)[None, None, :], own[:, :, None], entries)
                entries = tl.where((entry < following)[None, None, :], entries, 0.0)  # siblings, perhaps NaN
