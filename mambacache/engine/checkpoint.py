"""What a checkpoint brings beside its weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def load_tokenizer(model: str | Path) -> Any:
    """The checkpoint's tokenizer, or None if it has none: prompts are then token ids, and answers have no text."""
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError):
        warnings.warn(f"{model} has no tokenizer that can be loaded: give prompts as token ids", stacklevel=3)
        return None


def end_tokens(module: Any) -> frozenset[int]:
    """The tokens with which the model ends an answer."""
    generation = getattr(module, "generation_config", None)
    for config in (generation, module.config):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            return frozenset([end] if isinstance(end, int) else end)
    return frozenset()
