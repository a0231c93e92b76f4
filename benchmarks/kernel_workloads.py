"""Make inputs of each op, and calls of the op, its peer and a plain copy on the same tensors.

Parameters and states are fp32, all else bf16. As in a layer, inputs are views of a projection's output and states are
rows of a pool, unless a class says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import kernel_peers
import mamba_peers
import torch
from gpu_timing import Call
from kernel_peers import VLLM
from kernel_steps import PoolCall, Recurrence, Steps, randn
from torch import Tensor

from mambacache.kernels import conv1d, gated_delta_rule, gated_rms_norm, kda, logs, selective_scan, ssd
from mambacache.plan import FOLD

KEY_HEADS, VALUE_HEADS, WIDTH = 16, 32, 128  # Qwen3-Next, also for the convolution and the norm
DIM = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
VALUES = VALUE_HEADS * WIDTH
PROJECTED = DIM + VALUES + 2 * VALUE_HEADS  # queries, keys, values, gate, a, b
TAPS = 4


def parameter(*shape: int) -> Tensor:
    return randn(*shape, dtype=torch.float32)


NORM, DECAY, STEP = 0.09, -0.9, 0.3  # norms, sums of decays, and step sizes in logs


def delta_rule_flops(heads: int, key_heads: int) -> int:
    """Return the operations of k S, q S, k^T u, two products with a 64 x 64 triangle, and two that make a triangle."""
    return heads * (6 * WIDTH * WIDTH + 4 * 64 * WIDTH) + key_heads * 4 * 64 * WIDTH


class DeltaRule(Recurrence):
    """Has Qwen3-Next's 16 key and 32 value heads of 128 x 128.

    With `copied_gates` gates are copies and biases bf16, as in vLLM's layer.
    """

    op = "gated_delta_rule"

    def __init__(self, lengths: Sequence[int], *, decode: bool = False, copied_gates: bool = False) -> None:
        steps = Steps(lengths, decode=decode)
        self.qkv, projected = randn(steps.tokens, DIM), randn(steps.tokens, PROJECTED)
        q, k, v = self.qkv.unflatten(1, (-1, WIDTH)).split([KEY_HEADS, KEY_HEADS, VALUE_HEADS], dim=1)
        self.a, self.b = projected[:, -2 * VALUE_HEADS : -VALUE_HEADS], projected[:, -VALUE_HEADS:]
        A_log, dt_bias = parameter(VALUE_HEADS), parameter(VALUE_HEADS)
        if copied_gates:
            self.a, self.b, dt_bias = self.a.contiguous(), self.b.contiguous(), dt_bias.bfloat16()
        self.gates = A_log, dt_bias
        flops = delta_rule_flops(VALUE_HEADS, KEY_HEADS)
        tensors = q, k, v, self.a, self.b, *self.gates
        layout = logs.gated_delta_rule_log(KEY_HEADS, VALUE_HEADS, WIDTH, WIDTH, torch.bfloat16, torch.float32)
        log = steps.log(layout, (None, NORM, None, DECAY))
        super().__init__(gated_delta_rule, steps, tensors, (VALUE_HEADS, WIDTH, WIDTH), log, VALUES, flops)

    def peer_prefill(self) -> dict[str, PoolCall]:
        heads = KEY_HEADS, WIDTH, WIDTH
        gates = self.a.contiguous(), self.b.contiguous(), *self.gates
        return kernel_peers.delta_rule_prefill(self.qkv, *gates, heads, self.steps.lengths)

    def peer_decode(self) -> PoolCall:
        sections = [x.contiguous() for x in self.tensors[:3] if x is not None]
        gates = self.a.contiguous(), self.b.contiguous(), *self.gates
        return kernel_peers.delta_rule_decode(self.qkv, sections, *gates, self.steps.rows)


class KimiDelta(Recurrence):
    """Has Kimi-Linear's 32 heads of 128 x 128; a token's mean log decay is 0.8 times `rate`."""

    op = "kda"

    def __init__(self, lengths: Sequence[int], *, decode: bool = False, rate: float = 1.0) -> None:
        steps = Steps(lengths, decode=decode)
        heads = 32
        self.qkv, g, b = (randn(steps.tokens, width) for width in (3 * heads * WIDTH, heads * WIDTH, heads))
        q, k, v = self.qkv.unflatten(1, (-1, WIDTH)).split(heads, dim=1)
        A_log, dt_bias = torch.full([heads], math.log(rate), device="cuda"), torch.zeros(heads * WIDTH, device="cuda")
        tensors = q, k, v, g.unflatten(1, (heads, WIDTH)), b, A_log, dt_bias
        flops = delta_rule_flops(heads, heads)
        layout = logs.kda_log(heads, WIDTH, WIDTH, torch.bfloat16, torch.float32)
        log = steps.log(layout, (None, NORM, None, DECAY))
        super().__init__(kda, steps, tensors, (heads, WIDTH, WIDTH), log, heads * WIDTH, flops)

    def peer_prefill(self) -> dict[str, PoolCall]:
        return {VLLM: kernel_peers.kda_prefill(*self.tensors, self.steps.lengths)}

    def peer_decode(self) -> PoolCall:
        return kernel_peers.kda_decode(self.qkv, *self.tensors, self.steps.rows)


class StateSpaceDual(Recurrence):
    """Has Nemotron-H-8B's 128 heads of 64 x 128 in 8 groups."""

    op = "ssd"

    def __init__(self, lengths: Sequence[int], *, decode: bool = False, peer_replays: bool = False) -> None:
        steps = Steps(lengths, decode=decode)
        self.peer_replays = peer_replays
        heads, width, states, groups = 128, 64, 128, 8
        sizes = [heads * width, groups * states, groups * states]
        x, B, C = randn(steps.tokens, sum(sizes)).split(sizes, dim=1)
        B, C = (part.unflatten(1, (groups, states)) for part in (B, C))
        A = -torch.rand(heads, device="cuda")
        tensors = x.unflatten(1, (heads, width)), randn(steps.tokens, heads), A, B, C, parameter(heads), None
        # C B^T for each group; its product with x, C S and x B^T for each head.
        flops = groups * 2 * 64 * states + heads * (2 * 64 * width + 4 * width * states)
        state_shape = heads, width, states
        layout = logs.ssd_log(heads, groups, width, states, torch.bfloat16, torch.float32)
        log = steps.log(layout, (None, None, STEP, DECAY))
        super().__init__(ssd, steps, (*tensors, parameter(heads)), state_shape, log, heads * width, flops)

    def peer_prefill(self) -> dict[str, PoolCall]:
        return {VLLM: mamba_peers.ssd_prefill(*self.tensors, self.steps.lengths)}

    def peer_decode(self) -> PoolCall | None:
        if self.peer_replays:
            return mamba_peers.ssd_replayed_decode(*self.tensors, self.steps)
        return mamba_peers.ssd_decode(*self.tensors) if self.steps.stored == 1 else None


