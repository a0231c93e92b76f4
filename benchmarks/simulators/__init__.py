"""What other caches would hit: simulators of their policies, each one request after the other.

They follow the rules of the real ones as far as hits depend on them, with bytes of states and KV as budgets.
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
    "clairvoyant": Clairvoyant,
}
"""By name; the last one is told the whole trace."""
