"""Run Kimi Delta Attention over the prefill rows of a batch, in two launches: see README.md.

The first computes operands of all chunks at once, the second carries the states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import is_hopper, processors
from ...indices import StateIndices
from ..common.chunks import CHUNK_ARRAYS, ROW_ARRAYS, keep_busy
from ..common.delta_rule import scan_tile
from ..common.hopper import served
from ..common.launch import index_pointers
from ..common.layout import cdiv, layer_strides, power_of_2, slot_stride
from .prefill_hopper_persistent import MIN_TURNS, persistent_scan
from .prefill_hopper_prepare import prepare as hopper_prepare
from .prefill_hopper_scan import scan as hopper_scan
from .prefill_triton import prepare as triton_prepare
from .prefill_triton import scan as triton_scan


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    indices: StateIndices,
    out: Tensor,
) -> None:
    """Fill prefill and padding tokens of `out` [F, H, V] and store states at `chunk_dst`.

    Scratch per head, in bytes: 256 + 6 K a token for 16 bits, else 512 + 12 K, and 4 K + 4 a chunk.
    """
    num_tokens, heads, K = q.shape
    V, num_chunks, num_prefills = v.shape[2], indices.chunk_seq.shape[0], indices.num_prefills
    q_strides, k_strides, v_strides, g_strides, b_strides = layer_strides(q, k, v, g, b)
    hopper = num_chunks and K <= 128 and served((q, k, v, g), (q_strides, k_strides, v_strides, g_strides))
    device = q.get_device()
    portable, narrow = not is_hopper(device), q.element_size() == 2
    concurrent = max(processors(device), 1)  # a processor runs one program of 128 lines
    few = heads * cdiv(V, 64) * num_prefills <= concurrent
    # With three operands a tile of 128 lines takes more shared memory than small GPUs have.
    block_V, warps = scan_tile(64 if portable else V, few, narrow, device)
    tiles_of_row = heads * cdiv(V, block_V)

    tiles = q.new_empty(2 * num_tokens * heads * 64)  # inverse and scores
    operands = q.new_empty(3 * num_tokens * heads * K)  # k_in, q_in and k_out
    totals = q.new_empty(num_chunks * heads * K, dtype=torch.float32)  # decay
    first = q, k, g, b, A_log, dt_bias, tiles, operands, totals
    second = v, tiles, operands, totals, state, out
    chunks, rows = index_pointers(indices, CHUNK_ARRAYS), index_pointers(indices, ROW_ARRAYS)
    numbers = num_prefills, slot_stride(state), num_tokens
    # With fewer fp32 channels, ptxas 12.8 (Triton 3.6) reads a register that nothing wrote: see `tests/sass.py`.
    block_K = power_of_2(K if narrow else max(K, 64))
    shape = {"HEADS": heads, "K": K, "BLOCK_K": block_K}
    layout = shape | {"STRIDES": (q_strides, k_strides, g_strides), "B_STRIDES": b_strides}
    tiling = shape | {"V": V, "BLOCK_V": block_V, "V_STRIDES": v_strides, "OUT_STRIDE": out.stride(0)}
    if hopper:
        flags = q.new_empty(1 + heads * num_chunks, dtype=torch.int32)  # `persistent_scan` counts turns in the first
        # A second launch of few programs runs beside the first, which leaves it room.
        room = concurrent + concurrent // 2 if few else 3 * concurrent
        counts = num_prefills, num_tokens, num_chunks
        hopper_prepare(min(heads * num_chunks, room), (*first, flags), chunks, counts, layout, num_warps=4, maxnreg=168)
        arguments = (*second, flags), rows, numbers
        if tiles_of_row * num_prefills >= MIN_TURNS * concurrent and keep_busy(indices, tiles_of_row, concurrent):
            persistent_scan(concurrent, *arguments, tiling, num_warps=warps, launch_pdl=True)
            return
        tiling |= {"CONCURRENT": concurrent, "STAGES": 2 if few else 3}
        programs = tiles_of_row * (num_prefills + 1)
        hopper_scan(programs, *arguments, tiling, num_warps=warps, launch_pdl=True)
    else:
        registers = 255 if portable else None
        if num_chunks:
            if portable:
                width, prepare_warps = (32, 4) if narrow else (16, 8)
            else:
                width, prepare_warps = 128 if narrow else 64, 4
            layout |= {"BLOCK_C": min(block_K, width)}
            counts = num_prefills, num_tokens
            programs = heads * num_chunks
            triton_prepare(programs, first, chunks, counts, layout, num_warps=prepare_warps, maxnreg=registers)
        stages = 2 if portable and narrow and K <= 128 else 1
        tiling |= {"CONCURRENT": concurrent, "STAGES": stages}
        programs = tiles_of_row * (num_prefills + 1)
        triton_scan(programs, second, rows, numbers, tiling, num_warps=warps, maxnreg=registers)
