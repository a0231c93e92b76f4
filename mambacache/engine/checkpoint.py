"""What a checkpoint brings beside its weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mambacache.config import SamplingParams

GENERATION_SETTINGS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""What transformers calls the settings of a `generation_config.json`, and what `SamplingParams` does."""


def load_tokenizer(model: str | Path, given: str | Path | None, revision: str | None) -> Any:
    """A tokenizer, or None where the checkpoint has none: prompts are then token ids, and answers have no text.

    Args:
        given: another one than the checkpoint's own; its revision is the newest.

    Raises:
        ValueError: the one that was given cannot be loaded.
    """
    own, problem, reason = given is None, "has no tokenizer that can be loaded", "it holds none"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model if own else given, revision=revision if own else None)
        if not _is_empty(tokenizer):
            tokenizer.clean_up_tokenization_spaces = False  # it takes back text that answers have shown
            return tokenizer
    except ImportError:
        raise
    except OSError as error:  # there is none, or the Hub does not answer
        reason = str(error).partition("\n")[0]
    except Exception as error:
        if type(error) is not ValueError:  # with which, too, transformers finds none
            problem = f"has a damaged tokenizer ({type(error).__name__}: {' '.join(str(error).split())})"
    if not own:
        raise ValueError(
            f"tokenizer {str(given)!r} cannot be loaded, give a directory that holds one, or a Hub id: {reason}"
        )
    warnings.warn(f"{model} {problem}: give prompts as token ids", stacklevel=4)
    return None


def _is_empty(tokenizer: Any) -> bool:
    """Without its files transformers makes up one that knows special tokens alone."""
    return len(tokenizer) <= len(set(tokenizer.all_special_ids))


def end_tokens(module: Any) -> frozenset[int]:
    """The tokens with which the model ends an answer."""
    generation = getattr(module, "generation_config", None)
    for config in (generation, module.config):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return frozenset([end] if isinstance(end, int) else end)
    return frozenset()


def default_sampling(module: Any) -> SamplingParams:
    """The sampling that the checkpoint's `generation_config.json` asks for; the rest as in `SamplingParams`.

    Where it says not to sample, answers are greedy, whatever its temperature.
    """
    generation = getattr(module, "generation_config", None)
    asked = generation.to_diff_dict() if generation is not None else {}
    values = {ours: asked[theirs] for theirs, ours in GENERATION_SETTINGS.items() if asked.get(theirs) is not None}
    if generation is not None and generation.do_sample is False:
        values["temperature"] = 0.0
    try:
        return SamplingParams(**values)
    except ValueError as error:
        warnings.warn(f"generation_config.json is not used: {error}", stacklevel=4)
        return SamplingParams()
