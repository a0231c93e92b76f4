"""Text as its tokens come, stop strings, and templates that rewrite what was said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine_driver import byte_tokenizer
from mambacache.engine.checkpoint import load_tokenizer
from mambacache.engine.text import Detokenizer, render_chat, rewritten_turns

BYTES = byte_tokenizer()
WORDS = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"<eos>": 0, "a": 1, "bc": 2, "d": 3}, unk_token="<eos>")),
    eos_token="<eos>",
)
WORDS.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def feed(tokenizer: Any, tokens: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    """The text that is certain after each token and at the end; and whether it was stopped."""
    detokenizer = Detokenizer(tokenizer, stop)
    texts, stopped = [], False
    for position, token in enumerate(tokens):
        stopped = detokenizer.completes_stop(position, token)
        texts.append(detokenizer.text)
        if stopped:
            break
    detokenizer.finish(len(texts))
    return [*texts, detokenizer.text], stopped


def is_never_taken_back(texts: Sequence[str]) -> bool:
    return all(later.startswith(earlier) for earlier, later in pairwise(texts))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=30))
def test_any_bytes(tokens: list[int]) -> None:
    texts, _ = feed(BYTES, tokens)
    assert is_never_taken_back(texts)
    assert texts[-1] == BYTES.decode(tokens, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=12))
def test_words_with_tokens_that_have_no_text_between(tokens: list[int]) -> None:
    texts, _ = feed(WORDS, tokens)
    assert is_never_taken_back(texts)
    assert texts[-1] == WORDS.decode(tokens, skip_special_tokens=True)


def test_a_tokenizer_that_cleans_up_spaces_loses_no_letter(tmp_path: Path) -> None:
    """It would take spaces back between tokens that answers have shown."""
    model = models.WordLevel({"<eos>": 0, "a": 1, "'": 2, "n't": 3, ".": 4}, unk_token="<eos>")
    cleaning = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), eos_token="<eos>", clean_up_tokenization_spaces=True
    )
    cleaning.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path, None, None)
    for tokens in product(range(1, 5), repeat=5):
        texts, _ = feed(loaded, tokens)
        assert is_never_taken_back(texts)
        assert texts[-1] == loaded.decode(tokens).strip() == " ".join(cleaning.convert_ids_to_tokens(tokens))


class Counted(str):
    """A stop string that counts how often it is compared."""

    compared = 0

    def startswith(self, *given: Any) -> bool:
        Counted.compared += 1
        return super().startswith(*given)


@pytest.mark.parametrize("word", ["x", "ab", "aaaaaaab"])
def test_a_token_is_compared_with_the_stop_strings_a_few_times(word: str) -> None:
    """However long they are, and however much of them the text repeats."""
    stops = [Counted("a" * 1000 + chr(200 + i) * 24) for i in range(64)]
    Counted.compared = 0
    text = word * (2000 // len(word))
    texts, stopped = feed(BYTES, BYTES.encode(text), stops)
    assert texts[-1] == text and not stopped
    assert Counted.compared <= 3 * 64 * len(text)


@settings(max_examples=500, deadline=None)
@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=8), max_size=4))
def test_text_is_held_back_where_it_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    texts, stopped = feed(BYTES, BYTES.encode(text), stops)
    for count, certain in enumerate(texts[: -1 - stopped], 1):
        held = next((n for n in range(count, 0, -1) if any(s.startswith(text[count - n : count]) for s in stops)), 0)
        assert certain == text[: count - held]


def test_a_character_comes_when_it_is_whole() -> None:
    texts, _ = feed(BYTES, BYTES.encode("né🚀."))
    assert texts == ["n", "n", "né", "né", "né", "né", "né🚀", "né🚀.", "né🚀."]


INVALID = st.sampled_from([*"né🚀".encode(), 0x80, 0xC3, 0xE2, 0xF0, 0xFF, 256]).map(
    lambda byte: byte if byte == 256 else BYTES.convert_tokens_to_ids(bytes_to_unicode()[byte])
)


@settings(max_examples=300, deadline=None)
@example([[127] * 10, [256] * 7, [102]])  # a character with many tokens between its bytes that are no text
@given(
    st.lists(
        st.lists(INVALID, min_size=1, max_size=6).flatmap(lambda run: st.integers(1, 30).map(run.__mul__)), max_size=5
    )
)
def test_long_runs_that_are_no_text(runs: list[list[int]]) -> None:
    tokens = [token for run in runs for token in run]
    texts, _ = feed(BYTES, tokens)
    assert is_never_taken_back(texts)
    assert texts[-1] == BYTES.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    "endless", [[0x80], [0xE2, 0x82], [0xF0, 0x9F, 0x9A], [256], [0xFF, 256], [0x80] * 40 + [256] * 40]
)
def test_tokens_that_never_become_text_are_not_decoded_again_and_again(
    endless: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the work for a token does not grow with the number of tokens."""
    decode, longest = BYTES.decode, []

    def decoding(tokens: list[int], **options: Any) -> str:
        longest.append(len(tokens))
        return decode(tokens, **options)

    monkeypatch.setattr(BYTES, "decode", decoding)
    tokens = [byte if byte == 256 else BYTES.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in endless]
    feed(BYTES, tokens * (800 // len(tokens)))
    assert max(longest) < 40 and len(longest) < 12 * 800


@pytest.mark.parametrize(
    ("options", "text", "stop"),
    [
        ({}, "a stop b st", None),
        ({"stop": ["stop"]}, "a ", "stop"),
        ({"stop": ["b", "op"], "keep_stop": True}, "a stop", "op"),
        ({"stop": ["stop", "b"], "min_tokens": 5}, "a ", "stop"),
        ({"stop": ["stop", "b"], "min_tokens": 6}, "a stop ", "b"),
        ({"stop": ["stop"], "min_tokens": 6}, "a stop b st", None),
        ({"skip_special_tokens": False}, "a stop b st<eos>", None),
        ({"stop": ["<eos>"], "skip_special_tokens": False}, "a stop b st", "<eos>"),
    ],
)
def test_options(options: dict[str, Any], text: str, stop: str | None) -> None:
    """A stop string that is complete among the first tokens does not count."""
    detokenizer = Detokenizer(BYTES, **options)
    tokens = [*BYTES.encode("a stop b st"), 256]
    stopped = next((i for i, token in enumerate(tokens) if detokenizer.completes_stop(i, token)), None)
    detokenizer.finish(len(tokens) if stopped is None else stopped + 1)
    assert (detokenizer.text, detokenizer.stop) == (text, stop)


def stopped_text(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the stop string that is complete first, letter by letter, and whether there is any."""
    for end in range(len(text) + 1):
        found = [at for each in stop if (at := text[:end].find(each)) >= 0]
        if found:
            return text[: min(found)], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(st.text("ab€", max_size=14), st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3))
def test_stop_strings(text: str, stop: list[str]) -> None:
    texts, stopped = feed(BYTES, BYTES.encode(text), stop)
    assert (texts[-1], stopped) == stopped_text(text, stop)
    assert is_never_taken_back(texts)
    for count, certain in enumerate(texts[: -2 if stopped else -1], start=1):
        held_back = text.encode()[:count].decode(errors="ignore").removeprefix(certain)
        assert not held_back or any(each.startswith(held_back) for each in stop)


# --- tokens that are taken again ---

TEXTS = st.text("ab€", max_size=10).map(BYTES.encode)
STOPS = st.lists(st.text("ab€", min_size=1, max_size=4), max_size=3)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.dictionaries(st.integers(0, 20), TEXTS, max_size=4), STOPS)
def test_steps_that_fail_after_their_tokens_were_taken(
    tokens: list[int], detours: dict[int, list[int]], stop: list[str]
) -> None:
    """Others came at these positions, and are replaced: they leave no trace."""
    expected, expected_stop = feed(BYTES, tokens, stop)
    detokenizer, texts, stopped = Detokenizer(BYTES, stop), [], False
    for position, token in enumerate(tokens[: len(expected) - 1]):
        for ahead, other in enumerate(detours.get(position, ())):
            detokenizer.completes_stop(position + ahead, other)
        stopped = detokenizer.completes_stop(position, token)
        texts.append(detokenizer.text)
    for ahead, other in enumerate(detours.get(len(texts), ())):
        detokenizer.completes_stop(len(texts) + ahead, other)
    detokenizer.finish(len(texts))
    assert ([*texts, detokenizer.text], stopped) == (expected, expected_stop)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sets(st.integers(0, 60), max_size=8), STOPS)
def test_tokenizer_that_fails_now_and_then(tokens: list[int], bad_calls: set[int], stop: list[str]) -> None:
    """Check that an error of the tokenizer changes nothing, since the same token is taken again."""
    calls = iter(range(10_000))

    class Failing:
        def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
            if next(calls) in bad_calls:
                raise KeyboardInterrupt
            return BYTES.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def ask(act: Callable[[], Any]) -> Any:
        while True:
            before = detokenizer.text, detokenizer.count
            try:
                return act()
            except KeyboardInterrupt:
                assert (detokenizer.text, detokenizer.count) == before

    expected, expected_stop = feed(BYTES, tokens, stop)
    detokenizer, texts, stopped = Detokenizer(Failing(), stop), [], False  # type: ignore[arg-type]
    for position, token in enumerate(tokens[: len(expected) - 1]):
        stopped = ask(partial(detokenizer.completes_stop, position, token))
        texts.append(detokenizer.text)
    ask(partial(detokenizer.finish, len(texts)))
    assert ([*texts, detokenizer.text], stopped) == (expected, expected_stop)


@pytest.mark.parametrize("given", [None, b"text", 7])
def test_tokenizer_that_gives_no_text(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BYTES, "decode", lambda *_, **__: given)
    with pytest.raises(TypeError, match=f"decodes to {type(given).__name__}: it must give a str"):
        Detokenizer(BYTES).completes_stop(0, 5)


# --- templates ---

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}<assistant>"
DROPS_REASONING = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
TRIMS = PLAIN.replace("m.content", "m.content.strip()")
BEGINS_TO_REASON = PLAIN + "<think>"
KEEPS_SYSTEM_LAST = PLAIN.replace("<assistant>", "[{{ messages | length }}]<assistant>")

HISTORY = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "<think>easy</think>4"}]
SPACED = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": " 4"}]
FIRST = [{"role": "system", "content": "short"}, {"role": "user", "content": "2 + 2?"}]
OPENED = [{"role": "assistant", "content": "<think>hm</think>hello"}]
NEXT = {"role": "user", "content": "and 3?"}


@pytest.mark.parametrize(
    ("template", "history", "rewritten"),
    [
        (PLAIN, HISTORY, False),
        (PLAIN, SPACED, False),
        (PLAIN, [*HISTORY, NEXT, *SPACED[1:]], False),
        (DROPS_REASONING, HISTORY, True),
        (DROPS_REASONING, SPACED, False),
        (DROPS_REASONING, FIRST, False),
        (DROPS_REASONING, OPENED, False),
        (TRIMS, SPACED, True),
        (BEGINS_TO_REASON, SPACED, True),
        (KEEPS_SYSTEM_LAST, SPACED, True),
        (PLAIN, [HISTORY[0], {"role": "assistant", "content": None}], False),
        (PLAIN, [HISTORY[0], {"role": "assistant"}], False),
    ],
)
def test_rewritten_turns(template: str, history: list[dict[str, Any]], rewritten: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    assert rewritten_turns(tokenizer, [*history, NEXT]) == rewritten


def test_template_options_reach_the_template() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{{ mood }}{% if add_generation_prompt %}>{% endif %}"
    assert render_chat(tokenizer, [NEXT], mood="!") == "and 3?!>"
