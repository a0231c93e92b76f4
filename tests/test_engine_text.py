"""Text as it comes, and conversations."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from engine_driver import Engines, answer, floor, greedy, hits, run_until_idle, speak
from mambacache import LLM, SamplingParams
from mambacache.engine.outputs import RequestOutput

SPOKEN = "naïve café — 東京へ行く 👩‍🚀🚀 ok"


def test_stream(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    speak(llm, SPOKEN)
    deltas, texts, tokens = [], [], []
    for output in llm.stream("Write! " * 12, SamplingParams(max_tokens=99)):
        deltas.append(output.outputs[0].delta)
        texts.append(output.outputs[0].text)
        tokens.append(len(answer(output)))
    assert tokens == list(range(1, len(SPOKEN.encode()) + 2))
    assert texts[-1] == SPOKEN == "".join(deltas)
    assert all(SPOKEN.startswith(text) for text in texts)
    assert output.finished and output.outputs[0].finish_reason == "stop"
    assert output.time_to_first_token is not None and output.cache is not None
    assert len([delta for delta in deltas if delta]) == len(SPOKEN), "each character comes as soon as it is whole"


def test_stream_holds_back_a_possible_stop_string(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    speak(llm, "a stone, a stock, a stop sign")
    pieces = [output.outputs[0].delta for output in llm.stream("x", SamplingParams(max_tokens=99, stop=["stop"]))]
    assert "".join(pieces) == "a stone, a stock, a "
    assert "ston" in pieces and "stoc" in pieces


def test_stream_that_ends_inside_a_character(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    speak(llm, "go 🚀")
    deltas = [output.outputs[0].delta for output in llm.stream("x", SamplingParams(max_tokens=5))]
    assert deltas == ["g", "o", " ", "", "\ufffd"]


def test_streams_take_turns(engine: Engines, text_model: Path) -> None:
    """Each gets its own deltas though every step brings on both, and one ends long before the other; beside them runs a
    request that is stepped by hand."""
    llm = engine(text_model)
    texts = ["no", SPOKEN]
    speak(llm, *texts, "third")
    streams = [llm.stream(f"prompt {i}", SamplingParams(max_tokens=99)) for i in range(2)]
    first = [next(stream).outputs[0].delta for stream in streams]
    by_hand = llm.submit("prompt 2", SamplingParams(max_tokens=99))
    rest = [[output.outputs[0].delta for output in stream] for stream in reversed(streams)][::-1]
    assert [delta + "".join(more) for delta, more in zip(first, rest, strict=True)] == texts
    assert run_until_idle(llm)[by_hand].outputs[0].text == "third"


def test_stream_of_several_answers(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    params = SamplingParams(temperature=1.0, max_tokens=20, n=3, ignore_eos=True)
    texts = [""] * 3
    for output in llm.stream("x", params):
        for completion in output.outputs:
            texts[completion.index] += completion.delta
    assert texts == [llm.tokenizer.decode(completion.token_ids) for completion in output.outputs]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("close", [True, False])
def test_stream_that_is_not_read_to_its_end(engine: Engines, text_model: Path, close: bool) -> None:
    llm = engine(text_model)
    speak(llm, SPOKEN)
    seen: list[RequestOutput] = []
    stream = llm.stream("x", SamplingParams(max_tokens=99))
    for output in stream:
        seen.append(output)
        if len(seen) == 3:
            if close:
                break
            llm.abort(output.request_id)
    stream.close()  # type: ignore[attr-defined]
    assert len(seen) == 3 and seen[-1].outputs[0].finish_reason == "abort" and llm.idle


# --- conversations ---

REWRITING = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}</>{% endfor %}<assistant>"
)


def converse(llm: LLM, *said: str, **options: Any) -> list[RequestOutput]:
    """A conversation of these user messages and of the answers to them."""
    messages: list[dict[str, Any]] = []
    outputs = []
    for text in said:
        messages.append({"role": "user", "content": text})
        outputs += llm.chat(messages, SamplingParams(max_tokens=99), use_tqdm=False, **options)
        messages.append({"role": "assistant", "content": outputs[-1].outputs[0].text})
    return outputs


def test_chat_resumes_at_every_turn(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    question, answers = "What is the weather like where you are?", ["It rains in Bergen, " * 2, "yes", SPOKEN]
    speak(llm, *answers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = converse(llm, question, "Still?" * 15, "And now?")
    assert [output.outputs[0].text for output in outputs] == answers
    known = [len(output.prompt_token_ids) + len(answer(output)) - 1 for output in outputs]  # all but the end token
    assert hits(outputs) == [0, floor(known[0]), floor(known[1])]
    assert outputs[0].prompt_token_ids == llm.tokenizer.encode(f"<user>{question}</><assistant>")


def test_template_that_rewrites_earlier_turns(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    llm.tokenizer.chat_template = REWRITING
    speak(llm, "<think>easy</think>four", "six")
    with pytest.warns(UserWarning, match="rewrites earlier turns"):
        converse(llm, "2 + 2?" * 10, "3 + 3?")


def test_chats_together(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    conversations = [[{"role": "user", "content": text * 20}] for text in ("one ", "two ")]
    outputs = llm.chat(conversations, greedy(3), use_tqdm=False)
    alone = [llm.chat(each, greedy(3), use_tqdm=False)[0] for each in conversations]
    assert [answer(output) for output in outputs] == [answer(output) for output in alone]
    assert hits(alone) == [64, 64]


@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "hi"}]])
def test_answers_without_plain_text_are_no_rewriting(engine: Engines, text_model: Path, content: object) -> None:
    llm = engine(text_model)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": content}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.chat([*messages, {"role": "user", "content": "go on"}], greedy(1), use_tqdm=False)
