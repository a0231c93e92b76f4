"""Find rows and chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from mambacache import plan

from ...indices import StateIndices
from .structs import aggregate

CHUNK = tl.constexpr(plan.CHUNK)
ROW_FIELDS = tl.constexpr(6)  # of `StateIndices.prefill_rows`
SRC_FIELD = tl.constexpr(5)
SECTOR = tl.constexpr(16)  # columns of 16 bits; memory takes longer to write half a sector


CHUNK_ARRAYS = "query_start_loc", "chunk_start", "seq_chunk_start"
ROW_ARRAYS = "query_start_loc", "prefill_rows", "chunk_dst"


def keep_busy(indices: StateIndices, tiles: int, programs: int) -> bool:
    """Return whether the average program gets 7/8 of the busiest program's chunks.

    Programs take turns at `tiles` tiles per row.
    """
    if indices.row_chunks is None:
        return False
    key = f"{programs} programs at {tiles} tiles are kept busy"
    if key not in indices.derived:
        chunks = sorted(indices.row_chunks, reverse=True)
        most = sum(chunks[tile // tiles] for tile in range(0, tiles * len(chunks), programs))
        indices.derived[key] = 8 * tiles * sum(chunks) >= 7 * programs * most
    busy: bool = indices.derived[key]
    return busy


@triton.jit
def row_and_tile(TILES: tl.constexpr):
    program = tl.program_id(0)
    return program // TILES, program % TILES


@triton.jit
def chunk_tokens(chunk, query_start_loc, chunk_start, seq_chunk_start, num_prefills, TILES: tl.constexpr):
    """Return a chunk's first token and token count, 0 beyond the table. Each chunk has TILES programs."""
    num_chunks = tl.load(seq_chunk_start + num_prefills)
    last_end = tl.load(query_start_loc + num_prefills)
    start = tl.load(chunk_start + chunk)
    following = tl.load(chunk_start + chunk + 1, mask=chunk + 1 < tl.num_programs(0) // TILES, other=0)
    end = tl.where(chunk + 1 < num_chunks, following, last_end)
    return start, tl.where(chunk < num_chunks, end - start, 0)


@aggregate
class PrefillRow:
    """Hold a row's tokens, chunks and source; chunks begin at `origin`, perhaps before `start`."""

    start: tl.tensor
    end: tl.tensor
    context: tl.tensor
    first_chunk: tl.tensor
    last_chunk: tl.tensor
    slot: tl.tensor
    origin: tl.tensor


@triton.jit
def prefill_row(rows, i):
    row = rows + i * ROW_FIELDS
    start, end, context = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first_chunk, last_chunk, slot = tl.load(row + 3), tl.load(row + 4), tl.load(row + SRC_FIELD)
    return PrefillRow(start, end, context, first_chunk, last_chunk, slot, start - context % CHUNK)


@triton.jit
def tokens_of_chunk(row, chunk):
    """Return a chunk's first token and token count."""
    boundary = row.origin + (chunk - row.first_chunk) * CHUNK
    start = tl.maximum(boundary, row.start)
    return start, tl.minimum(boundary + CHUNK, row.end) - start


@triton.jit
def clear_padding(out, query_start_loc, num_prefills, num_tokens, column, mask, STRIDE: tl.constexpr):
    """Clear tokens that belong to no row."""
    step = tl.arange(0, CHUNK)
    for start in range(tl.load(query_start_loc + num_prefills), num_tokens, CHUNK):
        token = tl.cast(start, tl.int64) + step
        zeros = tl.zeros([CHUNK, column.shape[0]], out.dtype.element_ty)
        place = out + token[:, None] * STRIDE + column[None, :]
        tl.store(place, zeros, mask=(token < num_tokens)[:, None] & mask[None, :])
