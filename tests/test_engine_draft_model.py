"""Engines for which a smaller model drafts."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_driver import (
    Engines,
    Original,
    answer,
    ask,
    byte_tokenizer,
    draft_models,
    greedy,
    run_until_idle,
    tokens_of,
)
from mambacache import LLM
from mambacache.demo import MODEL
from mambacache.demo.task import demo_document, encode, question_text
from mambacache.engine import parts
from mambacache.engine.draft_model import DraftModel
from mambacache.plan import StepPlan
from mambacache.runner.sizing import SHARES, weight_bytes
from mambacache.scheduler.request import Request
from tiny_models import VOCABULARY, save_tiny_model

Originals = Callable[[str], Original]

PROMPTS = [tokens_of(1, 200), tokens_of(2, 64), tokens_of(3, 5), [7] * 130]


def drafting(llm: LLM) -> DraftModel:
    [draft_model] = draft_models(llm)
    return draft_model


@contextmanager
def launches(llm: LLM, kind: type[BaseException] | None = None, first: int = 0) -> Iterator[list[StepPlan]]:
    """The steps of an engine's draft model. From the given one on they raise, once they have run."""
    runner, plans = drafting(llm)._stepper._runner, []
    launch = runner.launch

    def watched(plan: StepPlan, *args: Any) -> Any:
        plans.append(plan)
        launched = launch(plan, *args)
        if kind is not None and len(plans) > first:
            raise kind("planted")
        return launched

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", watched)
        yield plans


def recall_prompts() -> list[list[int]]:
    """Questions about pieces of a document, of several lengths."""
    document = demo_document(1, num_records=40, num_names=12)
    tokens, names = encode(document.text), sorted(dict(document.records))
    return [
        tokens[-length:] + encode(question_text(name)) for length, name in zip((280, 66, 130, 20), names, strict=False)
    ]


# --- what it is for ---


