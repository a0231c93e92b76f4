"""Call vLLM's kernels of Mamba1 and Mamba2, as `kernel_peers` does."""

from __future__ import annotations

from typing import Any

import torch
from kernel_peers import starts_of
from kernel_steps import Steps
from torch import Tensor

from mambacache.plan import FOLD


def ssd_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: None,
    dt_bias: Tensor,
    lengths: list[int],
) -> Any:
    """Return `call(pool, src, dst) -> y`: gather, then chunked kernels that write final states to `dst`."""
    from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen

    chunk = 128 if max(lengths) <= 128 else 256  # the faster of the two for these lengths
    counts = [-(-length // chunk) for length in lengths]
    sizes = [
        min(chunk, length - i * chunk) for length, count in zip(lengths, counts, strict=True) for i in range(count)
    ]
    owner = [row for row, count in enumerate(counts) for _ in range(count)]
    resumed = torch.ones(len(lengths), 1, 1, 1, dtype=torch.bool, device="cuda")
    options = {
        "chunk_size": chunk,
        "cu_seqlens": starts_of(lengths),
        "cu_chunk_seqlens": starts_of(sizes),
        "last_chunk_indices": starts_of(counts)[1:] - 1,
        "seq_idx": torch.tensor(owner, dtype=torch.int32, device="cuda"),
        "D": D,
        "dt_bias": dt_bias,
        "dt_softplus": True,
        "state_dtype": torch.float32,
    }
    out = torch.empty(x.shape, dtype=x.dtype, device="cuda")

    def call(pool: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        mamba_chunk_scan_combined_varlen(
            x,
            dt,
            A,
            B,
            C,
            out=out,
            initial_states=torch.where(resumed, pool[src], 0),
            final_states_out=pool,
            final_state_indices=dst.to(torch.int32),
            **options,
        )
        return out

    return call


def _of_channels(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, D: Tensor, dt_bias: Tensor) -> tuple[Tensor, ...]:
    """Return dt, A, D and dt_bias of Mamba2's heads as views with a value for each channel, as decode takes them."""
    heads, width, states = *x.shape[1:], B.shape[2]
    D, dt_bias = (each[:, None].expand(heads, width) for each in (D, dt_bias))
    return dt[:, :, None].expand_as(x), A[:, None, None].expand(heads, width, states), D, dt_bias


def ssd_decode(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor
) -> Any:
    """Return `call(pool, blocks [rows, 1]) -> y` for Mamba1 and Mamba2, in place."""
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

    if x.dim() == 3:
        dt, A, D, dt_bias = _of_channels(x, dt, A, B, D, dt_bias)
    out = torch.empty(x.shape, dtype=x.dtype, device="cuda")

    def call(pool: Tensor, blocks: Tensor) -> Tensor:
        selective_state_update(
            pool, x, dt, A, B, C, D, dt_bias, z, dt_softplus=True, state_batch_indices=blocks, out=out
        )
        return out

    return call


def ssd_replayed_decode(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None, dt_bias: Tensor, steps: Steps
) -> Any:
    """Return `call(pool, blocks [rows, 1]) -> y` for Mamba2 with `--use-replayssm`, in place.

    Inputs are kept beside a state, which is written after `FOLD` inputs. A row keeps as many inputs as its log in
    `steps`, or none in `Steps.as_peers`.
    """
    from vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only import (
        selective_state_update_replayssm_output_only,
    )

    (rows, heads, width), (groups, states) = x.shape, B.shape[1:]
    dt, A, D, dt_bias = _of_channels(x, dt, A, B, D, dt_bias)
    out = torch.empty(x.shape, dtype=x.dtype, device="cuda")
    kept = {
        "x_cache": torch.randn(steps.blocks, heads, FOLD, width, dtype=x.dtype, device="cuda"),
        "dt_cache": torch.full([steps.blocks, heads, FOLD], 0.3, device="cuda"),
        "B_cache": torch.randn(steps.blocks, groups, FOLD, states, dtype=x.dtype, device="cuda"),
        "bc_pre": torch.empty(rows, groups, FOLD, device="cuda"),
    }
    full = steps.ends == FOLD - 1
    in_steps, alone = (steps.ends, full), (torch.zeros_like(steps.ends), torch.ones_like(full))

    def call(pool: Tensor, blocks: Tensor) -> Tensor:
        write_pos, is_flush = alone if steps.indices is steps.without_logs else in_steps
        return selective_state_update_replayssm_output_only(
            pool, x, dt, A, B, C, D, dt_bias, z, dt_softplus=True, **kept, write_pos=write_pos, is_flush=is_flush,
            max_cache_len=FOLD, state_batch_indices=blocks, out=out,
        )  # fmt: skip

    return call


def selective_scan_prefill(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    lengths: list[int],
) -> Any:
    """Return `call(pool, src, dst) -> y` of vLLM's CUDA kernel, in place in `src`, with y over z and channels first."""
    import vllm._C_stable_libtorch  # noqa: F401  (registers the op)
    from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_scan_fn

    x, dt, z, B, C = (part.t().contiguous() for part in (x, dt, z, B, C))
    options = {
        "query_start_loc": starts_of(lengths),
        "has_initial_state": torch.ones(len(lengths), dtype=torch.bool, device="cuda"),
    }

    def call(pool: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        blocks = src.to(torch.int32)
        y = selective_scan_fn(x, pool, dt, A, B[None], C[None], D, z, dt_bias, True, cache_indices=blocks, **options)
        return y.t()

    return call
