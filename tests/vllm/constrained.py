"""Check constrained answers by Hugging Face's uncached forward and a matcher that shares no code with vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

import regex

from engine_driver import TIE, Original

END = 1
"""The tiny models have this end token."""


def allowed(pattern: str, texts: Sequence[str], answer: Sequence[int]) -> list[int]:
    """Return the tokens that may follow the tokens of an answer.

    Args:
        pattern: the regular expression of whole answers.
        texts: the text of each token; the tokens before the end token are never allowed.
        answer: the tokens so far.
    """
    text = "".join(texts[token] for token in answer)
    others = range(END + 1, len(texts))
    follow = [token for token in others if regex.fullmatch(pattern, text + texts[token], partial=True)]
    return follow + [END] * bool(regex.fullmatch(pattern, text))


def check_constrained(
    original: Original, prompt: list[int], pattern: str, texts: Sequence[str], answer: list[int]
) -> None:
    """Fail unless an answer is the likeliest that its pattern allows, and not the likeliest of all."""
    changed = 0
    for place, (token, logits) in enumerate(zip(answer, original.after(prompt, answer), strict=True)):
        tokens = allowed(pattern, texts, answer[:place])
        assert token in tokens, f"{pattern} does not allow {answer} at {place}"
        best = tokens[logits[tokens].argmax()]
        assert token == best or logits[best] - logits[token] < TIE, f"{answer} at {place} is not the likeliest"
        changed += int(logits.argmax()) != token
    assert changed > 1, "the constraint changes nothing"
