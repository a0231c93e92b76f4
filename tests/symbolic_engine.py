"""Build a whole `LLM` on the symbolic model: engine, scheduler, runner and sampler are real, and there are no weights.

Its cache is a `CheckedCache`. The logits after a token come from a fixed table. So answers can be sampled, and logits
from a wrong state show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import mambacache.engine.parts
from mambacache import LLM
from mambacache.engine.text import REPLACEMENT
from mambacache.plan import CHUNK, StepPlan
from mambacache.runner.sizing import Sizes
from symbolic import VOCAB, RowOfStep, StepFailed, next_token
from symbolic_driver import CheckedCache

HALF, SILENT = VOCAB - 2, VOCAB - 1  # a token that is text only with the next token, and a token without text

LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) + 4 * torch.eye(VOCAB)
"""[token, vocabulary]: the logits where the symbolic model gives `token`; their argmax is that token."""
LOGITS[range(VOCAB), range(VOCAB)] += LOGITS.amax(-1)

MAX_MODEL_LEN = 4096


class Letters:
    """Encode each letter as a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("A") for letter in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text, half = "", False
        for token in token_ids:
            letter = "" if token == SILENT else chr(ord("A") + token)
            text, half = (text, True) if token == HALF and not half else (text + ("é" if half else "") + letter, False)
        return text + REPLACEMENT * half


class SymbolicModel:
    """Stand in for the model of `ModelRunner`. `plan` is the step that runs."""

    def __init__(self, cache: CheckedCache) -> None:
        self.plan: StepPlan
        self._symbolic = cache.runner
        self._following: dict[int, int] = {}  # by offset in the flat batch
        self._symbolic.sample = self._note  # type: ignore[method-assign]

    def _note(self, row: RowOfStep, sums: Any, wanted: range) -> list[int]:
        offsets = range(row.flat.start, row.flat.stop)
        self._following |= zip(offsets, map(next_token, row.digests.tolist(), sums.tolist()), strict=True)
        return []

    def tear(self) -> None:
        """Poison the blocks that the step writes."""
        try:
            self._symbolic.execute(self.plan, [int(step.samples) for step in self.plan.steps], fail=True)
        except StepFailed:
            return

    def logits(self, indices: Any, layers: Any, logs: Any, pages: Any) -> torch.Tensor:
        self._following = {}
        plan = replace(self.plan, arrays=self.plan.arrays | {"tokens": indices.tokens.numpy()})  # all are known here
        self._symbolic.execute(plan, [int(step.samples) for step in plan.steps])
        return LOGITS[[self._following[offset] for offset in indices.logits_index.tolist()]]


def symbolic_llm(
    *, num_state_blocks: int = 40, num_kv_blocks: int = 60, max_num_seqs: int = 8, max_checkpoints: int = 30,
    attention: bool = True, **options: Any,
) -> LLM:  # fmt: skip
    """Return an engine; at most `max_checkpoints` of its state blocks hold cached states."""
    caches: list[CheckedCache] = []

    def make_cache(config: Any, *_: None) -> CheckedCache:
        caches.append(CheckedCache(config))
        return caches[-1]

    sizes = Sizes(
        1, 1, 1, num_state_blocks - max_checkpoints, max_checkpoints, num_kv_blocks * attention, max_num_seqs,
        MAX_MODEL_LEN,
    )  # fmt: skip
    loaded = SimpleNamespace(
        kv_layers=[None] * attention,
        state_layers=lambda *_: [],
        log_layers=lambda *_: [],
        config=SimpleNamespace(vocab_size=VOCAB),
        module=SimpleNamespace(config=SimpleNamespace()),
    )
    pool = SimpleNamespace(buffer=torch.zeros(1), layers=[])
    stubs = {
        "model_skeleton": lambda *_: loaded, "load_model": lambda *_: loaded, "load_tokenizer": lambda *_: Letters(),
        "expected_weight_bytes": lambda *_: 0, "weight_bytes": lambda _: 0, "usable_memory": lambda *_: 0,
        "plan_memory": lambda *_: sizes,
        "PrefixCache": make_cache, "StatePool": lambda *_: pool, "allocate_kv_pages": lambda *_: None,
    }  # fmt: skip
    with patch.multiple(mambacache.engine.parts, **stubs):
        llm = LLM(Path("symbolic"), device="cpu", block_size=CHUNK, **options)
    model = llm.runner.model = SymbolicModel(caches[0])  # type: ignore[assignment]
    launch = llm.runner.launch

    def launching(plan: StepPlan, *args: Any) -> Any:
        model.plan = plan
        return launch(plan, *args)

    llm.runner.launch = launching  # type: ignore[method-assign]
    llm.runner._keep_paths = lambda plan: None  # type: ignore[method-assign]  # the symbolic model does it
    return llm
