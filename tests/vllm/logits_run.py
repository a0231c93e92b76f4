"""Write logits of all positions of some sequences in vLLM: `python logits_run.py MODEL OUT.pt [OPTIONS as JSON]`.

MAMBACACHE says whether the plugin runs. The prompts run twice, the second time over cached blocks. The sequence's own
next token replaces each sampled token, so that all runs see the same input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}

import torch
from real_shapes import VOCABULARY

from engine_driver import tokens_of

PROMPTS = (700, 300, 65, 3)
DECODED = 16
CUT_PROMPTS: dict[str, Any] = {"prompts": (1000, 900, 800, 700, 600, 500), "max_num_batched_tokens": 128}
"""These prompts take many steps. Their order decides where vLLM cuts them, and with it the roundings of all later
positions. Other kernels change the roundings of the same positions."""


def sequences(prompts: Sequence[int]) -> torch.Tensor:
    """Return [requests, tokens]. No two requests have the same token at a position, so that both tell the request."""
    first = torch.tensor(tokens_of(1, max(prompts) + DECODED))
    return 1 + (first + 37 * torch.arange(len(prompts))[:, None]) % (VOCABULARY - 1)


class Capture:
    """Wrap a model of vLLM's, and keep its logits."""

    def __init__(self, model: Any, tokens: torch.Tensor) -> None:
        self.tokens, self.logits, self.places = tokens, [], []
        self._forward, self._compute = model.forward, model.compute_logits
        model.forward, model.compute_logits = self.forward, self.compute

    def forward(self, *args: Any, **inputs: Any) -> torch.Tensor:
        hidden = self._forward(*args, **inputs)
        ids, positions = inputs["input_ids"], inputs["positions"]
        positions = positions[0] if positions.dim() == 2 else positions  # in text all three positions are equal
        self._hidden = hidden
        last = self.tokens.shape[1] - 1
        known = (self.tokens.to(ids.device)[:, positions.clamp(max=last)] == ids) & (positions <= last)
        self._place = torch.stack([known.int().argmax(0), positions], 1)
        right = self._no_draft_was_wrong(known.any(0).tolist(), self._place.tolist())
        self.logits.append(self._compute(hidden[right]).float().cpu())
        self.places.append(self._place[right].cpu())
        return hidden

    def _no_draft_was_wrong(self, known: list[bool], places: list[list[int]]) -> torch.Tensor:
        """Return whether each token is the sequence's own, and all tokens before it in its batch row are."""
        right = known[:1]
        for place, (request, position) in enumerate(places[1:], 1):
            before, at = places[place - 1]
            right.append(known[place] and (position != at + 1 or (right[-1] and request == before)))
        return torch.tensor(right, device=self._hidden.device)

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits as if the next token of the sequence were certain."""
        rows = (hidden[:, None] == self._hidden).all(-1).int().argmax(1)
        request, position = self._place[rows].unbind(1)
        following = self.tokens.to(hidden.device)[request, (position + 1).clamp(max=self.tokens.shape[1] - 1)]
        return torch.nn.functional.one_hot(following, VOCABULARY).to(torch.float32) * 100


def capture(worker: Any, tokens: torch.Tensor) -> None:
    worker.capture = Capture(worker.model_runner.get_model(), tokens)


def captured(worker: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits since the last call, and the request and position of each."""
    found = torch.cat(worker.capture.logits), torch.cat(worker.capture.places)
    worker.capture.logits, worker.capture.places = [], []
    return found


class NoCuteDsl(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "cutlass" else None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = lambda name: MagicMock()


def let_load(settings: dict[str, Any]) -> None:
    """Patch the parts of vLLM that cannot load a model here, with the plugin or without."""
    if settings["model_type"] == "kimi_linear" and find_spec("cutlass") is None:
        # Its module imports kernels in the CuTe DSL. Kimi-Linear on Hopper needs none of them on one GPU.
        os.environ["VLLM_KIMI_K3_GEMM_AR"] = "0"
        sys.meta_path.append(finder := NoCuteDsl())
        import_module("vllm.models.kimi_k3")
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "cutlass"]:
            del sys.modules[name]
    elif settings["model_type"] == "olmo_hybrid":  # its loader is not told which third of the convolution a weight is
        from vllm.model_executor.layers.mamba.gdn import olmo_gdn_linear_attn

        olmo_gdn_linear_attn._make_fused_conv1d_weight_loader = lambda *args: lambda conv, whole: conv.data.copy_(whole)


def main(
    model: str,
    out: Path,
    backwards: bool = False,
    prompts: Sequence[int] = PROMPTS,
    max_num_batched_tokens: int = 512,
    **options: Any,
) -> None:
    from vllm import LLM, SamplingParams

    let_load(json.loads((Path(model) / "config.json").read_text()))
    cuda = torch.cuda.is_available()
    llm = LLM(
        model,
        enforce_eager=True,
        enable_prefix_caching=True,
        max_model_len=1024,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=8,
        skip_tokenizer_init=True,
        additional_config={"mambacache": {"num_state_blocks": 64}, "gdn_prefill_backend": "triton"},
        **(
            {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.2}
            if cuda
            else {"dtype": "float32"}
        ),
        **options,
    )
    tokens = sequences(prompts)
    llm.collective_rpc(capture, args=(tokens,))
    requests = [
        ({"prompt_token_ids": own[:count].tolist()}, own[count : count + DECODED].tolist())
        for own, count in zip(tokens, prompts, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=DECODED, ignore_eos=True, detokenize=False)
    hits, seen = [], []
    for _ in range(2):
        order = requests[::-1] if backwards else requests
        outputs = llm.generate([prompt for prompt, _ in order], params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in outputs] == [answer for _, answer in order]
        hits.append([each.num_cached_tokens or 0 for each in outputs])
        seen.append(llm.collective_rpc(captured)[0])
    logits, places = (torch.cat(parts) for parts in zip(*seen, strict=True))
    torch.save({"logits": logits, "places": places, "first_round": len(seen[0][0]), "hits": hits}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), **json.loads((sys.argv[3:] or ["{}"])[0]))
