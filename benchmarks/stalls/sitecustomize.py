"""Log long steps of vLLM's engine with their compilations and garbage collections.

A process with this folder in PYTHONPATH imports this module at its start, as a server of `bench_serving.py --stalls`.
The file MAMBACACHE_STALLS receives a JSON object for each long step:

- `held`: Seconds of the step.
- `compiled`: Seconds of Triton's compilations and cache reads, by kernel.
- `collected`: Seconds of garbage collections.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LONG = 0.1
"""Least seconds of a long step."""
compiled: defaultdict[str, float] = defaultdict(float)
collected: list[float] = []
"""Seconds of each collection in the current step; during a collection the last item is its start."""


class Changed(MetaPathFinder):
    """Changes a module after its import."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def watch_steps(core: Any) -> None:
    """Change `vllm.v1.engine.core`."""
    for name in ("step", "step_with_batch_queue"):
        setattr(core.EngineCore, name, noted(getattr(core.EngineCore, name)))


def noted(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def run(*args: Any, **named: Any) -> Any:
        compiled.clear()
        collected.clear()
        began = time.perf_counter()
        result = step(*args, **named)
        held = time.perf_counter() - began
        if held > LONG:
            line = {"held": held, "compiled": dict(compiled), "collected": sum(collected)}
            with Path(os.environ["MAMBACACHE_STALLS"]).open("a") as file:
                file.write(json.dumps(line) + "\n")
        return result

    return run


def watch_compilations(jit: Any) -> None:
    """Change `triton.runtime.jit`."""
    compile_kernel = jit.JITFunction._do_compile

    def timed(kernel: Any, *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = compile_kernel(kernel, *args, **named)
        compiled[f"{kernel.module}.{kernel.__name__}"] += time.perf_counter() - began
        return result

    jit.JITFunction._do_compile = timed


def watch_collections(phase: str, _: dict[str, int]) -> None:
    now = time.perf_counter()
    if phase == "start":
        collected.append(now)
    elif collected:
        collected[-1] = now - collected[-1]


sys.meta_path.insert(0, Changed("vllm.v1.engine.core", watch_steps))
sys.meta_path.insert(0, Changed("triton.runtime.jit", watch_compilations))
gc.callbacks.append(watch_collections)
