"""Choose the form of prefill.

A chunk has 64 tokens, the lines of q, k and v. It takes the state S [V, K] of a value head through

    u = inverse (v - key_decay * (k S^T));  o = query_decay * (q S^T) + scores u;  S = decay S + (to_end * u)^T k

The first launch computes `inverse`, `scores` and the vectors of all chunks. The second carries states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import is_hopper, processors
from ...indices import StateIndices
from ..common.chunks import CHUNK, CHUNK_ARRAYS, ROW_ARRAYS, keep_busy
from ..common.delta_rule import scan_tile
from ..common.hopper import served
from ..common.launch import index_pointers
from ..common.layout import cdiv, layer_strides, power_of_2, slot_stride
from . import prefill_hopper_fused, prefill_hopper_prepare, prefill_hopper_scan, prefill_triton


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    indices: StateIndices,
    beta_scale: float,
    out: Tensor,
) -> None:
    """Fill prefill and padding tokens of `out` [F, HV, V] and store states at `chunk_dst`.

    Scratch of two launches: 272 bytes per token and value head for 16-bit activations, 528 for fp32; 4 per chunk
    and value head.
    """
    num_tokens, heads, K = q.shape
    value_heads, V = v.shape[1:]
    num_prefills, num_chunks = indices.num_prefills, indices.chunk_seq.shape[0]
    q_strides, k_strides, v_strides, a_strides, b_strides = layer_strides(q, k, v, a, b)
    keys = {"Q_STRIDES": q_strides, "K_STRIDES": k_strides}
    gates = {"A_STRIDES": a_strides, "B_STRIDES": b_strides}
    shape = {"HEADS": heads, "VALUE_HEADS": value_heads, "K": K, "BLOCK_K": power_of_2(K)}
    chunks, rows = index_pointers(indices, CHUNK_ARRAYS), index_pointers(indices, ROW_ARRAYS)
    numbers = num_prefills, slot_stride(state), num_tokens
    hopper = K <= 128 and served((q, k, v), (q_strides, k_strides, v_strides))
    hopper_prepare = hopper and beta_scale <= 1
    device = q.get_device()
    concurrent = processors(device)  # a program of 128 lines each
    few = value_heads * cdiv(V, 64) * num_prefills <= concurrent
    portable, narrow = not is_hopper(device), q.element_size() == 2
    block_V, warps = scan_tile(V, few, narrow, device)
    tiles_of_row = value_heads * cdiv(V, block_V)

    # One launch takes nearly twice the second's time per chunk: it needs busy processors.
    if (
        hopper_prepare
        and block_V == prefill_hopper_fused.BLOCK_V.value
        and keep_busy(indices, tiles_of_row, max(concurrent, 1))
    ):
        prefill_hopper_fused.fused(
            max(min(tiles_of_row * num_prefills, concurrent), 1),
            (q, k, v, a, b, A_log, dt_bias, state, out),
            rows,
            numbers,
            {**keys, "V_STRIDES": v_strides, **gates, "OUT_STRIDE": out.stride(0), **shape, "V": V},
            num_warps=prefill_hopper_fused.CARRYING.value,
        )
        return

    tiles = q.new_empty(2 * num_tokens * value_heads * CHUNK.value)
    vectors = q.new_empty(4 * num_tokens * value_heads, dtype=torch.float32)
    tasks = value_heads * num_chunks
    flags = q.new_empty(tasks, dtype=torch.int32) if hopper_prepare and tasks else None
    if flags is not None:
        # A second launch of few programs needs room beside these.
        programs = concurrent + concurrent // 2 if few else 3 * concurrent
        prefill_hopper_prepare.prepare(
            min(tasks, max(programs, 1)),
            (q, k, a, b, A_log, dt_bias, tiles, vectors, flags),
            chunks,
            (num_prefills, num_tokens, num_chunks),
            # A late second launch finds the chunks prepared last in the L2 cache.
            {**keys, **gates, **shape, "BACKWARDS": not few},
            num_warps=4,
            maxnreg=168,
        )
    elif tasks:
        prefill_triton.prepare(
            tasks,
            (q, k, a, b, A_log, dt_bias, tiles, vectors),
            chunks,
            (num_prefills, num_tokens),
            {"BETA_SCALE": beta_scale, **keys, **gates, **shape},
            num_warps=4 if narrow or not portable else 8,
            maxnreg=255 if portable else 128,
        )

    programs = tiles_of_row * (num_prefills + 1)
    tensors = q, k, v, tiles, vectors, state, out
    constants = {**keys, "V_STRIDES": v_strides, "OUT_STRIDE": out.stride(0), **shape, "V": V, "BLOCK_V": block_V}
    if hopper:
        prefill_hopper_scan.scan(
            programs,
            (*tensors, flags),
            rows,
            numbers,
            constants | {"CONCURRENT": 0 if few else concurrent},
            num_warps=warps,
            launch_pdl=flags is not None,
        )
    else:
        stages = (2 if K <= 128 else 1) + (not portable) if narrow else 1
        prefill_triton.scan(
            programs,
            tensors,
            rows,
            numbers,
            constants | {"CONCURRENT": concurrent, "STAGES": stages},
            num_warps=warps,
            maxnreg=255 if portable else None,  # ptxas gives the widest tile 32 on an A100
        )