class SelectiveScan(Recurrence):
    """Has Falcon-Mamba-7B's 8192 channels of 16 states; decode follows a step with all drafts rejected."""

    op = "selective_scan"
    peer_in_place = True

    def __init__(self, lengths: Sequence[int], *, decode: bool = False) -> None:
        steps = Steps(lengths, decode=decode)
        dim, states = 8192, 16
        x, z, dt = (randn(steps.tokens, dim) for _ in range(3))
        B, C = randn(steps.tokens, 2 * states).split(states, dim=1)
        A = -torch.rand(dim, states, device="cuda")
        tensors = x, dt, A, B, C, parameter(dim), z, parameter(dim)
        layout = logs.selective_scan_log(dim, states, torch.bfloat16, torch.float32)
        log = steps.log(layout, (None, None, None, None, FOLD))
        super().__init__(selective_scan, steps, tensors, (dim, states), log, dim, exponentials=dim * states)
        if decode:
            self.exponentials = steps.tokens * dim * states

    def log_bytes(self) -> int:
        """Return the bytes of logs: tokens, and the state, which is written there and read unless the pool has it."""
        if not self.log:
            return 0
        *entries, carried, stands = self.log
        rows = self.steps.rows * (carried[0].nbytes + 2 * stands[0].nbytes)
        return self.steps.tokens * sum(x[0, 0].nbytes for x in entries) + rows

    def peer_prefill(self) -> dict[str, PoolCall]:
        return {VLLM: mamba_peers.selective_scan_prefill(*self.tensors, self.steps.lengths)}

    def peer_decode(self) -> PoolCall | None:
        return mamba_peers.ssd_decode(*self.tensors) if self.steps.stored == 1 else None


