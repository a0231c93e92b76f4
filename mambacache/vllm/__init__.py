"""Serve vLLM's recurrent models from a state pool of our own."""

from __future__ import annotations

import os
from functools import cache
from multiprocessing import parent_process

from mambacache.vllm.log import logger


@cache
def register() -> None:
    """Register the plugin in a process of vLLM, unless MAMBACACHE=0 or vLLM differs from `contract`.

    Classes that never ran on a GPU wait for MAMBACACHE=1.
    """
    wanted = os.environ.get("MAMBACACHE")
    if wanted not in (None, "0", "1"):
        logger.error("mambacache is off: MAMBACACHE is %r, set it to 1 or 0, or unset it", wanted)
    off = wanted not in (None, "1")
    if off and parent_process() is not None:
        return
    from mambacache.vllm import contract

    if (difference := contract.difference()) is not None:
        if not off:
            logger.error("mambacache is off: %s", difference)
        return
    from vllm import ModelRegistry

    from mambacache.vllm import config, models

    known = models.ARCHITECTURES.keys() & ModelRegistry.models.keys()
    if off:  # vLLM has no log yet: the line waits
        for architecture in known:
            config.hook_left(architecture, "MAMBACACHE turns mambacache off")
        return
    served = config.unserved_device() is None
    for architecture in known:
        if wanted != "1" and architecture not in models.RAN_ON_A_GPU:
            config.hook_left(architecture, "it never ran on a GPU with mambacache, and MAMBACACHE=1 serves it")
            continue
        if served:
            ModelRegistry.register_model(architecture, f"mambacache.vllm.models:{architecture}")
        config.hook(architecture, has_attention=architecture not in models.ATTENTION_FREE)
    for architecture, reason in models.LEFT.items():
        config.hook_left(architecture, reason)
