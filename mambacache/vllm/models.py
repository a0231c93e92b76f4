"""vLLM's models, seen by vLLM as models of attention alone: no pages for states, no page to align with them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "qwen3_next": ["Qwen3NextForCausalLM"],
    "qwen3_5": ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"],
    "olmo_hybrid": ["OlmoHybridForCausalLM"],
    "vllm.models.kimi_k3": ["KimiLinearForCausalLM"],
    "falcon_h1": ["FalconH1ForCausalLM"],
    "granitemoehybrid": ["GraniteMoeHybridForCausalLM"],
    "nemotron_h": ["NemotronHForCausalLM"],
    "zamba2": ["Zamba2ForCausalLM"],
    "jamba": ["JambaForCausalLM"],
    "lfm2": ["Lfm2ForCausalLM"],
    "lfm2_moe": ["Lfm2MoeForCausalLM"],
}
ARCHITECTURES = {name: module for module, names in _MODULES.items() for name in names}


class _StateCached:
    """Before the model class of vLLM, whose own attributes it hides."""

    is_hybrid = False
    has_inner_state = False

    def get_model_state_cls(self) -> type:
        """Asked by model runner V2."""
        from mambacache.vllm.model_state import StateCacheModelState

        return StateCacheModelState


def __getattr__(name: str) -> Any:
    """The class of an architecture, made when vLLM first asks for it."""
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = ARCHITECTURES[name]
    original = getattr(import_module(module if "." in module else f"vllm.model_executor.models.{module}"), name)
    cls = type(name, (_StateCached, original), {"__module__": __name__, "__doc__": original.__doc__})
    return globals().setdefault(name, cls)
