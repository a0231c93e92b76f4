"""Logits of every model type equal the original's uncached forward, for every way of computing a sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM

from mambacache.models.adapt import Model, load_model
from runner_driver import Driver, Request, Row
from selection import by_family, full
from state_watch import StateWatch
from tiny_models import TINY_MODELS, VOCABULARY, save_tiny_model

TOLERANCE = 2e-4

Original = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


# Tests of one model share a worker, which loads it and compiles its kernels once.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(*each.values, marks=[*each.marks, pytest.mark.xdist_group(f"model {each.values[0]}")])
        for each in by_family(TINY_MODELS)
    ],
)
def models(
    request: pytest.FixtureRequest, device: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, Original]:
    """Return our model, and a function from tokens to the original's logits [n, vocabulary]."""
    directory = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    original = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(tokens: Sequence[int]) -> torch.Tensor:
        return original(torch.tensor([list(tokens)]), use_cache=False).logits[0]

    return load_model(directory, device=device), logits


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max().item() < TOLERANCE


def prefill(driver: Driver, request: Request, budget: int, checkpoints: Sequence[int] = ()) -> torch.Tensor:
    """Prefill the rest of a request, `budget` tokens a step, and return the logits after each token."""
    logits = []
    while (left := len(request.tokens) - request.computed) > 0:
        row = Row(request, min(left, budget), checkpoints=checkpoints, all_logits=True)
        logits.append(driver.logits([row]))
    return torch.cat(logits)


def test_scale_of_the_tiny_model(models: tuple[Model, Original]) -> None:
    logits = models[1](tokens_of(0, 200))
    assert 0.5 < logits.std() < 2


def test_cold_prompts_in_a_batch(models: tuple[Model, Original]) -> None:
    model, original = models
    prompts = [tokens_of(i, count) for i, count in enumerate((1, 3, 63, 64, 65, 150))]
    driver = Driver(model)
    got = driver.logits([Row(driver.add(tokens), len(tokens), all_logits=True) for tokens in prompts])
    assert_close(got, torch.cat([original(tokens) for tokens in prompts]))


@pytest.mark.parametrize(
    ("first", "budget", "count"), [*full((1, 1, 4), (7, 7, 140), (200, 200, 260)), (58, 1, 70), (64, 64, 260)]
)
def test_chunked_prefill(models: tuple[Model, Original], first: int, budget: int, count: int) -> None:
    """Run pieces of one token at the beginning and over a boundary, and larger pieces from end to end."""
    model, original = models
    driver, tokens = Driver(model), tokens_of(budget, count)
    request = driver.add(tokens)
    head = driver.logits([Row(request, first, all_logits=True)])
    assert_close(torch.cat([head, prefill(driver, request, budget)]), original(tokens))


def test_resume_at_interior_checkpoints(models: tuple[Model, Original]) -> None:
    model, original = models
    driver = Driver(model)
    first = driver.add(tokens_of(0, 250))
    prefill(driver, first, 250, checkpoints=(64, 128, 192))
    requests = [driver.resume(first, position, tokens_of(position, 40)) for position in (64, 128, 192)]
    got = driver.logits([Row(request, 40, all_logits=True) for request in requests])
    expected = [original(request.tokens)[-40:] for request in requests]
    assert_close(got, torch.cat(expected))
    wrong = driver.resume(first, 128, requests[2].tokens[128:])
    wrong.state = wrong.conv_state = first.checkpoints[64]
    assert (prefill(driver, wrong, 250)[-40:] - expected[2]).abs().max() > 50 * TOLERANCE, "states do not matter here"


def test_mixed_batches_of_eight(models: tuple[Model, Original]) -> None:
    """Five requests decode while three prompts are prefilled in pieces, over several block boundaries."""
    model, original = models
    driver = Driver(model)
    decoding = [driver.add(tokens_of(i, count)) for i, count in enumerate((60, 63, 64, 5, 129))]
    prompts = [len(request.tokens) - 1 for request in decoding]
    driver.logits([Row(request, count) for request, count in zip(decoding, prompts, strict=True)])
    for i, request in enumerate(decoding):
        request.tokens += tokens_of(100 + i, 8)
    prefilling = [driver.add(tokens_of(10 + i, count)) for i, count in enumerate((250, 100, 30))]
    got: dict[int, list[torch.Tensor]] = {id(request): [] for request in [*decoding, *prefilling]}
    with StateWatch(driver.runner.states.buffer) as watch:
        for pieces in ((1, 64, 10), (70, 5, 9), (121, 1, 10), (58, 30, 1)):
            rows = [Row(request, drafts=()) for request in decoding]
            rows += [Row(request, count, all_logits=True) for request, count in zip(prefilling, pieces, strict=True)]
            sizes = [len(row.tokens) for row in rows]
            for row, logits in zip(rows, driver.logits(rows).split(sizes), strict=True):
                got[id(row.request)].append(logits)
    assert watch.kernel_accesses > 0 or model.module.device.type == "cuda"  # ops in Triton bypass the dispatcher
    for request in [*decoding, *prefilling]:
        logits = torch.cat(got[id(request)])
        assert_close(logits, original(request.tokens[: request.computed])[-len(logits) :])
    hit = driver.resume(decoding[1], 64, tokens_of(7, 30))  # a checkpoint that decoding wrote
    assert_close(prefill(driver, hit, 64), original(hit.tokens)[-30:])


def test_drafts(models: tuple[Model, Original]) -> None:
    """Accept a random number of tokens in rows of 1 to 8. A boundary inside them becomes a checkpoint."""
    model, original = models
    driver, rng = Driver(model), random.Random(0)
    requests = [driver.add(tokens_of(i, count)) for i, count in enumerate((58, 120, 3))]
    driver.logits([Row(request, len(request.tokens)) for request in requests])
    for request in requests:
        request.tokens += tokens_of(len(request.tokens), 60)
    for _ in range(6):
        rows, accepted = [], []
        for request in requests:
            good, bad = rng.randint(0, 7), tokens_of(rng.randrange(1000), 7)
            right = request.tokens[request.computed + 1 :][:good]
            rows.append(Row(request, drafts=(*right, *bad[: rng.randint(0, 7 - good)])))
            accepted.append(min(good + 1, len(rows[-1].tokens)))
        drafted = [[*row.request.tokens[: row.request.computed], *row.tokens] for row in rows]
        sizes = [len(row.tokens) for row in rows]
        known = [list(request.tokens) for request in requests]
        got = driver.logits(rows, accepted).split(sizes)
        for logits, tokens in zip(got, drafted, strict=True):
            assert_close(logits, original(tokens)[-len(logits) :])
        assert [request.tokens for request in requests] == known
    hits = [driver.resume(request, max(request.checkpoints), tokens_of(7, 20)) for request in requests[:2]]
    assert [hit.computed for hit in hits] == [64, 128]
    for hit in hits:
        assert_close(prefill(driver, hit, 64), original(hit.tokens)[-20:])


def test_larger_blocks(models: tuple[Model, Original]) -> None:
    model, original = models
    driver, tokens = Driver(model, block_size=128), tokens_of(0, 300)
    assert_close(prefill(driver, driver.add(tokens), 70), original(tokens))
