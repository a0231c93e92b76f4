"""Indices of a batch with late rows, in any order of vLLM's, equal the indices of a host that knows the real rows."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mambacache.kernels import StatePool, StateTensor
from mambacache.plan import DECODE_ARRAYS, SequenceStep
from mambacache.vllm import worker
from mambacache.vllm.layers.base import conv_weight, in_order
from mambacache.vllm.model_state import UpToTheLog
from mambacache.vllm.rows import Sender
from mambacache.vllm.step_context import StepContext
from mambacache.vllm.warm_up import warm_up
from mambacache.warm_up import warm_up_batches
from test_kernels_place_decodes import random_case

WIDTH = 4
DECODES, PROMPTS = 9, 3


class Layer:
    """Give each computed token its position plus one."""

    def bind_states(self, context: StepContext, *pools: object) -> None:
        self._context = context

    @in_order
    def core(self, positions: torch.Tensor, out: torch.Tensor) -> None:
        indices = self._context.indices(len(positions))
        out.zero_()
        decodes = indices.num_decodes * indices.tokens_per_decode
        real = torch.arange(indices.tokens_per_decode) < indices.decode_len[:, None]
        rows = positions[:decodes].view(real.shape) + 1
        assert torch.equal((rows[:, 0] - 1) % 16, indices.log_end.long())
        out[:decodes] = torch.where(real, rows, 0).flatten()
        out[decodes : indices.num_tokens] = positions[decodes : indices.num_tokens] + 1


class StridesLayer(Layer):
    """Note the strides of the given activations."""

    strides: tuple[int, ...] = ()

    @in_order
    def core(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.strides = x.stride()


def context() -> tuple[Layer, StepContext]:
    layer, tensors = Layer(), [[StateTensor((4,), torch.float32)]]
    return layer, StepContext([layer], StatePool(tensors, 4), StatePool(tensors, 4), 16)


def prompt(row: int) -> SequenceStep:
    return SequenceStep("", 0, row, 64 * row, 20 + row, True, True, row, 90 + row)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mixed", [False, True])
def test_every_token_meets_its_row(seed: int, mixed: bool) -> None:
    rng, case = random.Random(seed), random_case(DECODES, WIDTH, seed)
    pairs = list(zip(case.planned, case.real, strict=True))
    pairs += [(prompt(row), prompt(row)) for row in range(100, 100 + PROMPTS)] if mixed else []
    pairs = [(a._replace(request_id=str(a.row)), b) for a, b in pairs]
    rng.shuffle(pairs)
    # vLLM gives decode rows their planned number of tokens, and some that will not be computed.
    lengths = np.array([a.num_tokens if a.prefill else WIDTH for a, _ in pairs])
    starts = np.array([b.start for _, b in pairs])
    positions = torch.from_numpy(
        np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    )
    layer, states = context()
    states.receive(Sender().columns([a for a, _ in pairs], []), [])
    names = [a.request_id for a, _ in pairs]
    padded = None if mixed else (DECODES + 3, (DECODES + 3) * WIDTH)
    if not mixed:
        positions = torch.cat([positions, torch.zeros(3 * WIDTH, dtype=torch.int64)])
    states.begin(names, lengths, padded, positions)
    out = torch.full_like(positions, -1)
    layer.core(positions, out)
    at = 0
    for (_, real), length in zip(pairs, lengths, strict=True):
        wanted = [real.start + t + 1 if t < real.num_tokens else 0 for t in range(length)]
        assert out[at : at + length].tolist() == wanted
        at += length
    assert not out[at:].any()
    indices = states.indices(len(positions))
    decode = [real for _, real in pairs if not real.prefill]
    wanted_arrays = dict(zip(DECODE_ARRAYS, zip(*[
        (r.src, r.dst, r.log_slot, r.log_start, r.start % 16, r.num_tokens, 0) for r in decode
    ], strict=True), strict=True))  # fmt: skip
    for name in DECODE_ARRAYS[:-1]:
        assert tuple(getattr(indices, name).tolist()[:DECODES]) == wanted_arrays[name], name


def test_drafts_beyond_a_log_are_wrong() -> None:
    """Check rows of 4 tokens that begin 1 to 5 tokens before a multiple of 16, and a prompt's last token."""
    starts = [16 * row + 16 - before for row, before in enumerate(range(1, 6))]
    positions = torch.tensor([start + t for start in starts for t in range(WIDTH)] + [77])
    batch = SimpleNamespace(
        positions=positions,
        logits_indices=torch.arange(len(positions)),
        expanded_local_pos=torch.tensor([*range(WIDTH)] * 5 + [0], dtype=torch.int32),
    )
    given: list[torch.Tensor] = []
    sampler = UpToTheLog(lambda logits, batch, draft_logits, invalid: given.append(invalid))
    known = torch.zeros(len(positions), dtype=torch.bool)
    known[-2] = True  # marked by a grammar
    for invalid in (None, known):
        sampler(torch.zeros(len(positions), 3), batch, None, invalid)
    wanted = [t >= before for before in range(1, 6) for t in range(WIDTH)] + [False]
    assert given[0].tolist() == wanted
    assert given[1].tolist() == [*wanted[:-2], True, False]


