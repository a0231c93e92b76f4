"""Serve vLLM's recurrent models from a state pool of our own."""

from __future__ import annotations

import os
from functools import cache
from multiprocessing import parent_process

from mambacache.vllm.log import logger


@cache
def register() -> None:
    """Register the plugin in a process of vLLM, if MAMBACACHE=1 and vLLM agrees with `contract`."""
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
    if wanted != "1":  # vLLM has no log yet: the line waits
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
