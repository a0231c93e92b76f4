"""Check which layers vLLM builds, model after model in one process: `python left_run.py jamba DIRECTORY`.

A layer is registered for all models of a process. A model that is left to vLLM could be given our layers, which have no
pool there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from family_run import CHANGES  # sets the environment
from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.mamba.mamba_mixer import MambaMixer
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.jamba import JambaForCausalLM
from vllm.model_executor.models.utils import init_vllm_registered_model
from watched import LAST_ANSWER

from mambacache.vllm.config import hook_left
from mambacache.vllm.layers.mamba import Mamba1
from mambacache.vllm.log import logger
from tiny_models import save_tiny_model

SERVED, LEFT = "JambaForCausalLM", "LeftForCausalLM"


def configure(directory: Path, architecture: str) -> tuple[VllmConfig, list[str]]:
    """Configure as `vllm serve` does. Return the configuration and the plugin's log lines about it."""
    names = {"architectures": [architecture]}
    arguments = EngineArgs(
        str(directory), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, hf_overrides=names
    )
    with patch.object(logger, "info") as info:
        config = arguments.create_engine_config()
    return config, [call.args[0] % call.args[1:] for call in info.call_args_list]


def layers_of(config: VllmConfig) -> set[type]:
    context = config.compilation_config.static_forward_context
    found = {type(layer) for layer in context.values() if isinstance(layer, MambaMixer)}
    context.clear()
    return found


def built(config: VllmConfig) -> set[type]:
    initialize_model(config)
    return layers_of(config)


def built_as_text_part(config: VllmConfig, text: Any) -> set[type]:
    with set_current_vllm_config(config):
        init_vllm_registered_model(config, hf_config=text, architectures=[SERVED])
    return layers_of(config)


def main(name: str, directory: Path) -> None:
    save_tiny_model(name, directory, **CHANGES[name])
    served, said = configure(directory, SERVED)
    assert said == [f"mambacache serves the recurrent states of {SERVED}; MAMBACACHE=0 leaves them to vLLM"]
    ModelRegistry.register_model(LEFT, JambaForCausalLM)
    hook_left(LEFT, "a test wants it so")
    left, said = configure(directory, LEFT)
    assert said == [f"mambacache leaves {LEFT} to vLLM: a test wants it so"]
    assert left.scheduler_config.scheduler_cls is None and "mambacache" not in left.parallel_config.worker_cls
    assert left.model_config.is_hybrid and left.cache_config.mamba_block_size
    with set_current_vllm_config(served):
        init_distributed_environment(1, 0, f"file://{directory}.store", 0, "gloo")
        initialize_model_parallel(1, 1)
    text = AutoConfig.from_pretrained(directory)
    for _ in range(2):
        assert built(served) == {Mamba1}
        assert not op_registry_oot
        assert built(left) == {MambaMixer}
        assert built_as_text_part(left, text) == {MambaMixer}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print(LAST_ANSWER, flush=True)
