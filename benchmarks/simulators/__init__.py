"""Simulate the prefix hits of other caches, one request after the other.

Simulators follow the rules of real caches as far as hits depend on them, with budgets in bytes of states and KV.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trace_tokens import Request

from simulators.clairvoyant import Clairvoyant
from simulators.lru import TailLru
from simulators.marconi import Marconi
from simulators.parts import Budget, Shape, Simulator
from simulators.sglang import SglangRadix
from simulators.vllm import VllmAlign

POLICIES: dict[str, Callable[[Shape, Budget, Sequence[Request]], Simulator]] = {
    "vllm": lambda shape, budget, _: VllmAlign(shape, budget),
    "sglang": lambda shape, budget, _: SglangRadix(shape, budget),
    "marconi": lambda shape, budget, _: Marconi(shape, budget),
    "lru": lambda shape, budget, _: TailLru(shape, budget, joint=False),
    "lru-joint": lambda shape, budget, _: TailLru(shape, budget, joint=True),
    "lru-ends": lambda shape, budget, _: TailLru(shape, budget, joint=True, ends=True),
    "clairvoyant": Clairvoyant,
}
"""Simulators by name; only the last reads the trace in advance."""
