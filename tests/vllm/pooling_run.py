"""Run a tiny model that pools in vLLM with the plugin, in this process: `python pooling_run.py NAME DIRECTORY`.

Its vectors must equal transformers' forward pass without a cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composite_models import QWEN, TEXT_ONLY, add_processor, named, words
from family_run import CHANGES, HITS, OPTIONS, PROMPTS, let_run_on_a_cpu  # sets the environment
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel, JambaForSequenceClassification
from watched import LAST_ANSWER, check_idle

from tiny_models import randomize, save_tiny_model

SIZE = 16
"""Vectors of tokens have this size."""
NO_HITS = ([0] * len(PROMPTS),) * 2
WHOLE = {"max_num_batched_tokens": OPTIONS["max_model_len"]}
"""Tasks that need all tokens have these options. vLLM neither cuts nor hits their prompts."""


class Case(NamedTuple):
    """Describe a pooling task.

    Attributes:
        task: vLLM's name of it.
        save: saves a model in a folder, and returns the folder for vLLM and a function from a prompt to the right
            outputs.
        hits: the hits of both rounds.
        options: vLLM's options.
    """

    task: str
    save: Callable[[Path], tuple[Path, Callable[[list[int]], Tensor]]]
    hits: tuple[list[int], ...] = HITS
    options: dict[str, Any] = {}  # noqa: RUF012


def states_of(directory: Path) -> Callable[[list[int]], Tensor]:
    """Return a function from a prompt to the last layer's output, [tokens, channels]."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return lambda prompt: model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0]


def embedding(directory: Path) -> tuple[Path, Callable[[list[int]], Tensor]]:
    save_tiny_model("qwen3_5_text", directory)
    states = states_of(directory)
    return directory, lambda prompt: normalize(states(prompt)[-1], dim=-1)


def classes(directory: Path) -> tuple[Path, Callable[[list[int]], Tensor]]:
    save_tiny_model("jamba", directory, **CHANGES["jamba"])
    config = AutoConfig.from_pretrained(directory, num_labels=3)
    torch.manual_seed(0)
    model = JambaForSequenceClassification(config).eval()
    randomize(model)
    model.save_pretrained(directory)
    return directory, lambda prompt: model(torch.tensor([prompt]), use_cache=False).logits[0]


def projected(
    directory: Path, served: Path, names: Callable[[dict[str, Tensor]], dict[str, Tensor]], layer: str, bias: bool
) -> tuple[Path, Callable[[list[int]], Tensor]]:
    """Add a layer that projects each token, and normalizes the result."""
    weights, states = load_file(directory / "model.safetensors"), states_of(directory)
    weights.pop("lm_head.weight", None)
    linear = torch.nn.Linear(weights["model.embed_tokens.weight"].shape[1], SIZE, bias)
    added = {f"{layer}.{key}": weight for key, weight in linear.state_dict().items()}
    save_file(names(weights) | added, served / "model.safetensors", metadata={"format": "pt"})
    return served, lambda prompt: normalize(linear(states(prompt)), dim=-1)


def colbert(directory: Path) -> tuple[Path, Callable[[list[int]], Tensor]]:
    save_tiny_model("lfm2", directory, **CHANGES["lfm2"])
    settings = json.loads((directory / "config.json").read_text())
    settings["architectures"] = ["ColBERTLfm2Model"]
    (directory / "served").mkdir()
    (directory / "served" / "config.json").write_text(json.dumps(settings))
    return projected(directory, directory / "served", named("", ""), "linear", bias=False)


def colqwen(directory: Path) -> tuple[Path, Callable[[list[int]], Tensor]]:
    save_tiny_model("qwen3_5_text", directory, **QWEN)
    text = json.loads((directory / "config.json").read_text())
    settings = {"architectures": ["ColQwen3_5"], "model_type": "qwen3_5", "text_config": text, "dim": SIZE}
    settings["retrieval_attention_contract"] = "causal"
    served = directory / "served"
    served.mkdir()
    (served / "config.json").write_text(json.dumps(settings | {"dtype": "float32"}))
    add_processor(served)
    return projected(directory, served, named("language_model.", ""), "custom_text_proj", bias=True)


CASES = {
    "embedding": Case("embed", embedding, options={"convert": "embed"}),
    "jamba": Case("classify", classes),
    "lfm2_colbert": Case("token_embed", colbert, NO_HITS, WHOLE),
    "colqwen3_5": Case("token_embed", colqwen, NO_HITS, TEXT_ONLY | WHOLE),
}


@torch.no_grad()
def main(name: str, directory: Path) -> None:
    from vllm import LLM

    case = CASES[name]
    let_run_on_a_cpu(name)
    served, expected = case.save(directory)
    words().save_pretrained(served)
    llm = LLM(str(served), **OPTIONS | {"runner": "pooling", "skip_tokenizer_init": False} | case.options)
    for hits in case.hits:
        given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.encode(given, pooling_task=case.task, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            torch.testing.assert_close(output.outputs.data, expected(prompt), rtol=1e-4, atol=1e-5)
        assert [output.num_cached_tokens for output in outputs] == hits
    check_idle(llm.llm_engine.engine_core.engine_core.scheduler.prefix_cache)
    print(LAST_ANSWER, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
