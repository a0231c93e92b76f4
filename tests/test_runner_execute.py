"""Compare the results of `ModelRunner` for a mixed batch with logits of the whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mambacache.config import SamplingParams
from mambacache.models.adapt import Model, load_model
from mambacache.runner.model_runner import Logprobs
from mambacache.runner.sampler import RowSampling
from mambacache.warm_up import warm_up_batches
from runner_driver import Driver, Request, Row
from state_watch import StateWatch
from tiny_models import VOCABULARY, save_tiny_model

GREEDY = SamplingParams(temperature=0.0)
RANDOM = SamplingParams(temperature=1.5, top_k=50, top_p=0.95)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(save_tiny_model("qwen3_next", tmp_path_factory.mktemp("model")))


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def all_logits(model: Model, tokens: Sequence[int]) -> torch.Tensor:
    driver = Driver(model)
    return driver.logits([Row(driver.add(tokens), len(tokens), all_logits=True)])


def generate(driver: Driver, request: Request, count: int, sampling: RowSampling) -> list[int]:
    """Prefill the rest of a request, then decode, and return `count` tokens."""
    prompt = len(request.tokens)
    request.tokens += driver.execute([Row(request, prompt - request.computed)], [sampling])[0].tokens
    while len(request.tokens) < prompt + count:
        request.tokens += driver.execute([Row(request, drafts=())], [sampling])[0].tokens
    return request.tokens[prompt:]


def assert_logprobs(got: Logprobs, logits: torch.Tensor, token: int, top: int) -> None:
    exact = logits.double().log_softmax(-1)
    best = exact.topk(top).indices.tolist()
    assert list(got) == [token, *(t for t in best if t != token)]
    assert got == pytest.approx({t: exact[t].item() for t in got}, abs=2e-4)


def test_a_step_runs_on_the_device_of_its_pool(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, even if its arguments lie on another device."""
    current: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    driver, seen = Driver(model), []
    forward = model.logits
    monkeypatch.setattr(model, "logits", lambda *arguments: seen.append(*current) or forward(*arguments))
    driver.execute([Row(driver.add(tokens_of(1, 5)), 5)], [RowSampling(GREEDY, (0,))])
    assert seen == [driver.runner.states.buffer]


def test_mixed_batch(model: Model) -> None:
    """Run a decode row, a row with drafts, a whole prompt, and a piece of a prompt that samples nothing."""
    driver = Driver(model)
    decode, drafted, whole, piece = (driver.add(tokens_of(i, n)) for i, n in enumerate((20, 70, 10, 90)))
    driver.execute([Row(decode, 19), Row(drafted, 69)], [RowSampling(GREEDY, (0,))] * 2)
    drafts = tuple(tokens_of(9, 3))
    rows = [Row(decode, drafts=()), Row(drafted, drafts=drafts), Row(whole, 10), Row(piece, 64)]
    with StateWatch(driver.runner.states.buffer) as watch:
        outputs = driver.execute(rows, [RowSampling(GREEDY, (0,))] * 4)
    assert watch.kernel_accesses > 0
    expected = [
        all_logits(model, tokens_of(0, 20))[-1:].argmax(-1).tolist(),
        all_logits(model, [*tokens_of(1, 70), *drafts])[-4:].argmax(-1).tolist(),
        all_logits(model, tokens_of(2, 10))[-1:].argmax(-1).tolist(),
        [],
    ]
    assert [output.tokens for output in outputs] == expected
    assert not any(output.logprobs or output.prompt_logprobs for output in outputs)


def test_a_step_in_which_no_row_samples(model: Model) -> None:
    driver = Driver(model)
    outputs = driver.execute([Row(driver.add(tokens_of(0, 90)), 64)], [RowSampling(RANDOM, (0,))])
    assert outputs[0].tokens == []


def test_logprobs_of_some_rows(model: Model) -> None:
    driver = Driver(model)
    requests = [driver.add(tokens_of(i, 20)) for i in range(3)]
    driver.execute([Row(request, 19) for request in requests], [RowSampling(GREEDY, (0,))] * 3)
    drafts = tuple(tokens_of(7, 2))
    params = [
        SamplingParams(temperature=0.0, logprobs=3),
        GREEDY,
        SamplingParams(temperature=2.0, top_k=4, logprobs=0),
    ]
    rows = [Row(request, drafts=drafts) for request in requests]
    outputs = driver.execute(rows, [RowSampling(p, (5,)) for p in params])
    assert [len(output.logprobs) for output in outputs] == [3, 0, 3]
    for i, top in ((0, 3), (2, 0)):
        logits = all_logits(model, [*tokens_of(i, 20), *drafts])[-3:]
        for got, position, token in zip(outputs[i].logprobs, logits, outputs[i].tokens, strict=True):
            assert_logprobs(got, position, token, top)


@pytest.mark.parametrize("budget", [1, 7, 30])
def test_prompt_logprobs(model: Model, budget: int) -> None:
    """Each piece of the prompt scores the tokens that follow its own.

    The last piece, after which a token is sampled too, has one target less.
    """
    tokens = tokens_of(0, 30)
    driver = Driver(model)
    request = driver.add(tokens)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    got: list[Logprobs] = []
    for start in range(0, 30, budget):
        end = min(start + budget, 30)
        sampling = RowSampling(params, (0,), prompt_targets=tokens[start + 1 : end + 1])
        output = driver.execute([Row(request, end - start, all_logits=True)], [sampling])[0]
        got += output.prompt_logprobs
        assert len(output.tokens) == len(output.logprobs) == (end == 30)
    logits = all_logits(model, tokens)
    assert len(got) == 29
    for entry, position, token in zip(got, logits[:-1], tokens[1:], strict=True):
        assert_logprobs(entry, position, token, 2)
    assert_logprobs(output.logprobs[0], logits[-1], int(logits[-1].argmax()), 1)


