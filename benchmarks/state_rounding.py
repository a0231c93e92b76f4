"""Measure the drift of float16 states in decode, rounded once a fold as in mambacache, or once a token.

    python benchmarks/state_rounding.py [--tokens 8192] [--json OUT]

vLLM rounds the states of Mamba and Mamba2 once a token. With --enable-mamba-cache-stochastic-rounding it rounds up with
the probability of the lost fraction. Errors of states are relative to float64's root mean square, by log decay of a
token. It runs on a CPU with bfloat16 activations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from about import about
from torch import Tensor
from tqdm import tqdm

from mambacache import CacheConfig, PrefixCache
from mambacache.kernels import StateIndices, StatePool, StateTensor, selective_scan, selective_scan_log, ssd, ssd_log

DECAYS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
REQUESTS, WIDTH, STATE = 8, 16, 16  # WIDTH channels for each decay, STATE values for each channel
PROMPT = 64  # tokens, in prefill
INPUTS = {"noise": (0.0, 1.0), "noise around one": (1.0, 1.0), "little noise": (1.0, 0.1), "constant": (1.0, 0.0)}
"""Mean and standard deviation of x and B."""


class Token(NamedTuple):
    """Holds the inputs of one token of each request.

    Attributes:
        x: bfloat16 [REQUESTS, decays, WIDTH].
        dt: bfloat16 [REQUESTS, decays], before softplus.
        B: bfloat16 [REQUESTS, STATE].
    """

    x: Tensor
    dt: Tensor
    B: Tensor

    def terms(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the decay of the states and the added term, [REQUESTS, decays, WIDTH or 1, STATE or 1]."""
        x, dt, B = (each.to(dtype) for each in self)
        step = torch.nn.functional.softplus(dt, threshold=50)[..., None, None]
        return torch.exp(-step), step * x[..., None] * B[:, None, None, :]


def tokens(kind: str, count: int) -> Iterator[Token]:
    """Yield the same tokens in every call."""
    generator = torch.Generator().manual_seed(0)
    (mean, deviation), decays = INPUTS[kind], torch.tensor(DECAYS, dtype=torch.float64)

    def normal(*shape: int) -> Tensor:
        return torch.randn(REQUESTS, *shape, generator=generator, dtype=torch.float64)

    for _ in range(count):
        steps = decays * torch.exp(0.3 * deviation * normal(len(DECAYS)))
        x, B = (mean + deviation * normal(*shape) for shape in ((len(DECAYS), WIDTH), (STATE,)))
        yield Token(x.bfloat16(), steps.expm1().log().bfloat16(), B.bfloat16())


def to_nearest(states: Tensor) -> Tensor:
    return states.half()


def at_random(states: Tensor) -> Tensor:
    """Return float16 states, each of the two neighbours with the probability of its nearness."""
    nearest = states.half()
    off = states.double() - nearest.double()
    other = torch.nextafter(nearest, torch.full_like(nearest, torch.inf).copysign(off.half()))
    chance = off.abs() / (other.double() - nearest.double()).abs()
    return torch.where(torch.rand_like(chance) < chance, other, nearest)


