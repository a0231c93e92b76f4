"""Define the ops. A call reads src states of a mixed batch of F tokens and writes dst states in place.

A pool has `blocks` blocks, any multiple of 16 bytes apart; only dst blocks are written. Decode rows also use a token
log (`logs`). Padding tokens get zeros. A result has the shape and dtype of x or v unless noted. `out`, if given,
receives it: its tokens are dense, any stride apart, and overlap no other argument. Ops raise ValueError if arguments do
not fit together.

Activations and states are fp32, bf16, fp16 or float64; compute is fp32, or float64 where both are. Head widths K, V, P
and N are multiples of 16 up to 256. Where head counts differ, the larger is a multiple, and consecutive heads share a
head.

Prefill cuts chunks at absolute multiples of 64; a 16-bit state is rounded there, stored or not, and at folds. Decode's
bits do not depend on how tokens are cut into steps.

Triton serves a GPU and needs inputs dense in the last dim; torch serves a CPU and float64. bf16 prefill rounds operands
of products, states included; log decays of `kda` are then within 1e-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from .backend import backend
from .checks import (
    ACTIVATION_DTYPES,
    check_blocks,
    check_delta_rule,
    check_devices,
    check_dtype,
    check_head_widths,
    check_log,
    check_one_of,
    check_out,
    check_pool,
    check_rank,
    check_shape,
    check_tokens,
)
from .indices import StateIndices
from .logs import conv1d_log, gated_delta_rule_log, kda_log, selective_scan_log, ssd_log


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    log: Tensor | None,
    indices: StateIndices,
    activation: str | None = "silu",
    input_gate: Tensor | None = None,
    output_gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve causally, channel by channel: y_t = act(bias + sum_i weight[:, i] x_{t-W+1+i}).

    Shapes: x [F, dim], weight [dim, W], W 2 to 4, bias [dim]; state [blocks, W - 1, dim], the last raw (or gated)
    inputs, in x's dtype. `activation` is "silu" or None. `input_gate` multiplies x_t, `output_gate` the rounded y_t,
    both like x (LFM2, Liquid AI 2025); these products are rounded to x's dtype.
    """
    check_rank("x", x, "F, dim")
    check_rank("weight", weight, "dim, W")
    check_rank("state", state, "blocks, W - 1, dim")
    check_dtype("x", x, *ACTIVATION_DTYPES)
    check_dtype("state", state, x.dtype)
    check_one_of("The width of the convolution", weight.shape[1], 2, 3, 4)
    check_one_of("activation", activation, "silu", None)
    check_tokens("x", x, indices)
    dim = x.shape[1]
    check_shape("weight", weight, dim, weight.shape[1])
    if bias is not None:
        check_shape("bias", bias, dim)
    for name, gate in (("input_gate", input_gate), ("output_gate", output_gate)):
        if gate is not None:
            check_shape(name, gate, *x.shape)
            check_dtype(name, gate, x.dtype)
    check_shape("state", state, state.shape[0], weight.shape[1] - 1, dim)
    check_pool(state)
    if out is not None:
        check_out(out, x, *x.shape)
    check_devices(indices, x=x, weight=weight, bias=bias, state=state, input_gate=input_gate, output_gate=output_gate)
    check_log([] if log is None else [log], [conv1d_log(dim, x.dtype)], indices)
    return backend(x).conv1d(x, weight, bias, state, log, indices, activation, input_gate, output_gate, out)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    beta_scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Apply the gated delta rule (Gated Delta Networks, Yang, Kautz and Hatamizadeh 2024) with gates and norms of q, k.

    Shapes: q, k [F, H, K] and v [F, HV, V] from the convolution, of one dtype; a, b [F, HV]; A_log, dt_bias [HV]; state
    [blocks, HV, V, K]. `beta_scale` 2 allows negative eigenvalues.

    With q and k divided by sqrt(sum x^2 + 1e-6), g = -exp(A_log) softplus(a + dt_bias) and beta = beta_scale
    sigmoid(b):

        u_t = beta_t (v_t - e^g_t S_{t-1} k_t);  S_t = e^g_t S_{t-1} + u_t k_t^T;  o_t = S_t q_t / sqrt(K)

    Prefill uses the WY form (Parallelizing Linear Transformers with the Delta Rule, Yang et al. 2024). In bf16 it is
    inexact where beta is near 2, keys are nearly parallel and nothing decays: by 0.15 of the outputs' RMS after 4,000
    tokens at beta = 1.9993 and key cosines of 0.99.
    """
    check_delta_rule(q, k, v, state, indices)
    tokens, value_heads = v.shape[:2]
    check_shape("a", a, tokens, value_heads)
    check_shape("b", b, tokens, value_heads)
    check_shape("A_log", A_log, value_heads)
    check_shape("dt_bias", dt_bias, value_heads)
    if out is not None:
        check_out(out, v, *v.shape)
    check_devices(indices, q=q, k=k, v=v, a=a, b=b, A_log=A_log, dt_bias=dt_bias, state=state)
    check_log(
        log, gated_delta_rule_log(*q.shape[1:2], *v.shape[1:2], q.shape[2], v.shape[2], q.dtype, state.dtype), indices
    )
    return backend(q).gated_delta_rule(q, k, v, a, b, A_log, dt_bias, state, log, indices, beta_scale, out)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    out: Tensor | None = None,
) -> Tensor:
    """Apply Kimi Delta Attention (Kimi Linear, Kimi Team 2025) with gates and norms of q, k.

    Shapes: g [F, H, K] before bias and softplus; b [F, H]; A_log [H]; dt_bias [H, K] or [H * K]; others as in
    `gated_delta_rule`, with HV = H.

    With q, k and beta as there, beta_scale 1, and d = -exp(A_log) softplus(g + dt_bias), without a lower bound:

        u_t = beta_t (v_t - S_{t-1} (e^d_t k_t));  S_t = S_{t-1} diag(e^d_t) + u_t k_t^T;  o_t = S_t q_t / sqrt(K)
    """
    check_delta_rule(q, k, v, state, indices)
    tokens, heads, key_width = q.shape
    check_shape("v", v, tokens, heads, v.shape[2])
    check_shape("g", g, tokens, heads, key_width)
    check_shape("b", b, tokens, heads)
    check_shape("A_log", A_log, heads)
    check_shape("dt_bias", dt_bias, *((heads, key_width) if dt_bias.dim() == 2 else (heads * key_width,)))
    if out is not None:
        check_out(out, v, *v.shape)
    check_devices(indices, q=q, k=k, v=v, g=g, b=b, A_log=A_log, dt_bias=dt_bias, state=state)
    check_log(log, kda_log(heads, key_width, v.shape[2], q.dtype, state.dtype), indices)
    return backend(q).kda(q, k, v, g, b, A_log, dt_bias, state, log, indices, out)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str = "silu",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    round_normed: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Apply `rms_norm` with a gate: norm(x) weight act(gate), or norm(x act(gate)) weight.

    Shapes: x and gate [..., dim], weight [dim]. `activation` is "silu" or "sigmoid". `norm_before_gate=False` gates
    first (Mamba2). Each group of `group_size` channels (None: dim) has a mean square.
    """
    check_dtype("x", x, *ACTIVATION_DTYPES)
    check_one_of("activation", activation, "silu", "sigmoid")
    check_shape("gate", gate, *x.shape)
    check_shape("weight", weight, x.shape[-1])
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(f"group_size is {group_size}, but it must divide the width {x.shape[-1]}.")
    if out is not None:
        check_out(out, x, *x.shape)
    if not x.device == gate.device == weight.device:
        raise ValueError(f"x, gate and weight are on {x.device}, {gate.device} and {weight.device}: move them to one.")
    return backend(x).gated_rms_norm(x, gate, weight, eps, activation, norm_before_gate, group_size, round_normed, out)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, round_normed: bool, out: Tensor | None = None) -> Tensor:
    """Apply RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) weight, over the last dim.

    Shapes: x [..., dim], weight [dim]. `round_normed` rounds the normalised value to x's dtype, then multiplies in the
    common dtype of x and weight, as Llama does. Otherwise only the result is rounded, to x's dtype.
    """
    check_dtype("x", x, *ACTIVATION_DTYPES)
    if weight is not None:
        check_shape("weight", weight, x.shape[-1])
        if x.device != weight.device:
            raise ValueError(f"x is on {x.device} and weight on {weight.device}: move them to one.")
    if out is not None:
        dtype = torch.promote_types(x.dtype, weight.dtype) if round_normed and weight is not None else x.dtype
        check_out(out, torch.empty(0, dtype=dtype, device=x.device), *x.shape)
    return backend(x).rms_norm(x, weight, eps, round_normed=round_normed, out=out)


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy block `pairs[i, 0]` of `source` to block `pairs[i, 1]` of `target`.

    Shapes: source and target uint8 [blocks, bytes], bytes a multiple of 16; pairs int32 [n, 2]. Targets are distinct,
    and no other pair's source. With pairs on a GPU, a pool may be pinned host memory, which must outlive the copy.
    """
    check_blocks(source, target, pairs)
    backend(pairs).copy_blocks(source, target, pairs)


def place_decodes(indices: StateIndices, starts: Tensor, block_size: int | None = None) -> None:
    """Move decode rows to their real positions, which the host did not know while drafts were unverified.

    `starts`, int32 or int64 [N], any stride, are the rows' first positions (padding is ignored). `positions` change too
    and, given `block_size`, tokens of a KV page, `kv_slot` and `kv_len`.

    A row with a `late_len` begins up to 7 tokens later than planned and gets up to `late_len` tokens, to the next
    multiple of 16. A row that passed a multiple reads `decode_dst`, which the step before has folded, and begins its
    log anew. Another late row keeps its dst only if it ends at a multiple. Rows that are not late take their `log_end`,
    positions and KV slots from `starts`, also a slot that was -1.
    """
    check_shape("starts", starts, indices.num_decodes)
    check_dtype("starts", starts, torch.int32, torch.int64)
    check_devices(indices, starts=starts)
    if indices.num_decodes:
        backend(starts).place_decodes(indices, starts, block_size)
        indices.derived.clear()


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    indices: StateIndices,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend causally over keys and values in pages (PagedAttention, Kwon et al. 2023).

    Shapes: q [F, HQ, D], k [F, HKV, D], v [F, HKV, DV], key_pages [blocks, block_size, HKV, D], value_pages [blocks,
    block_size, HKV, DV]. Returns [F, HQ, DV] in q's dtype. `scale` is positive and defaults to 1 / sqrt(D).

    Tokens with `kv_slot` >= 0 are first written to pages. Then a query reads its row's positions up to its own from
    pages, never from `kv_len` on. Rows must have pages for `kv_len` tokens; this is not checked.
    """
    check_rank("q", q, "F, HQ, D")
    check_rank("k", k, "F, HKV, D")
    check_rank("v", v, "F, HKV, DV")
    check_rank("key_pages", key_pages, "blocks, block_size, HKV, D")
    check_dtype("q", q, *ACTIVATION_DTYPES)
    check_tokens("q", q, indices)
    for name in ("positions", "kv_slot", "block_table", "block_table_start", "kv_len"):
        if not hasattr(indices, name):
            raise ValueError(f"The indices lack {name}, which attention needs: add it to the arrays.")
    tokens, query_heads, key_width = q.shape
    heads, value_width = v.shape[1:]
    if query_heads % heads:
        raise ValueError(f"{query_heads} query heads cannot share {heads} key heads: HQ must be a multiple of HKV.")
    if scale is not None and not scale > 0:
        raise ValueError(f"scale is {scale}, but it must be positive.")
    check_shape("k", k, tokens, heads, key_width)
    check_shape("v", v, tokens, heads, value_width)
    check_shape("key_pages", key_pages, *key_pages.shape[:2], heads, key_width)
    check_shape("value_pages", value_pages, *key_pages.shape[:2], heads, value_width)
    if out is not None:
        check_out(out, q, tokens, query_heads, value_width)
    check_devices(indices, q=q, k=k, v=v, key_pages=key_pages, value_pages=value_pages)
    return backend(q).paged_attention(q, k, v, key_pages, value_pages, indices, scale, out)


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    out: Tensor | None = None,
) -> Tensor:
    """Apply Mamba's selective scan (Gu and Dao 2023), softplus of step sizes and, given z, the gate included.

    Shapes: x, dt, z [F, dim] and B, C [F, N], of one dtype; A [dim, N] (negative, contiguous, N at most 64); D, dt_bias
    [dim]; state [blocks, dim, N]. With step = softplus(dt + dt_bias):

        S_t[d, n] = e^(step_d A[d, n]) S_{t-1}[d, n] + step_d x_d B_n
        y_d = (sum_n S_t[d, n] C_n + D_d x_d) silu(z_d)
    """
    check_rank("x", x, "F, dim")
    check_rank("A", A, "dim, N")
    check_dtype("x", x, *ACTIVATION_DTYPES)
    check_dtype("state", state, *ACTIVATION_DTYPES)
    check_tokens("x", x, indices)
    tokens, dim = x.shape
    width = A.shape[1]
    if not 0 < width <= 64:
        raise ValueError(f"A has {width} states per channel, but 1 to 64 are supported: Mamba1's models have 16.")
    per_token = {"dt": (dt, dim), "B": (B, width), "C": (C, width)} | ({} if z is None else {"z": (z, dim)})
    for name, (tensor, channels) in per_token.items():
        check_shape(name, tensor, tokens, channels)
        check_dtype(name, tensor, x.dtype)
    check_shape("A", A, dim, width)
    if not A.is_contiguous():
        raise ValueError(f"A has strides {list(A.stride())}, but it must be contiguous: pass A.contiguous().")
    check_shape("D", D, dim)
    if dt_bias is not None:
        check_shape("dt_bias", dt_bias, dim)
    check_shape("state", state, state.shape[0], dim, width)
    check_pool(state)
    if out is not None:
        check_out(out, x, *x.shape)
    check_devices(indices, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state)
    check_log(log, selective_scan_log(dim, width, x.dtype, state.dtype), indices)
    return backend(x).selective_scan(x, dt, A, B, C, D, z, dt_bias, state, log, indices, out)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    log: Sequence[Tensor],
    indices: StateIndices,
    dt_limit: tuple[float, float] = (0.0, inf),
    out: Tensor | None = None,
) -> Tensor:
    """Apply Mamba2's state-space duality (Transformers are SSMs, Dao and Gu 2024), step sizes and, given z, gate
    included.

    Shapes: x, z [F, H, P], dt [F, H] and B, C [F, G, N], of one dtype; A [H] (negative); D, dt_bias [H]; state [blocks,
    H, P, N]. With step = softplus(dt + dt_bias), clamped to `dt_limit`:

        S_t = e^(step A) S_{t-1} + step x_t B_t^T;  y_t = (S_t C_t + D x_t) silu(z_t)
    """
    check_rank("x", x, "F, H, P")
    check_rank("B", B, "F, G, N")
    check_rank("state", state, "blocks, H, P, N")
    check_dtype("x", x, *ACTIVATION_DTYPES)
    check_dtype("state", state, *ACTIVATION_DTYPES)
    check_tokens("x", x, indices)
    tokens, heads, width = x.shape
    groups, state_width = B.shape[1:]
    check_head_widths(P=width, N=state_width)
    if heads % groups:
        raise ValueError(f"{heads} heads cannot share {groups} groups of B and C: H must be a multiple of G.")
    per_token = {"dt": (dt, (heads,)), "B": (B, (groups, state_width)), "C": (C, (groups, state_width))}
    for name, (tensor, shape) in (per_token if z is None else per_token | {"z": (z, (heads, width))}).items():
        check_shape(name, tensor, tokens, *shape)
        check_dtype(name, tensor, x.dtype)
    for name, parameter in (("A", A), ("D", D), ("dt_bias", dt_bias)):
        if parameter is not None:
            check_shape(name, parameter, heads)
    if not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit is {dt_limit}, but it must be two bounds, the lower one 0 or more and first.")
    check_shape("state", state, state.shape[0], heads, width, state_width)
    check_pool(state)
    if out is not None:
        check_out(out, x, *x.shape)
    check_devices(indices, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, state=state)
    check_log(log, ssd_log(heads, groups, width, state_width, x.dtype, state.dtype), indices)
    return backend(x).ssd(x, dt, A, B, C, D, z, dt_bias, state, log, indices, dt_limit, out)
