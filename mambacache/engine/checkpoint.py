"""Read a checkpoint's tokenizer, end tokens and default sampling."""

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


def load_tokenizer(model: str | Path, given: str | Path | None, revision: str | None) -> Any:
    """Load the tokenizer `given`, or raise ValueError; else the checkpoint's, if any."""
    own, problem, reason = given is None, "has no tokenizer that can be loaded", "it holds none"
    try:
        tokenizer = AutoTokenizer.from_pretrained(model if own else given, revision=revision if own else None)
        if not _is_empty(tokenizer):
            tokenizer.clean_up_tokenization_spaces = False  # cleaning changes text already shown
            return tokenizer
    except ImportError:
        raise
    except OSError as error:
        reason = str(error).partition("\n")[0]
    except Exception as error:
        if type(error) is not ValueError:  # transformers raises ValueError too if files are missing
            problem = f"has a damaged tokenizer ({type(error).__name__}: {' '.join(str(error).split())})"
    if not own:
        raise ValueError(
            f"tokenizer {str(given)!r} cannot be loaded, give a directory that holds one, or a Hub id: {reason}"
        )
    warnings.warn(f"{model} {problem}: give prompts as token ids", stacklevel=4)
    return None


def _is_empty(tokenizer: Any) -> bool:
    """Detect the tokenizer that transformers makes without files."""
    return len(tokenizer) <= len(set(tokenizer.all_special_ids))


def end_tokens(module: Any) -> frozenset[int]:
    """Return end tokens of generation settings, else of the configuration."""
    generation = getattr(module, "generation_config", None)
    for config in (generation, module.config):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return frozenset([end] if isinstance(end, int) else end)
    return frozenset()


def default_sampling(module: Any) -> SamplingParams:
    """Return the sampling of `generation_config.json`, else defaults."""
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
