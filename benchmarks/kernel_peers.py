"""Call vLLM's kernels as its layers do, with gates, and gather and scatter of states.

`VLLM` stands for vLLM's kernels, `FLASHINFER` for FlashInfer's, which vLLM prefers on Hopper.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VLLM, FLASHINFER = "vLLM", "FlashInfer"
HOW_TO_GET = {VLLM: "pip install vllm==0.33.0", FLASHINFER: "pip install flashinfer-python==0.7.2.post1"}


def activate_flashinfer() -> None:
    """Activate FlashInfer's prefill from a path without its package, after vLLM has searched for the package."""
    with suppress(ImportError):
        import vllm.utils.flashinfer  # noqa: F401, I001
        from vllm.model_executor.kernels.linear.cute_dsl.ll_bf16 import is_available

        import fi_gdn

        is_available()

        fi_gdn.activate()


@cache
def flashinfer_version() -> str | None:
    """Return FlashInfer's version, or None; first import the parts of vLLM that search for it or its compiler."""
    try:
        import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn
        import vllm.models.kimi_k3.nvidia.ops.third_party.kda  # noqa: F401

        activate_flashinfer()
        import flashinfer.gdn_prefill
    except ImportError:
        return None
    return flashinfer.__version__


def delta_rule_prefill(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    heads: tuple[int, int, int],
    lengths: list[int],
) -> dict[str, Any]:
    """Return `call(pool, src, dst) -> y` for each peer: gates, norms, gather and mask, chunked kernels, scatter.

    The mask is not an index as in vLLM, which would synchronise with the device.
    """
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import fi_chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule
    from vllm.third_party.flash_linear_attention.ops.fused_gdn_prefill_post_conv import fused_post_conv_prep

    key_heads, key_width, value_width = heads
    counts = [-(-length // 64) for length in lengths]
    starts, chunk_starts = (starts_of(sizes) for sizes in (lengths, counts))
    chunks = [(row, chunk) for row, count in enumerate(counts) for chunk in range(count)]
    chunk_indices = torch.tensor(chunks, dtype=torch.int32, device="cuda")
    resumed = torch.ones(len(lengths), 1, 1, 1, dtype=torch.bool, device="cuda")

    def prefill(kernels: Any, pool: Tensor, src: Tensor, dst: Tensor) -> Tensor:
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
        y, final = kernels(
            q[None],
            k[None],
            v[None],
            g[None],
            beta[None],
            initial_state=torch.where(resumed, pool[src], 0),
            output_final_state=True,
            cu_seqlens=starts,
            use_qk_l2norm_in_kernel=False,
        )
        pool[dst] = final.to(pool.dtype)
        return y[0]

    kernels = {VLLM: partial(chunk_gated_delta_rule, chunk_indices=chunk_indices, chunk_offsets=chunk_starts)}
    if flashinfer_version():
        kernels[FLASHINFER] = fi_chunk_gated_delta_rule
    return {name: partial(prefill, each) for name, each in kernels.items()}


def delta_rule_decode(
    qkv: Tensor, sections: list[Tensor], a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, rows: int
) -> Any:
    """Return `call(pool, blocks [rows, T]) -> y` for rows of T tokens; states come from a row's first block.

    Args:
        sections: dense q, k and v.
    """
    from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
        fused_recurrent_gated_delta_rule_packed_decode,
    )
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update

    q, k, v = sections
    scale = q.shape[-1] ** -0.5
    if len(qkv) == rows:
        out = torch.empty_like(v)[:, None]

        def decode(pool: Tensor, blocks: Tensor) -> Tensor:
            return fused_recurrent_gated_delta_rule_packed_decode(
                qkv, a, b, A_log, dt_bias, scale, pool, out, blocks[:, 0], use_qk_l2norm_in_kernel=True
            )[0][:, 0]

        return decode

    starts = starts_of([len(qkv) // rows] * rows)
    accepted = torch.ones(rows, dtype=torch.int32, device="cuda")

    def verify(pool: Tensor, blocks: Tensor) -> Tensor:
        return fused_sigmoid_gating_delta_rule_update(
            A_log=A_log,
            a=a,
            b=b,
            dt_bias=dt_bias,
            q=q[None],
            k=k[None],
            v=v[None],
            initial_state=pool,
            cu_seqlens=starts,
            ssm_state_indices=blocks,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )[0][0]

    return verify


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lengths: list[int],
) -> Any:
    """Return `call(pool, src, dst) -> y`: gather, chunked kernels with gates and norms, scatter.

    q, k and v are made dense, as vLLM's three convolutions return them.
    """
    from vllm.model_executor.layers.mamba.ops.gather_initial_states import gather_initial_states
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import chunk_kda_with_fused_gate

    q, k, v = (x.contiguous()[None] for x in (q, k, v))
    starts, resumed = starts_of(lengths), torch.ones(len(lengths), dtype=torch.bool, device="cuda")

    def call(pool: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        y, final = chunk_kda_with_fused_gate(
            q=q,
            k=k,
            v=v,
            raw_g=g[None],
            raw_beta=b[None],
            A_log=A_log,
            g_bias=dt_bias,
            initial_state=gather_initial_states(pool, src, resumed),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=starts,
        )
        pool[dst] = final
        return y[0]

    return call


def kda_decode(
    qkv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    rows: int,
) -> Any:
    """Return `call(pool, blocks [rows, T]) -> y` for rows of T tokens; states come from a row's first block."""
    from vllm.models.kimi_k3.nvidia.ops.third_party.kda import fused_recurrent_kda, fused_recurrent_kda_packed_decode

    gates = {"raw_g": g[None], "raw_beta": b[None], "A_log": A_log, "dt_bias": dt_bias, "lower_bound": None}
    if len(qkv) == rows:

        def decode(pool: Tensor, blocks: Tensor) -> Tensor:
            y, _ = fused_recurrent_kda_packed_decode(
                mixed_qkv=qkv, **gates, initial_state=pool, state_indices=blocks[:, 0]
            )
            return y.reshape(v.shape)

        return decode

    starts = starts_of([len(qkv) // rows] * rows)
    accepted = torch.ones(rows, dtype=torch.int32, device="cuda")

    def verify(pool: Tensor, blocks: Tensor) -> Tensor:
        y, _ = fused_recurrent_kda(
            q=q[None],
            k=k[None],
            v=v[None],
            **gates,
            initial_state=pool,
            cu_seqlens=starts,
            ssm_state_indices=blocks,
            num_accepted_tokens=accepted,
        )
        return y[0]

    return verify


def conv_prefill(x: Tensor, weight: Tensor, lengths: list[int], *, build_metadata: bool) -> Any:
    """Return `call(pool, blocks) -> y`, in place; with `build_metadata` each call builds its metadata."""
    convolve = _convolution(weight, lengths, "silu", build_metadata)
    return lambda pool, blocks: convolve(x, pool, blocks)


def short_conv_prefill(x: Tensor, input_gate: Tensor, output_gate: Tensor, weight: Tensor, lengths: list[int]) -> Any:
    """Return `call(pool, blocks) -> y`, in place, with the layer's gates."""
    convolve = _convolution(weight, lengths, None, build_metadata=False)
    return lambda pool, blocks: output_gate * convolve(input_gate * x, pool, blocks)


def _convolution(weight: Tensor, lengths: list[int], activation: str | None, build_metadata: bool) -> Any:
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn
    from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

    starts = starts_of(lengths)
    resumed = torch.ones(len(lengths), dtype=torch.bool, device="cuda")
    names = ("nums_dict", "batch_ptr", "token_chunk_offset_ptr")
    values = compute_causal_conv1d_metadata(starts.cpu(), device=weight.device)
    metadata = None if build_metadata else SimpleNamespace(**dict(zip(names, values, strict=True)))

    def convolve(x: Tensor, pool: Tensor, blocks: Tensor) -> Tensor:
        return causal_conv1d_fn(
            x.t(), weight, None, pool.mT, starts, blocks, resumed, activation=activation, metadata=metadata
        ).t()

    return convolve


def conv_decode(x: Tensor, weight: Tensor) -> Any:
    """Return `call(pool, blocks) -> y`, in place, with outputs in a separate buffer."""
    from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_update

    out = torch.empty_like(x)

    def call(pool: Tensor, blocks: Tensor) -> Tensor:
        return causal_conv1d_update(x, pool.mT, weight, None, "silu", conv_state_indices=blocks, out=out)

    return call


def attention(
    q: Tensor, k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, indices: Any, length: int
) -> Any:
    """Return `call() -> y`, which writes keys and values to pages and runs FlashAttention 3; rows have `length`."""
    from vllm._custom_ops import reshape_and_cache_flash
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    rows, longest = len(table), table.shape[1] * key_pages.shape[1]
    starts, slots, one = starts_of([length] * rows), indices.kv_slot.long(), torch.ones((), device="cuda")
    out = torch.empty_like(q, memory_format=torch.contiguous_format)

    def call() -> Tensor:
        reshape_and_cache_flash(k, v, key_pages, value_pages, slots, "auto", one, one)
        flash_attn_varlen_func(
            q,
            key_pages,
            value_pages,
            max_seqlen_q=length,
            cu_seqlens_q=starts,
            max_seqlen_k=longest,
            seqused_k=indices.kv_len,
            causal=True,
            block_table=table,
            out=out,
            fa_version=3,
        )
        return out

    return call


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Any:
    """Return `call() -> y`, the norm of x times the gate's SiLU."""
    from vllm.third_party.flash_linear_attention.ops.layernorm_guard import layer_norm_fwd

    out = torch.empty_like(x)

    def call() -> Tensor:
        rows = [tensor.reshape(-1, x.shape[-1]) for tensor in (x, gate, out)]
        layer_norm_fwd(rows[0], weight, None, eps, z=rows[1], out=rows[2], is_rms_norm=True)
        return out

    return call


def starts_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes], device="cuda").cumsum(0).to(torch.int32)
