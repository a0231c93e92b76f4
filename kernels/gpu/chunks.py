"""Where rows, their chunks and their tokens lie in the flat batch."""

from __future__ import annotations

import triton
import triton.language as tl

from ..indices import StateIndices

CHUNK = tl.constexpr(64)


def chunk_arguments(indices: StateIndices) -> tuple[object, ...]:
    """What kernels that give each chunk of 64 tokens a program take, in this order."""
    return (
        indices.query_start_loc,
        indices.context_len,
        indices.chunk_seq,
        indices.chunk_start,
        indices.seq_chunk_start,
        indices.num_prefills,
    )


def row_arguments(indices: StateIndices) -> tuple[object, ...]:
    """What kernels that give each prefill row a program take, in this order."""
    return (
        indices.query_start_loc,
        indices.context_len,
        indices.src,
        indices.chunk_dst,
        indices.seq_chunk_start,
        indices.longest_first,
        indices.num_prefills,
    )


@triton.jit
def decode_token(row, t, tokens_per_decode, source, dst):
    """Of a decode row's token t its place, the block for the state after it, and whether it is computed.

    A token without a dst is padding, except the first one of a row that has a source.
    """
    token = row.to(tl.int64) * tokens_per_decode + t
    target = tl.load(dst + token)
    return token, target, (target != 0) | ((t == 0) & (source != 0))


@triton.jit
def chunk_tokens(chunk, query_start_loc, context_len, chunk_seq, chunk_start, seq_chunk_start, num_prefills):
    """A chunk's first token and how many it has: none if the table ends before it."""
    seq = tl.load(chunk_seq + chunk)
    start = tl.load(chunk_start + chunk)
    in_table = chunk < tl.load(seq_chunk_start + num_prefills)
    position = tl.load(context_len + seq) + start - tl.load(query_start_loc + seq)
    count = tl.minimum(tl.load(query_start_loc + seq + 1) - start, CHUNK - position % CHUNK)
    return start, tl.where(in_table, count, 0)


@triton.jit
def row_chunks(seq, query_start_loc, context_len, seq_chunk_start):
    """A row's first token and the one after its last; the same of its chunks; where its first chunk would begin."""
    start = tl.load(query_start_loc + seq)
    end = tl.load(query_start_loc + seq + 1)
    first_chunk = tl.load(seq_chunk_start + seq)
    last_chunk = tl.load(seq_chunk_start + seq + 1)
    return start, end, first_chunk, last_chunk, start - tl.load(context_len + seq) % CHUNK


@triton.jit
def clear_padding(out, query_start_loc, num_prefills, num_tokens, column, mask, WIDTH: tl.constexpr):
    """Zeros in columns of out [tokens, WIDTH] for the tokens that belong to no row."""
    step = tl.arange(0, CHUNK)
    for start in range(tl.load(query_start_loc + num_prefills), num_tokens, CHUNK):
        token = tl.cast(start, tl.int64) + step
        zeros = tl.zeros([CHUNK, column.shape[0]], out.dtype.element_ty)
        place = out + token[:, None] * WIDTH + column[None, :]
        tl.store(place, zeros, mask=(token < num_tokens)[:, None] & mask[None, :])
