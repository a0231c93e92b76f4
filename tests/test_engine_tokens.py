"""Check that tokens are the same as the original's, for all cached prefixes, cuts and mixes of the work."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from engine_driver import MODELS, Engines, Original, answer, ask, floor, greedy, hits, report_of, tokens_of
from mambacache import LLM, DraftTree, SamplingParams
from mambacache.report import Loss
from mambacache.runner.sampler import draw_groups, draw_parameters, likeliest_tokens, sample
from mambacache.scheduler.request import Request
from selection import by_family, full, some

Originals = Callable[[str], Original]

UNBOUNDED = 8192
SHARED = tokens_of(1, 150)
FAMILY = [
    [*SHARED, *tokens_of(2, 30)],
    [*SHARED, *tokens_of(3, 45)],
    tokens_of(4, 70),
    [*SHARED, *tokens_of(5, 3)],
    [*SHARED, *tokens_of(2, 30)],
    SHARED[:100],
    tokens_of(6, 1),
    tokens_of(7, 64),
]
"""Eight prompts: some that share two blocks, one twice, one that ends on a boundary, one of a single token."""


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("budget", [*full(64, UNBOUNDED), 200])
@pytest.mark.parametrize("caching", [True, False])
def test_same_tokens_with_and_without_cache(
    engine: Engines, original: Originals, caching: bool, budget: int, together: bool
) -> None:
    llm = engine(enable_prefix_caching=caching, max_num_batched_tokens=budget)
    for _ in range(2):
        outputs = ask(llm, FAMILY, greedy(5), together)
        original("qwen3_next").check_all(FAMILY, outputs)
    again = [floor(len(prompt) - 1) for prompt in FAMILY]
    assert hits(outputs) == (again if caching else [0] * len(FAMILY))
    assert llm.stats.hit_tokens == sum(report.hit for report in engine.reports)
    assert (llm.stats.states_stored > 0) == caching
    if not caching:
        assert {reason for report in engine.reports for reason in report.losses} == {Loss.NOT_ASKED}


@pytest.mark.parametrize("model", by_family(MODELS))
def test_every_model(engine: Engines, original: Originals, model: str) -> None:
    """Cold prompts, hits on tails, at a junction, at a mark and on a decode state; mixed batches of eight."""
    llm = engine(model, max_num_batched_tokens=200)
    for rotation in range(2):
        prompts = FAMILY[rotation * 3 :] + FAMILY[: rotation * 3]
        outputs = ask(llm, prompts, greedy(10))
        original(model).check_all(prompts, outputs)
    assert hits(outputs) == [floor(len(prompt) - 1) for prompt in prompts]
    longest = [*prompts[0], *answer(outputs[0]), *tokens_of(8, 60)]
    for params in (greedy(50, checkpoint_at=(130, 220)), greedy(3)):
        marked = ask(llm, [longest, longest[:230]], params)
        original(model).check_all([longest, longest[:230]], marked)
    turn = [*longest, *answer(ask(llm, [longest], greedy(50))[0]), *tokens_of(9, 5)]
    last = ask(llm, [turn], greedy(8))
    original(model).check_all([turn], last)
    assert hits(last) == [floor(len(longest) + 49)]


@pytest.mark.parametrize(
    ("kind", "budget"),
    [
        *product(("tail", "junction", "marked", "decode"), (64,)),
        *full(("tail", 1), *product(("tail", "junction", "marked", "decode"), (7, 200, UNBOUNDED))),
    ],
)
def test_hits_on_every_kind_of_checkpoint(engine: Engines, original: Originals, kind: str, budget: int) -> None:
    prompt, other = tokens_of(10, 140), tokens_of(11, 20)
    llm = engine(max_num_batched_tokens=budget)
    first = greedy(60 if kind == "decode" else 1, checkpoint_at=(70,) if kind == "marked" else ())
    asked = {
        "tail": [prompt, [*prompt, *other]],
        "junction": [prompt, [*prompt[:80], *other], [*prompt[:80], *other[::-1]]],
        "marked": [prompt, [*prompt[:80], *other]],
        "decode": [prompt],
    }[kind]
    outputs = ask(llm, asked, first, together=False)
    if kind == "decode":
        asked.append([*prompt, *answer(outputs[0]), *other])
    outputs = ask(llm, asked[-1:], greedy(5))
    original("qwen3_next").check_all(asked[-1:], outputs)
    assert hits(outputs) == [{"tail": 128, "junction": 64, "marked": 64, "decode": 192}[kind]]


def test_larger_blocks_and_sparse_checkpoints(engine: Engines, original: Originals) -> None:
    llm = engine(block_size=128, checkpoint_interval=256)
    prompts = [tokens_of(12, 700), tokens_of(12, 700)[:600], tokens_of(12, 700)[:300]]
    outputs = ask(llm, prompts, greedy(5), together=False)
    original("qwen3_next").check_all(prompts, outputs)
    assert hits(outputs) == [0, 512, 256]


def test_long_prompt(engine: Engines, original: Originals) -> None:
    """Thousands of tokens with a cap on a prompt's share of a step, beside answers that go on."""
    llm = engine(max_num_batched_tokens=1024, long_prefill_token_threshold=700)
    prompts = [tokens_of(13, 10), tokens_of(14, 5003), tokens_of(14, 5003)]
    outputs = ask(llm, prompts, [greedy(20), greedy(4), greedy(4)])
    original("qwen3_next").check_all(prompts, outputs)
    assert hits(outputs) == [0, 0, floor(5002)]


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"state_dtype": "bfloat16"}, {"state_dtype": "float16"}])
def test_16_bit(engine: Engines, original: Originals, options: dict[str, str]) -> None:
    """Check that log probabilities stay near to the original's. Tokens may differ."""
    llm = engine(**options)
    for hit in (0, 192):
        output = ask(llm, [FAMILY[1]], greedy(12, logprobs=0))[0]
        assert report_of(output).hit == hit
        exact = original("qwen3_next").after(FAMILY[1], answer(output)).log_softmax(-1)
        for entry, row in zip(output.outputs[0].logprobs or [], exact, strict=True):
            assert entry == pytest.approx({token: row[token].item() for token in entry}, abs=0.15)


