"""vLLM's own schedulers with ours around them: every state is where its row looks for it, whatever happens."""

from __future__ import annotations

import os
import random

import pytest
from simulation import STOP, VOCABULARY, Simulation, make_scheduler

SEEDS = int(os.environ.get("MAMBACACHE_SEEDS", "100"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_requests(seed: int) -> None:
    """20 requests with shared prefixes and little memory; aborts, preemptions, priorities, stops, resets."""
    rng = random.Random(seed)
    ahead = bool(seed % 2)
    scheduler = make_scheduler(
        rng.choice([3, 4, 5, 8, 16, 40]),
        rng.randint(96, 400),
        page=rng.choice([16, 16, 32, 64]),
        budget=rng.choice([70, 200, 500]),
        ahead=ahead,
        policy=rng.choice(["fcfs", "priority"]),
        checkpoint_interval=rng.choice([0, 0, 128]),
    )
    simulation = Simulation(scheduler, ahead=ahead)
    shared = [[rng.randrange(VOCABULARY) for _ in range(rng.choice([64, 128, 300, 640]))] for _ in range(3)]
    for number in range(20):
        prompt = rng.choice([*shared, []]) + [rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 1, 20, 65, 200]))]
        params = {"prompt_logprobs": 0} if rng.random() < 0.05 else {}
        simulation.add(
            str(number),
            prompt,
            rng.choice([1, 2, 30, 90]),
            salt=rng.choice(["", "", "", "other"]),
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
    simulation.check_end()


def disturb(simulation: Simulation, rng: random.Random) -> None:
    scheduler = simulation.scheduler
    if rng.random() < 0.02:
        simulation.abort(rng.choice(list(scheduler.requests) or ["0"]))
    if rng.random() < 0.01:
        scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def test_last_tokens_of_two_prompts_in_one_step() -> None:
    """One was cut before its last token, the other hits all but its last: both stand among the decode rows."""
    simulation = Simulation(make_scheduler(budget=64))
    shared = random_tokens(64)
    simulation.add("first", [*shared, 1], 1)
    simulation.drain()
    for _ in range(8):  # in one order or the other
        number = len(simulation.requests)
        simulation.add(f"{number} cut", random_tokens(65, number), 1)
        simulation.step()
        simulation.add(f"{number} hits", [*shared, 2], 1)
        simulation.drain()
    simulation.check_end()
