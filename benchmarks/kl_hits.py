"""Compare answers after a hit with answers computed in full by the mean KL divergence of the next token.

    python benchmarks/kl_hits.py MODEL [--dtype bfloat16] [--device cuda] [--prompts 64] [--tokens 256] [--json OUT]
        [--random-weights]

All prompts run cold and together. They run again from states written by prefill, by decode, or by decode with some
wrong drafts, with the same forced tokens. A run without hits in other batches measures the order of additions alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from about import about
from random_weights import random_weights
from tqdm import tqdm

from mambacache import LLM, SamplingParams
from mambacache.plan import StepPlan
from mambacache.scheduler.request import Request

PROMPT, HIT, BEFORE = 465, 448, 400  # tokens of a prompt, of its hit, and of the prompt before decode
DRAFTS, RIGHT = 3, 0.7  # drafts in a step, and the probability that a draft is right
VOCABULARY = range(3, 130)
FORCED = 100.0  # logit far above all others

Kept = dict[tuple[int, int], torch.Tensor]
"""Log probabilities of all tokens, by text and position."""


class Forcing:
    """Wraps an engine's runner and model to force each request's text and keep log probabilities."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts
        self.kept: Kept = {}
        self.drafting = False

    def watch(self, llm: LLM) -> None:
        self._launch, self._logits = llm.runner.launch, llm.runner.model.logits
        llm.runner.launch = self.launch  # type: ignore[method-assign]
        llm.runner.model.logits = self.logits  # type: ignore[method-assign]

    def launch(self, plan: StepPlan, *args: Any) -> Any:
        self._plan = plan
        return self._launch(plan, *args)

    def logits(self, *args: Any) -> torch.Tensor:
        found, plan = self._logits(*args), self._plan
        widths = [plan.tokens_per_decode] * plan.num_decodes + [
            row.num_tokens for row in plan.steps[plan.num_decodes :]
        ]
        names = np.repeat([text_of(row.request_id) for row in plan.steps], widths)
        offsets = plan.arrays["logits_index"]
        likely = found.float().log_softmax(-1).cpu()
        following = []
        for i, offset in enumerate(offsets.tolist()):
            text, position = int(names[offset]), int(plan.arrays["positions"][offset])
            self.kept[text, position] = likely[i]  # a later step overwrites values behind a wrong draft
            following.append(self.texts[text][position + 1])
        forced = torch.zeros_like(found)
        forced[range(len(following)), following] = FORCED
        return forced

    def draft(self, request: Request, limit: int) -> list[int]:
        if not self.drafting:
            return []
        begun = len(request.prompt) + len(request.output)
        right = self.texts[text_of(request.request_id)][begun : begun + min(limit, DRAFTS)]
        rng = random.Random(begun)
        return [token if rng.random() < RIGHT else token - 1 for token in right]


def text_of(request_id: str) -> int:
    return int(request_id.partition("/")[0])


def divergence(cold: Kept, other: Kept, positions: range) -> float:
    """Return the mean KL divergence of `other` from `cold` at `positions` of all texts."""
    pairs = [(likely.double(), other[key].double()) for key, likely in cold.items() if key[1] in positions]
    return float(np.mean([(a.exp() * (a - b)).sum().item() for a, b in pairs]))


def run(
    llm: LLM, forcing: Forcing, prompt: int, answer: int, texts: Sequence[int], **params: Any
) -> tuple[Kept, set[int]]:
    """Run requests for `texts` together, and return their log probabilities and hits."""
    forcing.kept, hits = {}, set()
    greedy = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, **params)
    for text in texts:
        llm.submit(forcing.texts[text][:prompt], greedy, str(text))
    while not llm.idle:
        for output in llm.step():
            if output.finished:
                assert output.cache is not None
                assert list(output.outputs[0].token_ids) == forcing.texts[text_of(output.request_id)][prompt:][:answer]
                hits.add(output.cache.hit)
    return forcing.kept, hits


def measure(model: str, prompts: int, tokens: int, **options: Any) -> dict[str, float]:
    """Return divergences by the writer of the state."""
    rng = random.Random(0)
    texts = [rng.choices(VOCABULARY, k=PROMPT + tokens + 1) for _ in range(prompts)]
    forcing, every, after = Forcing(texts), range(prompts), range(PROMPT - 1, PROMPT + tokens - 1)
    found = {}
    with LLM(
        model, draft=forcing.draft, max_draft_tokens=DRAFTS, max_num_seqs=prompts, enforce_eager=True, **options
    ) as llm:
        forcing.watch(llm)
        alone = {"read_cache": False, "store_cache": False}
        cold, _ = run(llm, forcing, PROMPT, tokens, every, **alone)
        other: Kept = {}
        for group in (every[1::2], every[::2]):
            other |= run(llm, forcing, PROMPT, tokens, group[::-1], **alone)[0]
        found["no hit, other batch"] = divergence(cold, other, after)
        for writer, (prompt, answer) in tqdm({
            "prefill": (PROMPT, 1), "decode": (BEFORE, PROMPT - BEFORE), "drafts": (BEFORE, PROMPT - BEFORE),
        }.items()):  # fmt: skip
            forcing.drafting = writer == "drafts"
            run(llm, forcing, prompt, answer, every, salt=writer)
            forcing.drafting = False
            kept, hits = run(llm, forcing, PROMPT, tokens, every, salt=writer)
            assert hits == {HIT}, hits
            found[f"hit, state written by {writer}"] = divergence(cold, kept, after)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--random-weights", action="store_true", help="read only the model's configuration")
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args(argv))
    target, random_ones = options.pop("json"), options.pop("random_weights")
    with random_weights(options["model"]) if random_ones else nullcontext(options["model"]) as checkpoint:
        found = measure(**options | {"model": checkpoint})
    for name, value in found.items():
        print(f"{name:32}{value:10.2e}")
    if target:
        target.write_text(json.dumps(about("torch", "transformers") | options | {"kl": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
