"""Write checkpoints of real sizes with random weights, for times without meaningful texts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import AutoConfig, AutoModelForCausalLM


@contextmanager
def random_weights(model: str) -> Iterator[str]:
    """Yield a temporary directory with the configuration of `model`, random weights in bf16 and no tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(model)
        AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder)
        yield folder
