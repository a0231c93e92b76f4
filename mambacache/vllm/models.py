"""Show vLLM its recurrent models as attention models."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

from mambacache.runner.identity import weights_digest
from mambacache.vllm.config import PAGES, serves
from mambacache.vllm.settings import Settings

_MODULES = {
    "alice_ai": ["AliceAIForCausalLM"],
    "clef_flash": ["ClefFlashForJointSchema"],
    "colbert": ["ColBERTLfm2Model"],
    "colqwen3_5": ["ColQwen3_5"],
    "falcon_h1": ["FalconH1ForCausalLM"],
    "granitemoehybrid": ["GraniteMoeHybridForCausalLM"],
    "interns2_mobius": ["InternS2MobiusForConditionalGeneration"],
    "interns2_preview": ["InternS2PreviewForConditionalGeneration"],
    "jamba": ["JambaForCausalLM", "JambaForSequenceClassification"],
    "lfm2": ["Lfm2ForCausalLM"],
    "lfm2_moe": ["Lfm2MoeForCausalLM"],
    "lfm2_vl": ["Lfm2VlForConditionalGeneration"],
    "mamba": ["MambaForCausalLM", "FalconMambaForCausalLM"],
    "mamba2": ["Mamba2ForCausalLM"],
    "minicpm_ocr": ["MiniCPMOcrForConditionalGeneration"],
    "minicpmv4_6": ["MiniCPMV4_6ForConditionalGeneration"],
    "minicpmv4_7": ["MiniCPMV4_7ForConditionalGeneration"],
    "nano_nemotron_vl": [
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
    ],
    "nemotron_h": ["NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"],
    "olmo_hybrid": ["OlmoHybridForCausalLM"],
    "qwen3_5": [
        "Qwen3_5ForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ],
    "qwen3_next": ["Qwen3NextForCausalLM"],
    "vllm.models.kimi_k3": ["KimiLinearForCausalLM"],
    "zamba2": ["Zamba2ForCausalLM"],
}
_CLASSES = {
    "ColQwen3_5": "ColQwen3_5Model",
    "FalconMambaForCausalLM": "MambaForCausalLM",
    "Lfm2VlForConditionalGeneration": "Lfm2VLForConditionalGeneration",
    **dict.fromkeys(_MODULES["nano_nemotron_vl"], "NemotronH_Nano_VL_V2"),
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
}
ARCHITECTURES = {name: module for module, names in _MODULES.items() for name in names}
RAN_ON_A_GPU = {
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm2VlForConditionalGeneration",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
}
"""Architectures that are served without MAMBACACHE=1."""
ATTENTION_FREE = {*_MODULES["mamba"], *_MODULES["mamba2"]}

_FOREIGN = {
    "BailingMoELinearAttention": ["BailingMoeV2_5ForCausalLM"],
    "BailingMoeV3KimiDeltaAttention": ["BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"],
    "Glm5NextLinearAttention": ["Glm5NextForCausalLM", "Glm5NextForConditionalGeneration"],
    "KimiK3DeltaAttention": ["KimiK3ForConditionalGeneration"],
    "Qwen4ExpPLELayer": ["Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"],
}
LEFT = {name: f"its layer {layer} is not ours" for layer, names in _FOREIGN.items() for name in names}
"""Reasons why architectures stay vLLM's."""


class _StateCached:
    """Hides attributes of vLLM's model class."""

    is_hybrid = False
    is_attention_free = False
    has_inner_state = False
    without_attention: bool

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        from mambacache.vllm.layers import built
        from mambacache.vllm.layers.pages import Pages

        given: dict[str, Any] = {"vllm_config": vllm_config, "prefix": prefix}  # vLLM looks for both names here
        ours = serves(vllm_config)  # else the text part of a model left to vLLM
        with built() if ours else nullcontext():
            super().__init__(**given)
        if ours and self.without_attention:
            vllm_config.compilation_config.static_forward_context[PAGES] = Pages()
        self.mambacache_weights: str | None = None
        self._keeps_files = ours and Settings.of(vllm_config).state_disk_dir is not None

    def load_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Take a digest of weights before vLLM packs them."""
        loaded = super().load_weights(*args, **kwargs)
        model: Any = self
        complete = not any(each.is_meta for each in model.parameters())
        if self._keeps_files and self.mambacache_weights is None and complete:
            self.mambacache_weights = weights_digest(model)
        return loaded

    def get_model_state_cls(self) -> type:
        from mambacache.vllm.model_state import StateCacheModelState

        return StateCacheModelState


def __getattr__(name: str) -> Any:
    """Make an architecture's class for vLLM."""
    if name not in ARCHITECTURES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = ARCHITECTURES[name]
    module = module if "." in module else f"vllm.model_executor.models.{module}"
    original = getattr(import_module(module), _CLASSES.get(name, name))
    own = {"__module__": __name__, "__doc__": original.__doc__, "without_attention": name in ATTENTION_FREE}
    cls = type(name, (_StateCached, original), own)
    return globals().setdefault(name, cls)
