"""Check the forms of prompts that other engines take. A wrong prompt gets a message, and no prompt is left in line."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_driver import Engines, answer, ask, greedy, run_until_idle, speak, tokens_of
from mambacache import LLM, SamplingParams

TOKENS = tokens_of(1, 70)

# Each stands for the prompt TOKENS alone.
ONE: dict[str, Callable[[], Any]] = {
    "list": lambda: TOKENS,
    "tuple": lambda: tuple(TOKENS),
    "numpy": lambda: np.array(TOKENS),
    "numpy, 8 bits": lambda: np.array(TOKENS, dtype=np.uint8),
    "list of numpy's integers": lambda: list(np.array(TOKENS, dtype=np.int32)),
    "torch": lambda: torch.tensor(TOKENS),
    "torch, a strided row": lambda: torch.tensor([TOKENS, TOKENS], dtype=torch.int32).T[:, 1],
    "array": lambda: array("i", TOKENS),
    "mapping of ids": lambda: {"prompt_token_ids": TOKENS},
    "mapping of a tensor": lambda: {"prompt_token_ids": torch.tensor(TOKENS)},
    "mapping of both": lambda: {"prompt": "the same as a text", "prompt_token_ids": TOKENS},
}


@pytest.fixture
def llm(engine: Engines) -> LLM:
    return engine(max_model_len=500, num_kv_blocks=6)


def test_one_prompt_in_every_form(llm: LLM) -> None:
    first = ask(llm, [TOKENS], greedy(2))[0]
    forms = {name: make() for name, make in ONE.items()}
    outputs = {name: llm.generate(prompt, greedy(2), use_tqdm=False) for name, prompt in forms.items()}
    assert {name: [answer(each) for each in given] for name, given in outputs.items()} == {
        name: [answer(first)] for name in forms
    }
    together = llm.generate(tuple(forms.values()), greedy(2), use_tqdm=False)
    ids = [llm.submit(prompt, greedy(2)) for prompt in forms.values()]
    by_hand = run_until_idle(llm)
    streamed = [[*llm.stream(prompt, greedy(2))][-1] for prompt in forms.values()]
    for output in (*together, *(by_hand[request_id] for request_id in ids), *streamed):
        assert (answer(output), output.prompt_token_ids) == (answer(first), TOKENS)
        assert {type(token) for token in output.prompt_token_ids} == {int}


def test_texts(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    forms: list[Any] = ["hello", {"prompt": "hello"}, {"prompt_token_ids": llm.tokenizer.encode("hello")}]
    speak(llm, *["well"] * 6)
    for prompts in (*forms, forms):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=9), use_tqdm=False)
        assert {output.outputs[0].text for output in outputs} == {"well"}
        assert all(output.prompt_token_ids == llm.tokenizer.encode("hello") for output in outputs)


@pytest.mark.parametrize("stop", ["ll", ["ll"], ("ll",), ["never", "ll"]])
def test_stop_strings_in_every_form(engine: Engines, text_model: Path, stop: Any) -> None:
    llm = engine(text_model)
    speak(llm, "well")
    assert llm.generate("x", SamplingParams(max_tokens=9, stop=stop), use_tqdm=False)[0].outputs[0].text == "we"


def test_no_limit_of_tokens(engine: Engines) -> None:
    """Answers go on until the model or the KV pool is full."""
    prompt = TOKENS[:50]
    for options, room in (({"max_model_len": 60}, 10), ({"max_model_len": 500, "num_kv_blocks": 1}, 14)):
        output = ask(engine(**options), [prompt], greedy(max_tokens=None))[0]  # type: ignore[arg-type]
        assert (len(answer(output)), output.outputs[0].finish_reason) == (room, "length")
    with pytest.raises(ValueError, match="prompt 0 has 60 tokens and max_tokens is 1, and the model takes 60"):
        ask(engine(max_model_len=60), [tokens_of(2, 60)], greedy(max_tokens=None))  # type: ignore[arg-type]


def test_more_than_the_vocabulary_means_all_of_it(llm: LLM) -> None:
    drawn = [ask(llm, [TOKENS], greedy(5, temperature=1.5, seed=3, top_k=top_k))[0] for top_k in (0, -1, 160, 10**12)]
    drawn += ask(llm, [TOKENS], greedy(5, temperature=1.5, seed=3, top_p=1 - 1e-9))  # 1 in float32
    assert len({tuple(answer(output)) for output in drawn}) == 1


def test_any_seed(llm: LLM) -> None:
    for seed in (-1, 10**30, np.int64(7)):
        outputs = ask(llm, [TOKENS] * 2, greedy(5, temperature=1.5, seed=seed))
        assert answer(outputs[0]) == answer(outputs[1])


# --- what is refused ---

WRONG: dict[str, tuple[Any, str]] = {
    "bytes": (b"\1\2\3", "{} is of type bytes: give a text, token ids, "),
    "bytearray": (bytearray(b"\1\2"), "{} is of type bytearray: give "),
    "nothing": (None, "{} is of type NoneType: give "),
    "set": ({1, 2}, "{} is of type set: give "),
    "generator": ((token for token in TOKENS), "{} is of type generator: give "),
    "0 dimensions": (torch.tensor(5), "{} is of type Tensor: give "),
    "2 dimensions": (np.array([[1, 2], [3, 4]]), "{} holds [1, 2] of type list: give token ids as integers"),
    "float tensor": (torch.tensor([1.0, 2.0]), "{} holds 1.0 of type float: give token ids as integers"),
    "bool array": (np.array([True, False]), "{} holds True of type bool: give token ids as integers"),
    "floats": ([1.0, 2.0], "{} holds 1.0 of type float: give token ids as integers"),
    "a float among ids": ([1, 2.5], "{} holds 2.5 of type float: give token ids as integers"),
    "a bool among ids": ([1, True], "{} holds True of type bool: give token ids as integers"),
    "a text among ids": ([1, "two"], "{} holds 'two' of type str: give token ids as integers"),
    "a list among ids": ([1, [2, 3]], "{} holds [2, 3] of type list: give token ids as integers"),
    "beyond int32": ([1, 1 << 40], "{} holds token 1099511627776, out of the vocabulary: give ids"),
    "no key": ({}, "{} has the keys []: give 'prompt' or 'prompt_token_ids'"),
    "another key": ({"prompt": "x", "image": 1}, "{} has the keys ['image', 'prompt']: give 'prompt' or"),
    "mapping of None": ({"prompt": None}, "{} is of type NoneType: give "),
    "mapping of a mapping": ({"prompt": {"prompt": "x"}}, "{} is of type dict: give "),
    "empty array": (np.array([], dtype=int), "{} is empty: give at least one token"),
    "empty mapping": ({"prompt_token_ids": []}, "{} is empty: give at least one token"),
}


def test_wrong_prompts(llm: LLM) -> None:
    """Check that each wrong prompt is named, alone and among others, and that no prompt of the call runs."""
    for prompt, message in WRONG.values():
        calls: list[tuple[Callable[[], Any], str]] = [
            (partial(llm.generate, [TOKENS, prompt, TOKENS], greedy(1), use_tqdm=False), "prompt 1"),
            (partial(llm.generate, prompt, greedy(1), use_tqdm=False), "the prompt"),
            (partial(llm.submit, prompt, greedy(1)), "the prompt"),
            (partial(next, llm.stream(prompt, greedy(1))), "the prompt"),
        ]
        for call, name in calls:
            with pytest.raises(ValueError) as error:
                call()
            assert str(error.value).startswith(message.format(name)) and "\n" not in str(error.value)
            assert llm.idle and not llm.step()
    assert llm.stats.requests == 0


def test_wrong_parameters(llm: LLM) -> None:
    wrong: list[tuple[Any, str]] = [
        ({"max_tokens": 4}, "the parameters of prompt 0 are of type dict: give SamplingParams"),
        ([SamplingParams(), None, 5], "the parameters of prompt 2 are of type int: give SamplingParams"),
        ([], "3 prompts came with 0 sampling_params: give SamplingParams, or a list"),
    ]
    for params, message in wrong:
        with pytest.raises(ValueError, match=message):
            llm.generate([TOKENS] * 3, params, use_tqdm=False)
        assert llm.idle and llm.stats.requests == 0


def test_wrong_request_id(llm: LLM) -> None:
    with pytest.raises(ValueError, match="request_id is 5: give a string"):
        llm.submit(TOKENS, greedy(1), request_id=5)  # type: ignore[arg-type]
    llm.abort(5)  # type: ignore[arg-type]


def test_refused_by_the_scheduler(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an error of the scheduler alone leaves no prompt of the call in line either."""
    scheduler = llm._step_loop._scheduler
    add, calls = scheduler.add, iter(range(9))

    def third(request: Any) -> None:
        if next(calls) == 2:
            raise ValueError("planted")
        add(request)

    monkeypatch.setattr(scheduler, "add", third)
    with pytest.raises(ValueError, match="planted"):
        ask(llm, [TOKENS] * 4, greedy(1))
    assert llm.idle and scheduler.idle
    calls = iter([2])
    with pytest.raises(ValueError, match="planted"):
        llm.submit(TOKENS, greedy(1))
    assert llm.idle and scheduler.idle
    calls = iter(range(2))
    assert len(ask(llm, [TOKENS] * 2, greedy(1))) == 2


def test_ids_that_the_engine_makes_are_free(llm: LLM) -> None:
    """Check that the engine skips ids that the caller has taken."""
    mine = [llm.submit(TOKENS, greedy(3), request_id=f"request-{i}") for i in range(3)]
    assert len(answer(ask(llm, [TOKENS], greedy(2))[0])) == 2
    assert set(run_until_idle(llm)) == set(mine)
