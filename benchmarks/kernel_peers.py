"""The same work by vLLM's kernels: what its layers call, with gates, gather and scatter of the states included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HOW_TO_GET_IT = "pip install vllm==0.33.0"


def delta_rule_prefill(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    heads: tuple[int, int, int, int],
    lengths: list[int],
) -> Any:
    """`call(pool, src, dst) -> y`: gates and norms, states gathered, the chunked kernels, states scattered."""
    from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep

    key_heads, _, key_width, value_width = heads
    counts = [-(-length // 64) for length in lengths]
    starts, chunk_starts = (_starts(sizes) for sizes in (lengths, counts))
    chunks = [(row, chunk) for row, count in enumerate(counts) for chunk in range(count)]
    chunk_indices = torch.tensor(chunks, dtype=torch.int32, device="cuda")
    resumed = torch.ones(len(lengths), 1, 1, 1, dtype=torch.bool, device="cuda")

    def call(pool: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        q, k, v, g, beta = fused_post_conv_prep(
            conv_output=qkv,
            a=a,
            b=b,
            A_log=A_log,
            dt_bias=dt_bias,
            num_k_heads=key_heads,
            head_k_dim=key_width,
            head_v_dim=value_width,
        )
        y, final = chunk_gated_delta_rule(
            q[None],
            k[None],
            v[None],
            g[None],
            beta[None],
            initial_state=torch.where(resumed, pool[src], 0),
            output_final_state=True,
            cu_seqlens=starts,
            chunk_indices=chunk_indices,
            chunk_offsets=chunk_starts,
            use_qk_l2norm_in_kernel=False,
        )
        pool[dst] = final.to(pool.dtype)
        return y[0]

    return call


def delta_rule_decode(
    qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, heads: tuple[int, int, int, int], rows: int
) -> Any:
    """`call(pool, blocks [rows, T]) -> y`: T tokens a row; states are read from the first block of a row."""
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update

    key_heads, value_heads, key_width, value_width = heads
    if len(qkv) == rows:
        out = qkv.new_empty(rows, 1, value_heads, value_width)

        def decode(pool: Tensor, blocks: Tensor) -> Tensor:
            return fused_recurrent_gated_delta_rule_packed_decode(
                qkv, a, b, A_log, dt_bias, key_width**-0.5, pool, out, blocks[:, 0], use_qk_l2norm_in_kernel=True
            )[0][:, 0]

        return decode

    sizes = [key_heads * key_width, key_heads * key_width, value_heads * value_width]
    q, k, v = (part.contiguous() for part in qkv.split(sizes, dim=1))  # not timed: it would copy views in every call
    starts = _starts([len(qkv) // rows] * rows)
    accepted = torch.ones(rows, dtype=torch.int32, device="cuda")

    def verify(pool: Tensor, blocks: Tensor) -> Tensor:
        return fused_sigmoid_gating_delta_rule_update(
            A_log=A_log,
            a=a,
            b=b,
            dt_bias=dt_bias,
            q=q.unflatten(1, (key_heads, key_width))[None],
            k=k.unflatten(1, (key_heads, key_width))[None],
            v=v.unflatten(1, (value_heads, value_width))[None],
            initial_state=pool,
            cu_seqlens=starts,
            ssm_state_indices=blocks,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )[0][0]

    return verify


def conv_prefill(x: Tensor, weight: Tensor, lengths: list[int], *, build_metadata: bool) -> Any:
    """`call(pool, blocks) -> y`, in place; with `build_metadata` it makes its own, as when it is given none."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    starts = _starts(lengths)
    resumed = torch.ones(len(lengths), dtype=torch.bool, device="cuda")
    names = ("nums_dict", "batch_ptr", "token_chunk_offset_ptr")
    values = compute_causal_conv1d_metadata(starts.cpu(), device=x.device)
    metadata = None if build_metadata else SimpleNamespace(**dict(zip(names, values, strict=True)))

    def call(pool: Tensor, blocks: Tensor) -> Tensor:
        return causal_conv1d_fn(
            x.t(), weight, None, pool.mT, starts, blocks, resumed, activation="silu", metadata=metadata
        ).t()

    return call


def conv_decode(x: Tensor, weight: Tensor) -> Any:
    """`call(pool, blocks) -> y`, in place; the outputs take the place of a copy of the inputs."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    out = torch.empty_like(x)

    def call(pool: Tensor, blocks: Tensor) -> Tensor:
        return causal_conv1d_update(x, pool.mT, weight, None, "silu", conv_state_indices=blocks, out=out)

    return call


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Any:
    """`call() -> y`: norm of x, times the gate's SiLU."""
    from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layer_norm_fwd

    out = torch.empty_like(x)

    def call() -> Tensor:
        rows = [tensor.reshape(-1, x.shape[-1]) for tensor in (x, gate, out)]
        layer_norm_fwd(rows[0], weight, None, eps, z=rows[1], out=rows[2], is_rms_norm=True)
        return out

    return call


def _starts(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)
