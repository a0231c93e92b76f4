"""Check several answers for a prompt, the ends of answers, and their log probabilities."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine_driver import Engines, Original, answer, ask, greedy, hits, speak, tokens_of
from mambacache import DraftTree, SamplingParams
from mambacache.engine.outputs import Logprobs
from mambacache.scheduler.request import Request
from selection import full
from tiny_models import VOCABULARY

Originals = Callable[[str], Original]


def assert_logprobs(entries: list[Logprobs] | None, logits: torch.Tensor, tokens: list[int], top: int) -> None:
    """Check that each entry holds the log probability of its token and of the `top` most likely tokens."""
    assert entries is not None and len(entries) == len(tokens) == len(logits)
    for entry, exact, token in zip(entries, logits.log_softmax(-1), tokens, strict=True):
        best = exact.topk(top).indices.tolist()
        assert list(entry) == [token, *(t for t in best if t != token)]
        assert entry == pytest.approx({t: exact[t].item() for t in entry}, abs=2e-4)


def assert_prompt_logprobs(
    entries: list[Logprobs | None] | None, logits: torch.Tensor, prompt: list[int], top: int
) -> None:
    """As vLLM gives them: an entry for each prompt token, None for the first."""
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    assert_logprobs([entry for entry in entries if entry is not None], logits, prompt[1:], top)


# --- several answers to a prompt ---

DRAWN = {"temperature": 1.2, "ignore_eos": True, "max_tokens": 15, "logprobs": 1}
ALONE: dict[tuple[str, int], list[list[int]]] = {}


def alone(engine: Engines, length: int) -> list[list[int]]:
    """Return the answers of four separate requests for a prompt of `length` tokens."""
    key = engine.device, length
    if key not in ALONE:
        params = [SamplingParams(seed=7 + i, **DRAWN) for i in range(4)]
        ALONE[key] = [answer(o) for o in ask(engine(), [tokens_of(length, length)] * 4, params, together=False)]
    return ALONE[key]


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ({}, 64),
        *full(({}, 65), ({}, 120), ({"max_num_batched_tokens": 2}, 65), ({"max_num_seqs": 2}, 65)),
        ({"num_kv_blocks": 5}, 65),
        *full(({"num_kv_blocks": 6}, 120), ({"num_checkpoints": 0}, 64)),
    ],
)
def test_several_answers(engine: Engines, original: Originals, options: dict[str, int], length: int) -> None:
    """Check that each answer is the same as for a separate request with its seed. The prompt is computed once."""
    prompt = tokens_of(length, length)
    llm = engine(**options)
    output = ask(llm, [prompt, tokens_of(1, 20)], [SamplingParams(seed=7, n=4, **DRAWN), greedy(15)])[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert [completion.token_ids for completion in output.outputs] == alone(engine, length)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 4
    for completion in output.outputs:
        exact = original("qwen3_next").after(prompt, completion.token_ids)
        assert_logprobs(completion.logprobs, exact, completion.token_ids, 1)
    for completion in ask(llm, [prompt], greedy(10, n=3))[0].outputs:
        original("qwen3_next").check(prompt, completion.token_ids)


def test_answers_that_end_at_different_times(engine: Engines) -> None:
    prompt = tokens_of(2, 70)
    llm = engine()
    params = SamplingParams(seed=1, n=6, temperature=2.0, max_tokens=12, stop_token_ids=range(0, 160, 4))
    completions = ask(llm, [prompt], params)[0].outputs
    assert len({len(completion.token_ids) for completion in completions}) > 2
    for completion in completions:
        stopped = [token % 4 == 0 for token in completion.token_ids]
        assert not any(stopped[:-1])
        assert completion.finish_reason == ("stop" if stopped[-1] else "length")


def test_next_turns_resume_after_every_answer(engine: Engines, original: Originals) -> None:
    prompt = tokens_of(3, 100)
    llm = engine()
    params = SamplingParams(seed=3, n=3, temperature=1.5, max_tokens=60, ignore_eos=True)
    turns = [[*prompt, *c.token_ids, *tokens_of(4, 5)] for c in ask(llm, [prompt], params)[0].outputs]
    outputs = ask(llm, turns, greedy(3))
    original("qwen3_next").check_all(turns, outputs)
    assert hits(outputs) == [128] * 3


# --- stops ---


def test_stop_tokens_and_length(engine: Engines, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    prompt = tokens_of(5, 70)
    tokens = answer(ask(engine(), [prompt], greedy(20))[0])
    end = next(token for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    length = tokens.index(end) + 1

    ending = tmp_path / "ending"
    ending.mkdir()
    for path in tiny_model("qwen3_next").iterdir():
        (ending / path.name).write_bytes(path.read_bytes())
    settings = json.loads((ending / "generation_config.json").read_text())
    (ending / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [1, end]}))

    for llm, params, expected, reason in (
        (engine(), greedy(20), 20, "length"),
        (engine(), greedy(1), 1, "length"),
        (engine(), greedy(20, stop_token_ids=[end, 1000]), length, "stop"),
        (engine(), greedy(length, stop_token_ids=[end]), length, "stop"),
        (engine(ending), greedy(20, ignore_eos=False), length, "stop"),
        (engine(ending), greedy(20), 20, "length"),
        (engine(ending), greedy(20, stop_token_ids=[tokens[2]]), tokens.index(tokens[2]) + 1, "stop"),
    ):
        output = ask(llm, [prompt], params)[0]
        assert (answer(output), output.outputs[0].finish_reason) == (tokens[:expected], reason)
        turn = [*prompt, *tokens, *tokens_of(6, 60)]
        assert hits(ask(llm, [turn], greedy(1))) == [64]


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["ferry"], "Über die Brücke 🌉 "),
        (["🌉 f", "die B"], "Über "),
        (["zzz", "rück"], "Über die B"),
        (["Ü"], ""),
        (["absent"], "Über die Brücke 🌉 ferry"),
    ],
)
def test_stop_strings(engine: Engines, text_model: Path, stop: list[str], text: str) -> None:
    llm = engine(text_model)
    spoken = "Über die Brücke 🌉 ferry"
    speak(llm, *[spoken] * 2)
    prompt = "a prompt " * 10
    pieces = list(llm.stream(prompt, SamplingParams(max_tokens=99, stop=stop)))
    assert pieces[-1].outputs[0].finish_reason == "stop"
    output = llm.generate(prompt, SamplingParams(max_tokens=99, stop=stop), use_tqdm=False)[0]
    assert output.outputs[0].text == text
    tokens = llm.tokenizer.encode(spoken)
    assert answer(output) == [*tokens, 256][: len(answer(output))]
    assert (answer(output)[-1] == 256) == (stop == ["absent"])


def test_token_that_ends_an_answer_has_no_text(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    speak(llm, "one, two")
    comma = llm.tokenizer.encode(",")
    output = llm.generate("x", SamplingParams(max_tokens=99, stop_token_ids=comma), use_tqdm=False)[0]
    assert output.outputs[0].text == "one" and answer(output)[-1:] == comma


# --- log probabilities ---


@pytest.mark.parametrize("budget", [*full(7, 8192), 64])
def test_logprobs(engine: Engines, original: Originals, budget: int) -> None:
    """Of answers and of prompts, cached or not, beside requests that want none."""
    prompts = [tokens_of(10, 90), tokens_of(11, 30), tokens_of(10, 90)]
    llm = engine(max_num_batched_tokens=budget)
    params = [greedy(5, logprobs=2), greedy(5), greedy(5, logprobs=0, prompt_logprobs=3)]
    for _ in range(2):
        outputs = ask(llm, prompts, params)
        original("qwen3_next").check_all(prompts, outputs)
        exact = original("qwen3_next").after(prompts[0], answer(outputs[0]))
        assert_logprobs(outputs[0].outputs[0].logprobs, exact, answer(outputs[0]), 2)
        assert_logprobs(outputs[2].outputs[0].logprobs, exact, answer(outputs[2]), 0)
        assert outputs[1].outputs[0].logprobs is None and outputs[0].prompt_logprobs is None
        exact = original("qwen3_next").logits(prompts[2])[:-1]
        assert_prompt_logprobs(outputs[2].prompt_logprobs, exact, prompts[2], 3)
    assert hits(outputs) == [64, 0, 0]


def test_logprobs_after_preemption_and_with_drafts(engine: Engines, original: Originals) -> None:
    def repeat(request: Request, limit: int) -> list[int]:
        """Drafts that are right now and then."""
        return [*truth[tuple(request.prompt)][len(request.output) :][: limit - 1], 5]

    prompts = [tokens_of(20 + i, 115 + i) for i in range(4)]
    params = greedy(30, logprobs=1, prompt_logprobs=0)
    truth = {tuple(p): answer(o) for p, o in zip(prompts, ask(engine(), prompts, greedy(30)), strict=True)}

    def branch(request: Request, limit: int) -> DraftTree:
        """Return the right tokens as a branch, behind other tokens."""
        right = truth[tuple(request.prompt)][len(request.output) :]
        return DraftTree([3, 4, *right, 5], [0, 1, 0, *range(3, 3 + len(right))])

    for options in ({}, {"draft": repeat, "max_draft_tokens": 3}, {"draft": branch, "max_draft_tokens": 7}):
        llm = engine(num_kv_blocks=6, **options)
        for prompt, output in zip(prompts, ask(llm, prompts, params), strict=True):
            exact = original("qwen3_next").logits([*prompt, *answer(output)])
            assert_prompt_logprobs(output.prompt_logprobs, exact[: len(prompt) - 1], prompt, 0)
            assert_logprobs(output.outputs[0].logprobs, exact[len(prompt) - 1 : -1], answer(output), 1)
        assert llm.stats.preemptions > 0


def test_prompt_logprobs_of_one_token(engine: Engines) -> None:
    [output] = ask(engine(), [[5]], greedy(1, prompt_logprobs=1))
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize(("options", "most"), [({}, 20), ({"max_logprobs": 3}, 3), ({"max_logprobs": 0}, 0)])
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_bounded(engine: Engines, options: dict[str, int], most: int, name: str) -> None:
    """One request may not make all others wait for thousands of them."""
    llm = engine(**options)
    prompts = [tokens_of(30, 8), tokens_of(31, 8)]
    with pytest.raises(ValueError, match=rf"^{name} of prompt 1 is {most + 1} and this engine gives {most} at most"):
        ask(llm, prompts, [greedy(2), greedy(2, **{name: most + 1})])
    for output in ask(llm, prompts, greedy(2, logprobs=most, prompt_logprobs=most)):
        for entry in [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())[1:]]:
            assert entry is not None and most <= len(entry) <= most + 1


def test_log_probabilities_without_a_bound(engine: Engines) -> None:
    """More than there are tokens are all of them."""
    llm = engine(max_logprobs=-1)
    [output] = ask(llm, [tokens_of(32, 8)], greedy(1, logprobs=10**6))
    [entry] = output.outputs[0].logprobs or ()
    assert len(entry) == VOCABULARY
