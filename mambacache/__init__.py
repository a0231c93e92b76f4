"""A prefix cache for models with recurrent state, and the engine parts that feed it.

The public names are resolved on first use: importing `mambacache.cache` loads neither torch nor transformers, and
importing `mambacache.kernels` loads no transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mambacache.cache.prefix_cache import PrefixCache
    from mambacache.config import CacheConfig, EngineConfig, SamplingParams
    from mambacache.engine.llm import LLM
    from mambacache.kernels import StatePool
    from mambacache.plan import SequenceStep, StepPlan
    from mambacache.report import CacheEvent, Hit

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CacheConfig",
    "CacheEvent",
    "EngineConfig",
    "Hit",
    "PrefixCache",
    "SamplingParams",
    "SequenceStep",
    "StatePool",
    "StepPlan",
]

_MODULES = {
    "LLM": "mambacache.engine.llm",
    "CacheConfig": "mambacache.config",
    "CacheEvent": "mambacache.report",
    "EngineConfig": "mambacache.config",
    "Hit": "mambacache.report",
    "PrefixCache": "mambacache.cache.prefix_cache",
    "SamplingParams": "mambacache.config",
    "SequenceStep": "mambacache.plan",
    "StatePool": "mambacache.kernels",
    "StepPlan": "mambacache.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs {error.name}, which is not installed: pip install {__name__}") from error
    globals()[name] = value
    return value
