"""mambacache as a plugin of vLLM: recurrent states leave vLLM's KV cache and live in a pool of their own.

Nothing of vLLM is replaced while it is imported: the plugin registers model classes, which build its layers, and a
config hook, which names its scheduler and its worker.
"""

from __future__ import annotations

import os
from functools import cache
from multiprocessing import parent_process

from mambacache.vllm.log import logger


@cache
def register() -> None:
    """Called by vLLM in every process: front end, engine core, each worker, and the one that inspects a model.

    Only with MAMBACACHE=1, and not at all where vLLM is not as `contract` knows it: vLLM serves as always then. Without
    MAMBACACHE=1 a line in the log of the front end says that the plugin is off, for the models that it would serve.
    """
    wanted = os.environ.get("MAMBACACHE", "0")
    if wanted not in ("0", "1"):
        logger.error("mambacache is off: MAMBACACHE is %r, set it to 1 or 0", wanted)
    if wanted != "1" and parent_process() is not None:
        return
    from mambacache.vllm import contract

    if (difference := contract.difference()) is not None:
        if wanted == "1":
            logger.error("mambacache is off: %s", difference)
        return
    from vllm import ModelRegistry

    from mambacache.vllm import config, models

    known = models.ARCHITECTURES.keys() & ModelRegistry.models.keys()
    if wanted != "1":  # vLLM loads plugins before it sets up its log: the line waits for a model
        for architecture in known:
            config.hook_left(architecture, "mambacache is off, and MAMBACACHE=1 turns it on")
        return
    served = config.unserved_device() is None
    for architecture in known:
        if served:
            ModelRegistry.register_model(architecture, f"mambacache.vllm.models:{architecture}")
        config.hook(architecture, has_attention=architecture not in models.ATTENTION_FREE)
    for architecture, reason in models.LEFT.items():
        config.hook_left(architecture, reason)
