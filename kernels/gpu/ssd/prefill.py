"""Run prefill in one launch for bf16 on a Hopper, else in two."""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import is_hopper, processors
from ...indices import StateIndices
from ..common.chunks import CHUNK, CHUNK_ARRAYS, ROW_ARRAYS
from ..common.hopper import served
from ..common.launch import index_pointers
from ..common.layout import cdiv, layer_strides, power_of_2, slot_stride
from . import prefill_hopper, prefill_triton
from .prefill_triton import HEADS_PER_PROGRAM, ROWS


def prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    indices: StateIndices,
    dt_limit: tuple[float, float],
    out: Tensor,
) -> None:
    """Fill prefill and padding tokens of `out` [F, H, P] and store states at `chunk_dst`.

    Scratch of two launches: 136 bytes per token and head for 16-bit activations, else 264.
    """
    num_tokens, heads, P = x.shape
    groups, N = B.shape[1:]
    x_strides, B_strides, C_strides, z_strides = layer_strides(x, B, C, x if z is None else z)
    constants = {
        "X_STRIDES": x_strides,
        "B_STRIDES": B_strides,
        "C_STRIDES": C_strides,
        "Z_STRIDES": z_strides,
        "OUT_STRIDE": out.stride(0),
        "HEADS": heads,
        "GROUPS": groups,
        "P": P,
        "N": N,
        "BLOCK_N": power_of_2(N),
    }
    numbers = indices.num_prefills, slot_stride(state), num_tokens
    tiles = heads * cdiv(P, ROWS.value)
    rows = index_pointers(indices, ROW_ARRAYS)
    device = x.get_device()
    concurrent = processors(device)
    if N <= 128 and served((x, B, C), (x_strides, B_strides, C_strides)):
        # Two programs share a processor unless all can have their own.
        stages, shared = (4, 1) if tiles * indices.num_prefills <= concurrent else (2, 2)
        prefill_hopper.scan(
            tiles * (indices.num_prefills + 1),
            (x, dt, A, B, C, D, z, dt_bias, state, out),
            rows,
            (*numbers, *dt.stride(), *map(float, dt_limit)),
            {**constants, "STAGES": stages, "CONCURRENT": shared * concurrent},
            num_warps=4,
        )
        return
    portable, narrow = not is_hopper(device), x.element_size() == 2
    scores = x.new_empty(num_tokens * heads * CHUNK.value)
    vectors = x.new_empty(2 * num_tokens * heads, dtype=torch.float32)
    parts = groups * cdiv(heads // groups, HEADS_PER_PROGRAM)
    num_chunks = indices.chunk_seq.shape[0]
    if num_chunks:
        prefill_triton.prepare(
            parts * num_chunks,
            (B, C, dt, A, dt_bias, D, scores, vectors),
            index_pointers(indices, CHUNK_ARRAYS),
            (indices.num_prefills, *dt.stride(), *map(float, dt_limit), num_tokens),
            {
                "B_STRIDES": B_strides,
                "C_STRIDES": C_strides,
                "HEADS": heads,
                "GROUPS": groups,
                "N": N,
                "BLOCK_N": power_of_2(N),
                "BLOCK_H": HEADS_PER_PROGRAM,
            },
            num_warps=(2 if N <= 128 else 4) if narrow else 8,
            maxnreg=168 if narrow else 255,
        )
    if not portable:
        block_P, warps, stages = ROWS.value, 4, (3 if N <= 128 else 2) if narrow else 1
    elif narrow and N <= 128:
        block_P, warps, stages = ROWS.value, 4, 2
    else:
        block_P, warps, stages = 32, 4 if narrow else 8, 1
    prefill_triton.scan(
        heads * cdiv(P, block_P) * (indices.num_prefills + 1),
        (x, B, C, z, scores, vectors, state, out),
        rows,
        numbers,
        {**constants, "BLOCK_P": block_P, "STAGES": stages, "CONCURRENT": 2 * concurrent, "HOPPER": not portable},
        num_warps=warps,
        maxnreg=255 if portable else None,
    )