def test_a_convolution_with_lora_has_its_plain_weight() -> None:
    plain = torch.randn(8, 4)
    conv = SimpleNamespace(weight=torch.randn(8, 1, 4), _cpu_unpacked_conv_weight=plain)
    assert torch.equal(conv_weight(conv), plain)
    assert torch.equal(conv_weight(SimpleNamespace(weight=conv.weight, base_layer=conv)), plain)


@pytest.mark.parametrize("gathered", [False, True])
def test_a_run_without_a_plan_takes_the_rows_of_a_warm_up(gathered: bool) -> None:
    _, states = context()
    layer = StridesLayer()
    layer.bind_states(states)
    for rows in warm_up_batches(8192, 4096, 64, WIDTH):
        with states.warming(rows, gathered) as tokens:
            states.begin(["another"], np.array([tokens]))  # as vLLM's dummy runs do
            indices = states.indices(tokens)
            decodes = [row.num_tokens for row in rows if not row.prefill]
            assert indices.decode_len.tolist() == decodes and indices.num_prefills == len(rows) - len(decodes)
            assert tokens == sum(row.num_tokens for row in rows)
            assert not any(x.any() for x in (indices.decode_src, indices.decode_dst, indices.src, indices.chunk_dst))
            half, _ = torch.zeros(tokens, 10).chunk(2, dim=-1)
            layer.core(half, torch.zeros(tokens, 5))
            assert layer.strides == ((5, 1) if gathered else (10, 1))
    assert states.indices(7).num_tokens == 7


@pytest.mark.parametrize("drafts", [0, WIDTH - 1])
def test_a_warm_up_with_drafts_gathers_every_batch_too(drafts: int) -> None:
    """A step of decode rows and prompts gathers, and the prompts may have any form."""
    runs: list[tuple[int, bool]] = []
    _, states = context()

    def run(tokens: int, **rest: object) -> None:
        states.begin([], np.array([tokens]))
        runs.append((tokens, states.order is not None))

    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=64),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts) if drafts else None,
        model_config=SimpleNamespace(max_model_len=4096),
    )
    warm_up(SimpleNamespace(_dummy_run=run, get_model=torch.nn.Module), states, config)
    batches = [sum(row.num_tokens for row in rows) for rows in warm_up_batches(8192, 4096, 64, 1 + drafts)]
    wanted = [(tokens, gathered) for tokens in batches for gathered in [False, True][: 1 + bool(drafts)]]
    assert runs == 2 * wanted


@pytest.mark.parametrize("wanted", [True, False])
def test_kernels_warm_up_unless_vllm_is_told_to_leave_it_out(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(worker, "is_cpu", lambda: False)
    monkeypatch.setattr(worker, "warm_up", lambda *_: calls.append("ours"))
    base = type("Base", (), {"compile_or_warm_up_model": lambda _: calls.append("vLLM's")})
    made = type("Worker", (worker.Mixin, base), {"model_runner": None, "step_context": None})()
    made.vllm_config = SimpleNamespace(kernel_config=SimpleNamespace(enable_jit_warmup=wanted))
    made.compile_or_warm_up_model()
    assert calls == ["ours"] * wanted + ["vLLM's"]