# --- drafts ---


class Script:
    """Draft `right` tokens of the true answer and then wrong tokens. Draft nothing where the true answer is not
    known."""

    def __init__(self, truth: dict[tuple[int, ...], list[int]], lengths: Sequence[tuple[int, int]]) -> None:
        self._truth, self._lengths = truth, lengths
        self.asked = 0

    def __call__(self, request: Request, limit: int) -> list[int]:
        drafts, right = self._lengths[self.asked % len(self._lengths)]
        self.asked += 1
        true = self._truth.get(tuple(request.prompt), [])[len(request.output) :][:drafts]
        return [token if i < right else 2 + (token + 1) % 100 for i, token in enumerate(true)][:limit]


def truth(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> dict[tuple[int, ...], list[int]]:
    return {tuple(p): answer(o) for p, o in zip(prompts, ask(llm, prompts, greedy(count)), strict=True)}


@pytest.mark.parametrize("model", ["qwen3_next", "lfm2", *full("olmo_hybrid", "kimi_linear", "mamba")])
def test_drafts(engine: Engines, original: Originals, model: str) -> None:
    """Check rows of 1 to 8 tokens with mixed numbers of accepted drafts, beside prefill. Later turns resume after
    them."""
    alone = truth(engine(model), FAMILY, 24)
    lengths = [(7, 7), (3, 1), (0, 0), (7, 4), (5, 0), (1, 1), (6, 6), (2, 2), (4, 3)]
    llm = engine(model, draft=Script(alone, lengths), max_draft_tokens=7, max_num_batched_tokens=100)
    for _ in range(2):
        outputs = ask(llm, FAMILY, greedy(24))
        original(model).check_all(FAMILY, outputs)
    turns = [[*prompt, *answer(output), *tokens_of(20, 9)] for prompt, output in zip(FAMILY, outputs, strict=True)]
    outputs = ask(llm, turns, greedy(8))
    original(model).check_all(turns, outputs)
    assert hits(outputs) == [floor(len(turn) - 10) for turn in turns]


@pytest.mark.parametrize("model", ["qwen3_next", *full("kimi_linear", "bamba", "falcon_mamba", "lfm2", "zamba2")])
def test_trees_of_drafts(engine: Engines, original: Originals, model: str) -> None:
    """Check rows of drafts with branches, some of them right. Later turns resume after them."""
    alone, rng = truth(engine(model), FAMILY, 24), random.Random(model)

    def draft(request: Request, limit: int) -> DraftTree:
        true = alone.get(tuple(request.prompt), [])[len(request.output) :]
        tokens, parents, path = list[int](), list[int](), [0]
        for _ in range(rng.randint(0, limit)):
            right = len(path) <= len(true) and rng.random() < 0.6
            tokens.append(true[len(path) - 1] if right else rng.randrange(2, 100))
            parents.append(path[-1] if right else rng.randint(0, len(tokens) - 1))
            path += [len(tokens)] if right else []
        return DraftTree(tokens, parents)

    llm = engine(model, draft=draft, max_draft_tokens=7, max_num_batched_tokens=100)
    for _ in range(2):
        outputs = ask(llm, FAMILY, greedy(24))
        original(model).check_all(FAMILY, outputs)
        assert sum(output.outputs[0].num_accepted_tokens for output in outputs) > 20
    turns = [[*prompt, *answer(output), *tokens_of(20, 9)] for prompt, output in zip(FAMILY, outputs, strict=True)]
    outputs = ask(llm, turns, greedy(8))
    original(model).check_all(turns, outputs)
    assert hits(outputs) == [floor(len(turn) - 10) for turn in turns]


@pytest.mark.parametrize(
    ("offset", "right"),
    some(6, sorted({(offset, right) for offset in range(8) for right in (offset - 1, offset, 7)} - {(0, -1)})),
)
def test_boundary_inside_drafts(engine: Engines, original: Originals, offset: int, right: int) -> None:
    """A row that could have 8 tokens ends with the one at `offset`, as a block does: its state is cached if that token
    is accepted."""
    prompt = tokens_of(30, 127 - offset)
    alone = truth(engine(), [prompt], 20)
    llm = engine(draft=Script(alone, [(7, right)]), max_draft_tokens=7)
    request_id = llm.submit(prompt, greedy(20))
    output = [llm.step() for _ in range(2)][-1][0]
    llm.abort(request_id)
    original("qwen3_next").check_all([prompt], [output])
    assert len(answer(output)) == min(right, offset) + 2
    turns = [[*prompt, *answer(output), *tokens_of(seed, 80)] for seed in (31, 32)]
    outputs = ask(llm, turns, greedy(2), together=False)
    original("qwen3_next").check_all(turns, outputs)
    assert hits(outputs) == [128 if right >= offset else 64] * 2


# --- too little room ---


@pytest.mark.parametrize(
    "options",
    [
        *full({"num_kv_blocks": 7}, {"num_kv_blocks": 7, "num_checkpoints": 0}),
        *full({"num_kv_blocks": 7, "enable_prefix_caching": False}),
        *full({"num_kv_blocks": 7, "num_checkpoints": 1, "max_num_batched_tokens": 50}),
        {"num_kv_blocks": 7, "max_num_seqs": 3, "max_draft_tokens": 2, "draft": lambda *_: []},
    ],
)
def test_preemption(engine: Engines, original: Originals, options: dict[str, Any]) -> None:
    """Check answers that outgrow the pool. The youngest requests make room and start again from cached prefixes."""
    prompts = [tokens_of(40 + i, 115 + i) for i in range(5)]
    llm = engine(**options)
    for count in (25, 35):
        outputs = ask(llm, prompts, greedy(count))
        original("qwen3_next").check_all(prompts, outputs)
        assert all(len(answer(output)) == count for output in outputs)
    assert llm.stats.preemptions > 0


def test_draws_are_those_of_the_seed_whatever_else_runs(engine: Engines, original: Originals) -> None:
    params = [
        SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.01, seed=i, max_tokens=30, ignore_eos=True)
        for i in range(4)
    ]
    prompts = [tokens_of(50 + i, 118 - 3 * i) for i in range(4)]
    llm = engine(num_kv_blocks=8, max_num_batched_tokens=50)
    together = [answer(output) for output in ask(llm, prompts, params)]
    for prompt, its_params, tokens in zip(prompts, params, together, strict=True):
        assert tokens == drawn(original("qwen3_next").after(prompt, tokens), its_params, len(prompt))
    assert len({tuple(tokens) for tokens in together}) == 4
    assert llm.stats.preemptions > 0
    other = ask(llm, prompts[:1], SamplingParams(temperature=1.3, seed=9, max_tokens=30, ignore_eos=True))
    assert answer(other[0]) != together[0]


def drawn(logits: torch.Tensor, params: SamplingParams, position: int) -> list[int]:
    """Return what a request's seed draws from these logits, [n, vocabulary], at this position and those that follow."""
    count, each = len(logits), [params] * len(logits)
    bits = draw_parameters(each, [params.seed or 0] * count, range(position, position + count))
    indices = torch.arange(count)
    return sample(
        logits, likeliest_tokens(logits), indices, indices, torch.from_numpy(bits), draw_groups(each)
    ).tolist()


def test_seed_of_the_engine(engine: Engines) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    runs = [[answer(o) for o in ask(engine(seed=seed), [SHARED] * 2, params)] for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    assert runs[0][0] != runs[0][1], "each request draws for itself"