def test_a_model_that_drafts_for_itself_is_nearly_always_right(engine: Engines) -> None:
    prompts = recall_prompts()
    params = [greedy(max_tokens) for max_tokens in (60, 33, 90, 2)]
    plain = ask(engine(MODEL), prompts, params)
    llm = engine(MODEL, speculative=MODEL)
    assert llm.config.max_draft_tokens == 3
    outputs = ask(llm, prompts, params)
    assert list(map(answer, outputs)) == list(map(answer, plain))
    for output, each in zip(outputs, params, strict=True):
        [completion] = output.outputs
        assert completion.num_draft_tokens >= 0.8 * ((each.max_tokens - 1) // 4 * 3)  # fewer where a log ends
        assert completion.num_accepted_tokens >= 0.9 * completion.num_draft_tokens


@pytest.mark.parametrize(("model", "draft"), [("qwen3_next", "mamba2"), ("mamba2", "lfm2")])
def test_tokens_are_those_without_drafts(
    engine: Engines, original: Originals, tiny_model: Callable[[str], Path], model: str, draft: str
) -> None:
    """With a model of another family, that is hardly ever right."""
    llm = engine(model, speculative=tiny_model(draft), max_draft_tokens=5)
    outputs = ask(llm, PROMPTS, [greedy(40), greedy(1), greedy(30, n=2), greedy(70)])
    original(model).check_all(PROMPTS, outputs)
    for output, drafted in zip(outputs, (True, False, True, True), strict=True):
        for completion in output.outputs:
            assert (completion.num_draft_tokens > 0) == drafted
            assert 0 <= completion.num_accepted_tokens <= completion.num_draft_tokens
    wrong = [c.num_draft_tokens - c.num_accepted_tokens for output in outputs for c in output.outputs]
    assert sum(wrong) > 50


def test_all_rows_are_drafted_for_in_one_batch(engine: Engines) -> None:
    """And what is known of them is computed once: the rows of a first step have those after the last boundary."""
    prompts = recall_prompts()
    llm = engine(MODEL, speculative=MODEL, max_draft_tokens=4)
    asked: list[dict[Request, int]] = []
    with launches(llm) as plans, pytest.MonkeyPatch.context() as patch:
        source = llm._stepper._scheduler._drafts
        propose = source._source
        patch.setattr(source, "_source", lambda limits: (asked.append(dict(limits)), propose(limits))[1])
        for prompt in prompts:
            llm.submit(prompt, greedy(40))
        while not llm.idle:
            before, calls = len(plans), len(asked)
            llm.step()
            if len(asked) == calls:
                assert len(plans) == before
                continue
            [limits], batch = asked[calls:], plans[before:]
            assert len(batch) == max(limits.values()), "the step that prefills gives the first token"
            assert [len(plan.steps) for plan in batch] == [
                sum(limit > i for limit in limits.values()) for i in range(len(batch))
            ]
            if calls:
                assert all(step.num_tokens <= 64 + 4 + 1 for step in batch[0].steps)
    assert max(map(len, asked)) == len(prompts) and len(asked) < 15
    assert sum(len(plan.steps) for plan in plans) == sum(sum(limits.values()) for limits in asked)


def test_requests_share_what_their_salts_let_them_share(engine: Engines) -> None:
    llm = engine(MODEL, speculative=MODEL)
    prompt = recall_prompts()[0]
    for salt, hit in (("a", 0), ("a", 192), ("b", 0)):
        with launches(llm) as plans:
            ask(llm, [prompt], greedy(3, salt=salt))
        assert plans[0].steps[0].start == hit


@pytest.mark.parametrize("caching", [False, True])
def test_what_is_not_stored_is_found_by_no_other(engine: Engines, caching: bool) -> None:
    llm = engine(MODEL, speculative=MODEL, enable_prefix_caching=caching)
    prompt = recall_prompts()[0]
    for _ in range(2):
        with launches(llm) as plans:
            ask(llm, [prompt], greedy(9, store_cache=not caching))
        starts = [plan.steps[0].start for plan in plans if plan.steps[0].prefill]
        assert starts[0] == 0 and starts[-1] >= 192  # its own is found


# --- what ends, and what is too long ---


def test_requests_that_are_aborted_leave_nothing(
    engine: Engines, original: Originals, tiny_model: Callable[[str], Path]
) -> None:
    llm = engine(speculative=tiny_model("qwen3_next"), max_num_seqs=3, num_kv_blocks=12)
    ids = [llm.submit(prompt, greedy(50)) for prompt in (*PROMPTS, *PROMPTS[:2])]
    for leaves in (ids[0], ids[3], ids[4]):
        for _ in range(4):
            llm.step()
        llm.abort(leaves)
        assert not drafting(llm)._stepper._scheduler.requests
    stream = llm.stream(PROMPTS[2], greedy(50))
    next(stream)
    del stream
    outputs = run_until_idle(llm)
    for i, prompt in ((1, PROMPTS[1]), (2, PROMPTS[2]), (5, PROMPTS[1])):
        assert len(answer(outputs[ids[i]])) == 50
        original("qwen3_next").check(prompt, answer(outputs[ids[i]]))


def test_what_it_cannot_take_gets_no_drafts(engine: Engines, tmp_path: Path) -> None:
    """A prompt that grows too long for it, and one with a token that it does not know."""
    large = save_tiny_model("qwen3_next", tmp_path / "large", vocab_size=300)
    small = save_tiny_model("mamba2", tmp_path / "small", vocab_size=257, max_position_embeddings=100)
    for directory in (large, small):
        byte_tokenizer().save_pretrained(directory)
    prompts = [tokens_of(1, 90), tokens_of(2, 120), [*tokens_of(3, 30), 280], tokens_of(4, 30)]
    params = greedy(20, logit_bias=dict.fromkeys(range(257, 300), -100))
    plain, outputs = ask(engine(large), prompts, params), ask(engine(large, speculative=small), prompts, params)
    assert list(map(answer, outputs)) == list(map(answer, plain))
    long, longer, unknown, short = (output.outputs[0].num_draft_tokens for output in outputs)
    assert 0 < long < 3 * 10 < short and longer == unknown == 0


# --- what fails ---


@pytest.mark.parametrize("first", [0, 1, 7])
def test_steps_that_fail_cost_guesses_alone(
    engine: Engines, original: Originals, tiny_model: Callable[[str], Path], first: int
) -> None:
    """And it drafts again as soon as they do not."""
    llm = engine(speculative=tiny_model("qwen3_next"))
    with launches(llm, RuntimeError, first) as plans:
        failed = ask(llm, PROMPTS, greedy(20))
    assert len(plans) > first
    original("qwen3_next").check_all(PROMPTS, failed)
    assert any(output.outputs[0].num_draft_tokens for output in failed) == (first > 0)
    after = ask(llm, PROMPTS, greedy(20))
    assert list(map(answer, after)) == list(map(answer, failed))
    for output in after:
        assert output.outputs[0].num_accepted_tokens >= 12


@pytest.mark.parametrize("plan", [RuntimeError("planted"), None])
def test_a_call_that_fails_costs_its_guesses_alone(
    engine: Engines,
    original: Originals,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plan: RuntimeError | None,
) -> None:
    """No step can be planned, or nothing can run: the log says once that requests go on without."""
    llm = engine(speculative=tiny_model("qwen3_next"))
    calls = []

    def schedule() -> None:
        calls.append(None)
        if plan is not None:
            raise plan

    with monkeypatch.context() as patch:
        patch.setattr(drafting(llm)._stepper._scheduler, "schedule", schedule)
        outputs = ask(llm, PROMPTS, greedy(10))
    original("qwen3_next").check_all(PROMPTS, outputs)
    assert not any(output.outputs[0].num_draft_tokens for output in outputs)
    assert len(calls) >= 8 and caplog.text.count("go on without") == 1
    [output] = ask(llm, PROMPTS[:1], greedy(10))
    assert output.outputs[0].num_accepted_tokens > 0


def test_interrupt(engine: Engines, original: Originals, tiny_model: Callable[[str], Path]) -> None:
    """Ctrl-C while it drafts ends the call and its requests, and nothing else."""
    llm = engine(speculative=tiny_model("qwen3_next"))
    with launches(llm, KeyboardInterrupt, 4) as plans, pytest.raises(KeyboardInterrupt):
        ask(llm, PROMPTS, greedy(20))
    assert len(plans) == 5 and llm.idle and not drafting(llm)._stepper._scheduler.requests
    outputs = ask(llm, PROMPTS, greedy(20))
    original("qwen3_next").check_all(PROMPTS, outputs)
    assert all(output.outputs[0].num_accepted_tokens for output in outputs)


# --- what is refused ---


def refused(message: str, model: Path, **options: Any) -> None:
    with pytest.raises(ValueError, match=message) as error:
        LLM(model, device="cpu", **options)
    assert "\n" not in str(error.value)


def test_what_is_no_draft_model(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    model = tiny_model("qwen3_next")
    refused("speculative is '.*' and draft= is given too", model, speculative=model, draft=lambda *_: [])
    with pytest.warns(match="no tokenizer"):
        refused(
            "speculative is 'no/such/one', which is not \"ngram\" and no draft model: .*: give the directory",
            model,
            speculative="no/such/one",
        )
        small = save_tiny_model("mamba2", tmp_path, vocab_size=VOCABULARY + 1)
        refused("speculative is .*, whose vocabulary is not that of .*: choose a draft", model, speculative=small)
        broken = save_tiny_model("mamba2", tmp_path)
        (broken / "model.safetensors").unlink()
        refused("speculative is '.*': the weights of .* cannot be read", model, speculative=broken)


def test_other_tokens_of_the_same_number(tmp_path: Path, text_model: Path) -> None:
    """Where both have tokenizers these are compared, not how many logits there are."""
    small = save_tiny_model("mamba2", tmp_path, vocab_size=257)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(small)
    refused("speculative is .*, whose vocabulary is not that of .*: choose a draft", text_model, speculative=small)
    byte_tokenizer().save_pretrained(small)
    with LLM(text_model, device="cpu", speculative=str(small), max_num_seqs=2) as llm:
        [output] = llm.generate("abc", greedy(10), use_tqdm=False)
        assert output.outputs[0].num_draft_tokens > 0


# --- its memory ---


def test_both_models_stay_within_their_share(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 1 << 28
    monkeypatch.setattr(parts, "DRAFT_SHARE", 0.8)  # so large that nobody can leave it out
    monkeypatch.setattr(parts, "total_memory", lambda device: total)
    monkeypatch.setattr(parts, "free_memory", lambda device: total)
    with pytest.warns(match="no tokenizer"):
        llm = LLM(
            tiny_model("qwen3_next"),
            speculative=save_tiny_model("mamba2", tmp_path, hidden_size=128, num_heads=8),
            device="cpu",
            gpu_memory_utilization=0.5,
            max_num_seqs=4,
        )
    runners = [llm.runner, drafting(llm)._stepper._runner]
    rest = total // 2 - sum(weight_bytes(runner.model) for runner in runners)
    ours, its = (
        sum(
            {pool.buffer.data_ptr(): pool.buffer.nbytes for pool in pools if pool is not None}.values()
        )  # one may be two
        for pools in ((runner.states, runner.logs, runner.pages) for runner in runners)
    )
    assert 0.95 < its / (parts.DRAFT_SHARE * SHARES["cpu"][0] * rest) < 1.05
    assert 0.95 < ours / (SHARES["cpu"][0] * (rest - its)) < 1.05


def test_reset_and_close(engine: Engines, tiny_model: Callable[[str], Path]) -> None:
    with engine(speculative=tiny_model("qwen3_next")) as llm:
        draft_model = drafting(llm)
        ask(llm, PROMPTS, greedy(4))
        assert draft_model._cache.stats.state_blocks["committed"]
        llm.reset_prefix_cache()
        assert not draft_model._cache.stats.state_blocks["committed"]
        ask(llm, PROMPTS, greedy(4))
        runner = draft_model._stepper._runner
        held = [weakref.ref(runner.model.module), weakref.ref(runner.states.buffer)]
        del runner
    engine.watch._storages.clear()  # what is at these places by now is others'
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        ask(llm, PROMPTS, greedy(4))


def test_close_that_is_interrupted(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(match="no tokenizer"):
        llm = LLM(
            tiny_model("qwen3_next"), speculative=tiny_model("mamba2"), device="cpu", max_num_seqs=2,
            host_cache_bytes=1 << 22, disk_cache_dir=tmp_path,
        )  # fmt: skip
    ask(llm, PROMPTS, greedy(4))
    draft_model, waits = drafting(llm), []

    def interrupted(*_: Any) -> None:
        waits.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._stepper._tier, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert waits and draft_model._stepper.closed and not hasattr(llm, "runner")
    llm.close()