class Conv1d:
    op = "conv1d"
    flops = exponentials = 0

    def __init__(self, lengths: Sequence[int], *, decode: bool = False, peer_builds_metadata: bool = False) -> None:
        self.steps = steps = Steps(lengths, decode=decode)
        self.peer_builds_metadata = peer_builds_metadata
        self.x = randn(steps.tokens, PROJECTED)[:, :DIM]
        self.weight = randn(DIM, TAPS)
        self.pool = randn(steps.blocks, TAPS - 1, DIM)
        [self.log] = steps.log([logs.conv1d_log(DIM, torch.bfloat16)], [None]) or [None]
        windows = steps.rows + (steps.folds if decode else steps.rows)
        self.nbytes = (3 if decode else 2) * steps.tokens * 2 * DIM + windows * self.pool[0].nbytes

    def ours(self) -> Tensor:
        return conv1d(self.x, self.weight, None, self.pool, self.log, self.steps.indices)

    def peers(self) -> dict[str, Call]:
        blocks = self.steps.src.to(torch.int32)
        if self.steps.decode:
            if self.steps.stored > 1:
                return {}
            return {VLLM: partial(kernel_peers.conv_decode(self.x, self.weight), self.pool, blocks)}
        prefill = kernel_peers.conv_prefill(
            self.x, self.weight, self.steps.lengths, build_metadata=self.peer_builds_metadata
        )
        return {VLLM: partial(prefill, self.pool, blocks)}

    def copy(self) -> Call | None:
        if self.steps.decode:
            return None
        source = self.x.contiguous()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def exact(self) -> list[Tensor]:
        log = None if self.log is None else self.log.double()
        x, weight, pool = (each.double() for each in (self.x, self.weight, self.pool))
        return [conv1d(x, weight, None, pool, log, self.steps.without_logs)]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        kept = self.pool.clone()
        with self.steps.as_peers():
            y = call()
        self.pool.copy_(kept)
        assert isinstance(y, Tensor)
        return [y]


class ShortConv(Conv1d):
    """Has LFM2-1.2B's 2048 channels of width 3, gates included."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.steps = steps = Steps(lengths, decode=False)
        dim, taps = 2048, 3
        self.input_gate, self.output_gate, self.x = randn(steps.tokens, 3 * dim).chunk(3, dim=1)
        self.weight, self.pool = randn(dim, taps), randn(steps.blocks, taps - 1, dim)
        self.nbytes = 4 * self.x.nbytes + 2 * steps.rows * self.pool[0].nbytes

    def _gated(self, *tensors: Tensor) -> Tensor:
        x, weight, pool, input_gate, output_gate = tensors
        return conv1d(x, weight, None, pool, None, self.steps.indices, None, input_gate, output_gate)

    def ours(self) -> Tensor:
        return self._gated(self.x, self.weight, self.pool, self.input_gate, self.output_gate)

    def peers(self) -> dict[str, Call]:
        blocks = self.steps.src.to(torch.int32)
        call = kernel_peers.short_conv_prefill(
            self.x, self.input_gate, self.output_gate, self.weight, self.steps.lengths
        )
        return {VLLM: partial(call, self.pool, blocks)}

    def exact(self) -> list[Tensor]:
        tensors = self.x, self.weight, self.pool, self.input_gate, self.output_gate
        return [self._gated(*(x.double() for x in tensors))]


class GatedNorm:
    op = "gated_rms_norm"
    flops = exponentials = 0

    def __init__(self, tokens: int) -> None:
        projected = randn(tokens, PROJECTED)
        self.gate = projected[:, DIM : DIM + VALUES].unflatten(1, (VALUE_HEADS, WIDTH))
        self.x, self.weight = randn(tokens, VALUE_HEADS, WIDTH), randn(WIDTH)
        self.nbytes = 3 * self.x.nbytes

    def ours(self) -> Tensor:
        return gated_rms_norm(self.x, self.gate, self.weight, 1e-6, round_normed=False)  # the peer also rounds once

    def peers(self) -> dict[str, Call]:
        return {VLLM: kernel_peers.gated_norm(self.x, self.gate, self.weight, 1e-6)}

    def copy(self) -> Call | None:
        return None

    def exact(self) -> list[Tensor]:
        return [gated_rms_norm(self.x.double(), self.gate.double(), self.weight.double(), 1e-6)]

    def results(self, call: Call, *, of_peer: bool) -> list[Tensor]:
        y = call()
        assert isinstance(y, Tensor)
        return [y]