def test_seeded_draws_survive_batching_resuming_and_drafts(model: Model) -> None:
    prompt, sampling = tokens_of(0, 65), RowSampling(RANDOM, (123,))
    driver = Driver(model)
    alone = generate(driver, driver.add(prompt), 12, sampling)
    assert len(set(alone)) > 3
    assert generate(driver, driver.add(prompt), 12, RowSampling(RANDOM, (124,))) != alone

    request, other = driver.add(prompt), driver.add(tokens_of(1, 33))
    outputs = driver.execute([Row(request, 65), Row(other, 33)], [sampling, RowSampling(GREEDY, (0,))])
    request.tokens += outputs[0].tokens
    other.tokens += outputs[1].tokens
    outputs = driver.execute(
        [Row(other, drafts=()), Row(request, drafts=tuple(alone[1:7]))], [RowSampling(RANDOM, (9,)), sampling]
    )
    assert [*request.tokens[65:66], *outputs[1].tokens] == alone[:8]

    preempted = driver.add([*prompt, *alone[:5]])  # its known tokens are computed anew, as a prompt
    assert generate(driver, preempted, 7, sampling) == alone[5:]


def test_several_answers_where_the_prompt_ends(model: Model) -> None:
    driver = Driver(model)
    rows = [Row(driver.add(tokens_of(i, 20)), 20) for i in range(3)]
    params = SamplingParams(temperature=1.5, logprobs=0, n=3)
    sampling = [RowSampling(params, (7, 8, 9)), RowSampling(GREEDY, (1, 2)), RowSampling(GREEDY, (1,))]
    outputs = driver.execute(rows, sampling)
    assert [len(output.tokens) for output in outputs] == [3, 2, 1]
    assert [next(iter(entry)) for entry in outputs[0].logprobs] == outputs[0].tokens
    for seed, token in zip((7, 8, 9), outputs[0].tokens, strict=True):
        alone = driver.execute([Row(driver.add(tokens_of(0, 20)), 20)], [RowSampling(params, (seed,))])
        assert alone[0].tokens == [token]


def test_kv_copies_come_before_the_pass(model: Model) -> None:
    """A fork continues on its own copy of a partial page, and leaves the source page alone."""
    driver, tokens = Driver(model), tokens_of(0, 20)
    request = driver.add(tokens)
    first = driver.execute([Row(request, 20)], [RowSampling(GREEDY, (0,))])[0].tokens
    source, target = request.kv_blocks[0], driver.free_kv.pop()
    fork = Request([*tokens, *tokens_of(1, 1)], [target], 20, request.state, log_start=request.log_start)
    assert driver.runner.pages is not None
    pages = [page for layer in driver.runner.pages.layers for page in layer]
    before = [page[source, :20].clone() for page in pages]
    plan = replace(driver.plan([Row(fork, drafts=())]), kv_copies=((source, target),))
    output = driver.runner.launch(plan, [RowSampling(GREEDY, (0,))]).read()[0]
    assert output.tokens == [all_logits(model, fork.tokens)[-1].argmax().item()] != first
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page[source, :20], old) and page[source, 20:].isnan().all()


def test_outputs_after_a_failed_step(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that raises in the middle of the model leaves the runner able to run the next one."""
    driver = Driver(model)
    head = model.module.get_output_embeddings()
    with monkeypatch.context() as patch:
        patch.setattr(head, "forward", lambda x: (_ for _ in ()).throw(RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            driver.execute([Row(driver.add(tokens_of(0, 10)), 10)], [RowSampling(GREEDY, (0,))])
    outputs = driver.execute([Row(driver.add(tokens_of(0, 10)), 10)], [RowSampling(GREEDY, (0,))])
    assert outputs[0].tokens == [all_logits(model, tokens_of(0, 10))[-1].argmax().item()]


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float16])
def test_16_bit_states(model: Model, state_dtype: torch.dtype) -> None:
    """The first chunk reads no rounded state. Later chunks do."""
    tokens = tokens_of(0, 192)
    driver = Driver(model, state_dtype=state_dtype)
    request = driver.add(tokens)
    logits = [driver.logits([Row(request, 64, all_logits=True)]) for _ in range(3)]
    difference = (torch.cat(logits) - all_logits(model, tokens)).abs()
    assert difference[:64].max() < 2e-4 < difference[64:].max() < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3_next_moe", "olmo_hybrid"])
def test_16_bit_models(name: str, dtype: str, tmp_path: Path) -> None:
    checkpoint, tokens = save_tiny_model(name, tmp_path), tokens_of(0, 100)
    difference = all_logits(load_model(checkpoint, dtype), tokens).float() - all_logits(load_model(checkpoint), tokens)
    assert 1e-4 < difference.square().mean().sqrt() < 0.15


@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "mamba2"])
def test_warming_up_writes_nothing(name: str, tiny_model: Callable[[str], Path]) -> None:
    """A warm-up writes no state, no page, and only the null slot of token logs."""
    runner = Driver(load_model(tiny_model(name))).runner
    parts = [runner.states.buffer, runner.logs.slabs[1:], *([runner.pages.buffer] if runner.pages is not None else [])]
    before = [part.clone() for part in parts]
    mixers, calls = list(runner.model.mixers), []
    for mixer in mixers:
        mixer.register_forward_hook(lambda *_: calls.append(len(calls)))  # type: ignore[attr-defined]
    batches = warm_up_batches(room=150, longest=130, most_rows=8, width=4)
    runner.warm_up(batches, 64)
    assert len(calls) == len(batches) * len(mixers)
    assert all(torch.equal(part, old) for part, old in zip(parts, before, strict=True))
