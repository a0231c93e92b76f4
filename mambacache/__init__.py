"""Cache prefixes of models with recurrent state.

Public names load on first use: `mambacache.cache` loads neither torch nor transformers, and `mambacache.kernels` no
transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mambacache.cache.prefix_cache import PrefixCache
    from mambacache.config import CacheConfig, EngineConfig, SamplingParams
    from mambacache.engine.async_llm import AsyncLLM
    from mambacache.engine.llm import LLM
    from mambacache.engine.outputs import Completion, RequestMetrics, RequestOutput
    from mambacache.kernels import StatePool
    from mambacache.plan import SequenceStep, StepPlan
    from mambacache.report import CacheEvent, CacheStats, Hit, RequestReport
    from mambacache.scheduler.drafts import DraftTree

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "CacheConfig",
    "CacheEvent",
    "CacheStats",
    "Completion",
    "DraftTree",
    "EngineConfig",
    "Hit",
    "PrefixCache",
    "RequestMetrics",
    "RequestOutput",
    "RequestReport",
    "SamplingParams",
    "SequenceStep",
    "StatePool",
    "StepPlan",
]

_MODULES = {
    "LLM": "mambacache.engine.llm",
    "AsyncLLM": "mambacache.engine.async_llm",
    "CacheConfig": "mambacache.config",
    "CacheEvent": "mambacache.report",
    "CacheStats": "mambacache.report",
    "Completion": "mambacache.engine.outputs",
    "DraftTree": "mambacache.scheduler.drafts",
    "EngineConfig": "mambacache.config",
    "Hit": "mambacache.report",
    "PrefixCache": "mambacache.cache.prefix_cache",
    "RequestMetrics": "mambacache.engine.outputs",
    "RequestOutput": "mambacache.engine.outputs",
    "RequestReport": "mambacache.report",
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


def __dir__() -> list[str]:
    return __all__