def once_a_token(kind: str, count: int, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the states after `count` tokens, computed in fp32 and rounded after each token in decode."""
    states = torch.zeros(REQUESTS, len(DECAYS), WIDTH, STATE)
    for i, token in enumerate(tokens(kind, count)):
        decay, added = token.terms(torch.float32)
        states = decay * states + added
        if i >= PROMPT - 1:
            states = rounded(states).float()
    return states.double()


def exact(kind: str, count: int) -> Tensor:
    """Return the states after `count` tokens in float64."""
    states = torch.zeros(REQUESTS, len(DECAYS), WIDTH, STATE, dtype=torch.float64)
    for token in tokens(kind, count):
        decay, added = token.terms(torch.float64)
        states = decay * states + added
    return states


Run = Callable[[Token, Tensor, tuple[Tensor, ...], StateIndices], None]


def run_ssd(token: Token, states: Tensor, log: tuple[Tensor, ...], indices: StateIndices) -> None:
    B = token.B[:, None]
    A = torch.full((len(DECAYS),), -1.0)
    ssd(token.x, token.dt, A, B, B, None, None, None, states, log, indices)


def run_selective_scan(token: Token, states: Tensor, log: tuple[Tensor, ...], indices: StateIndices) -> None:
    x, dt = token.x.flatten(1), token.dt.repeat_interleave(WIDTH, dim=1)
    A = torch.full((x.shape[1], STATE), -1.0)
    selective_scan(x, dt, A, token.B, token.B, torch.zeros(x.shape[1]), None, None, states, log, indices)


def layout(op: str) -> list[StateTensor]:
    """Return the tensors of a state, then of its log."""
    shape: tuple[int, ...] = (len(DECAYS), WIDTH, STATE) if op == "ssd" else (len(DECAYS) * WIDTH, STATE)
    dtypes = torch.bfloat16, torch.float16
    log = ssd_log(len(DECAYS), 1, WIDTH, STATE, *dtypes) if op == "ssd" else selective_scan_log(*shape, *dtypes)
    return [StateTensor(shape, torch.float16), *log]


def once_a_fold(op: str, kind: str, count: int) -> Tensor:
    """Return the float16 states after `count` tokens of an op, in blocks that a cache allocates."""
    run = run_ssd if op == "ssd" else run_selective_scan
    cache = PrefixCache(CacheConfig(num_state_blocks=3 * REQUESTS, has_attention=False))
    state, *log_layout = layout(op)
    (states,) = StatePool([[state]], 3 * REQUESTS, "cpu").layers[0]
    log = StatePool([log_layout], REQUESTS + 1, "cpu").layers[0]
    names = [str(i) for i in range(REQUESTS)]
    for i, name in enumerate(names):
        cache.add(name, [i] * PROMPT)
        cache.admit(name)
    given = tokens(kind, count)
    for done in tqdm(range(PROMPT, count + 1), desc=f"{op}, {kind}", unit="token"):
        prefill = done == PROMPT
        steps = [cache.allocate(name, PROMPT if prefill else 1) for name in names]
        assert None not in steps, "there is a block for every row"
        plan = cache.plan(steps)
        indices = StateIndices.from_arrays(plan.arrays, "cpu")
        batch = [next(given) for _ in range(PROMPT if prefill else 1)]
        token = Token(*(torch.stack(each, dim=1).flatten(0, 1) for each in zip(*batch, strict=True)))
        run(token, states, log, indices)
        cache.issued(plan.steps)
        cache.accept(plan.steps, {name: [0] for name in names})
    return states[[step.dst for step in plan.steps]].double().view(REQUESTS, len(DECAYS), WIDTH, STATE)


def measure(op: str, kind: str, count: int) -> dict[str, list[float]]:
    """Return the relative error of each way to round, by decay."""
    right = exact(kind, count)
    found = {
        "fold, to nearest": once_a_fold(op, kind, count),
        "token, to nearest": once_a_token(kind, count, to_nearest),
        "token, at random": once_a_token(kind, count, at_random),
    }

    def error(states: Tensor) -> list[float]:
        squares = [each.square().mean((0, 2, 3)) for each in (states - right, right)]
        return (squares[0] / squares[1]).sqrt().tolist()

    return {way: error(states) for way, states in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="decoded after the prompt, a multiple of 16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(1)
    count = PROMPT + args.tokens
    errors = {op: {kind: measure(op, kind, count) for kind in INPUTS} for op in ("ssd", "selective_scan")}
    for op, kinds in errors.items():
        for kind, ways in kinds.items():
            print(f"\n{op}, {kind}".ljust(30), *(f"{decay:8.0e}" for decay in DECAYS))
            for way, found in ways.items():
                print(way.ljust(29), *(f"{each:8.1e}" for each in found))
    if args.json is not None:
        result = {**about("torch"), "tokens": args.tokens, "log_decays": DECAYS, "relative_errors_of_states": errors}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
