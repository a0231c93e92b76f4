"""Check that a tokenizer's error, or a result that is no text, costs its own request and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_driver import Engines, answer, byte_tokenizer, change_rows, run_until_idle
from mambacache import LLM, SamplingParams
from mambacache.engine.answers import Answers
from mambacache.engine.outputs import RequestOutput
from mambacache.plan import SequenceStep
from mambacache.runner.model_runner import RowOutput
from mambacache.scheduler.request import FinishReason

GOOD, BAD = "all is well", "it fails ! here"
CUT = "it 🚀"
"""Without its last byte it ends inside a character: what is left is decoded when no more comes."""

ENOUGH = SamplingParams(max_tokens=20)
SHORT = SamplingParams(max_tokens=len(CUT.encode()) - 1)


@pytest.fixture
def llm(engine: Engines, text_model: Path) -> LLM:
    """Make an engine that answers prompts with `GOOD`, `BAD` or `CUT` by their first letter, even after failed
    steps."""
    llm = engine(text_model)
    encode = llm.tokenizer.encode
    texts = {"G": GOOD, "B": BAD, "C": CUT}
    scripts = {encode(first)[0]: [*encode(text), llm.tokenizer.eos_token_id] for first, text in texts.items()}

    def spoken(step: SequenceStep, row: RowOutput) -> None:
        prompt = llm._step_loop.answers[step.request_id].output.prompt_token_ids
        row.tokens = [scripts[prompt[0]][step.start + step.num_tokens - len(prompt)] for _ in row.tokens]

    change_rows(llm, spoken)
    return llm


def spoil(llm: LLM, spoilt: Callable[[], Any], concerns: Callable[[list[int]], bool], calls: Sequence[int]) -> None:
    """Has the tokenizer do something else when it decodes tokens such as these, in some of these calls."""
    decode, count = llm.tokenizer.decode, iter(range(1000))

    def decoding(tokens: list[int], **options: Any) -> Any:
        return spoilt() if concerns(tokens) and next(count) in calls else decode(tokens, **options)

    llm.tokenizer.decode = decoding


def hold_the_mark(llm: LLM) -> Callable[[list[int]], bool]:
    mark = llm.tokenizer.encode("!")[0]
    return lambda tokens: mark in tokens


def end_inside_a_character(llm: LLM) -> Callable[[list[int]], bool]:
    """First decoded as a token comes, then when no more do."""
    part = llm.tokenizer.encode("🚀")[:3]
    return lambda tokens: tokens[-3:] == part


def raising(error: BaseException) -> Callable[[], Any]:
    def spoilt() -> Any:
        raise error

    return spoilt


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "an exception": (raising(KeyError("no such token")), "KeyError: 'no such token'"),
    "None": (lambda: None, "TypeError: the tokenizer decodes to NoneType: it must give a str"),
    "bytes": (lambda: b"!", "TypeError: the tokenizer decodes to bytes: it must give a str"),
}


def check_good(llm: LLM, *outputs: RequestOutput) -> None:
    """These are as ever, and the engine goes on to answer."""
    for output in (*outputs, *llm.generate("Go on", ENOUGH, use_tqdm=False)):
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == (GOOD, "stop")
    assert llm.idle


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_while_tokens_come(llm: LLM, fault: str) -> None:
    """Tokens and text up to it are kept."""
    spoilt, error = FAULTS[fault]
    spoil(llm, spoilt, hold_the_mark(llm), range(1000))
    first, bad, last = llm.generate(["G", "B", "Go"], ENOUGH, use_tqdm=False)
    completion = bad.outputs[0]
    assert (completion.finish_reason, completion.error) == ("error", error)
    assert completion.text == "it fails " and completion.token_ids == llm.tokenizer.encode("it fails ")
    check_good(llm, first, last)


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_when_no_more_tokens_come(llm: LLM, fault: str) -> None:
    spoilt, error = FAULTS[fault]
    spoil(llm, spoilt, end_inside_a_character(llm), range(1, 1000))
    good, bad = llm.generate(["G", "C"], [ENOUGH, SHORT], use_tqdm=False)
    completion = bad.outputs[0]
    assert (completion.finish_reason, completion.error) == ("error", error)
    assert completion.text == "it " and len(completion.token_ids) == SHORT.max_tokens
    check_good(llm, good)


def test_fault_of_one_answer_of_several(llm: LLM) -> None:
    spoil(llm, raising(RuntimeError("planted")), hold_the_mark(llm), [0])
    one, good = llm.generate(["B", "G"], [SamplingParams(max_tokens=20, n=3), ENOUGH], use_tqdm=False)
    assert [completion.error for completion in one.outputs].count("RuntimeError: planted") == 1
    assert sorted(completion.text for completion in one.outputs) == ["it fails ", BAD, BAD]
    check_good(llm, good)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_when_no_more_tokens_come(llm: LLM, kind: type[BaseException]) -> None:
    """Check that an interrupt ends the call that it hits. Requests stepped by hand go on, even if they ended just
    then."""
    spoil(llm, raising(kind()), end_inside_a_character(llm), [1])
    ids = [llm.submit("G", ENOUGH), llm.submit("C", SHORT)]
    with pytest.raises(kind):
        llm.generate("Go", ENOUGH, use_tqdm=False)
    outputs = run_until_idle(llm)
    assert set(outputs) == set(ids)
    assert (outputs[ids[1]].outputs[0].text, outputs[ids[1]].outputs[0].finish_reason) == ("it \ufffd", "length")
    check_good(llm, outputs[ids[0]])


def test_interrupt_while_tokens_come(llm: LLM) -> None:
    """The step counts for nothing: every request gets the tokens and the text that it gets alone."""
    spoil(llm, raising(KeyboardInterrupt()), hold_the_mark(llm), [0, 2])
    ids = [llm.submit(prompt, ENOUGH) for prompt in ("G", "B", "Go")]
    outputs: dict[str, RequestOutput] = {}
    deltas = dict.fromkeys(ids, "")
    interrupts = 0
    while not llm.idle:
        try:
            for output in llm.step():
                outputs[output.request_id] = output
                deltas[output.request_id] += output.outputs[0].delta
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 2
    assert [deltas[each] for each in ids] == [outputs[each].outputs[0].text for each in ids] == [GOOD, BAD, GOOD]
    assert answer(outputs[ids[1]]) == [*llm.tokenizer.encode(BAD), llm.tokenizer.eos_token_id]
    check_good(llm)


def test_text_of_a_step_that_failed() -> None:
    """Its tokens were shown to the tokenizer and then not taken: they are in no output, ended or not."""
    tokenizer = byte_tokenizer()
    answers = Answers("a", [1], ENOUGH, frozenset(), tokenizer, 0)
    request = answers.requests[0]
    tokens = tokenizer.encode(BAD)
    for upcoming in (tokens[2], tokens[0]):
        request.output += request.until_stop(tokens[:2])[0]
        answers.refresh()
        assert request.completes_stop is not None
        request.completes_stop(2, upcoming)
        answers.refresh()
        assert answers.output.outputs[0].text == "it"
        request.output.clear()
    request.output += request.until_stop(tokens)[0]
    assert request.completes_stop is not None
    request.completes_stop(len(tokens), tokens[0])
    request.finish_reason = FinishReason.ABORT
    answers.refresh()
    assert answers.output.outputs[0].text == BAD


def test_stop_string_that_is_no_text(llm: LLM) -> None:
    """It used to be taken, and the next call never returned."""
    with pytest.raises(ValueError, match="an item of stop is 1: set it to a string"):
        llm.generate(["G", "G"], [SamplingParams(stop=[1]), ENOUGH], use_tqdm=False)  # type: ignore[list-item]
    check_good(llm)
