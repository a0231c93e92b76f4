"""Draw requests at random for the simulated scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from sequences import VOCABULARY
from simulation import HAS_LOOKAHEAD, STOP, Simulation, make_scheduler


def random_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def random_mix(
    seed: int, begin: Callable[[Simulation], object] = lambda simulation: None, *, again: bool = False, **settings: Any
) -> Simulation:
    """Run 20 requests, or 40 if prompts come `again`, with shared prefixes and little memory, to their end.

    Aborts, preemptions, priorities, stops, resets, adapters and images are among them. A fifth of the mixes has no
    attention, half of them have drafts, and half of these run a step ahead.

    Args:
        begin: called before the first request.
        settings: of `make_scheduler`.
    """
    rng = random.Random(seed)
    ahead, drafts = bool(seed % 2), (1, 3, 7)[seed % 3] if seed % 4 in (0, 3) else 0
    states, pages, page = rng.choice([3, 4, 5, 8, 16, 40]), rng.randint(96, 400), rng.choice([8, 16, 32, 64])
    if "connector" in settings:  # a request takes up to 930 tokens
        pages = 1000 // page + pages % 16
    scheduler = make_scheduler(
        states,
        pages,
        page=page,
        budget=rng.choice([70, 200, 500]),
        ahead=ahead,
        policy=rng.choice(["fcfs", "priority"]),
        checkpoint_interval=rng.choice([0, 0, 128]),
        attention=seed % 5 != 4 or "connector" in settings,
        drafts=drafts,
        v2=ahead or seed % 16 == 0,
        **settings,
    )
    lookahead = HAS_LOOKAHEAD and seed % 8 == 3 and scheduler.connector is None  # vLLM's rule
    simulation = Simulation(
        scheduler, ahead=ahead, drafts=drafts, secretive=seed % 8 == 0, lookahead=int(lookahead),
        failing=(0.0, 0.0, 0.2)[seed // 3 % 3], slow=(0.0, 0.5, 0.9)[seed // 9 % 3], seed=seed,
    )  # fmt: skip
    begin(simulation)
    shared = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([64, 128, 300, 640]))] for _ in range(3)]
    prompts: list[list[int]] = []
    for number in range(40 if again else 20):
        prompt = rng.choice([*shared, []]) + [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1, 20, 65, 200]))]
        prompt = rng.choice(prompts) if again and prompts and rng.random() < 0.6 else prompt
        prompts.append(prompt)
        params = {"prompt_logprobs": 0} if rng.random() < 0.05 else {}
        simulation.add(
            str(number),
            prompt,
            rng.choice([1, 2, 30, 90]),
            salt=rng.choice(["", "", "", "other"]),
            lora=rng.choice(["", "", "", "adapter"]),
            lora_path=rng.choice(["before", "after"]),
            images={20: rng.choice("ab")} if len(prompt) > 60 and rng.random() < 0.3 else {},
            priority=rng.randrange(3),
            stop_token_ids=[STOP] if rng.random() < 0.5 else [],
            **params,
        )
        for _ in range(rng.randrange(4)):
            simulation.step()
            disturb(simulation, rng)
    while scheduler.has_unfinished_requests():
        simulation.step()
        disturb(simulation, rng)
    simulation.drain()
    return simulation


def disturb(simulation: Simulation, rng: random.Random) -> None:
    scheduler = simulation.scheduler
    if rng.random() < 0.02:
        simulation.abort(rng.choice(list(scheduler.requests) or ["0"]))
    if rng.random() < 0.01:
        with_running = rng.random() < 0.5 and scheduler.connector is None  # vLLM raises if a connector loads
        scheduler.reset_prefix_cache(reset_running_requests=with_running)
