"""vLLM evicts KV pages in the order of the cache, so that states find their KV."""

from __future__ import annotations

import pytest
from scheduler_mixes import random_tokens
from simulation import Simulation, make_scheduler


def ask(simulation: Simulation, name: str, prompt: list[int]) -> list[int]:
    """Run a request alone, and return the prompt of the next turn."""
    simulation.add(name, prompt, 2)
    simulation.drain()
    return [*prompt, *simulation.answers[name], *random_tokens(70, len(prompt))]


def learned(page: int = 64) -> Simulation:
    """Return a scheduler with KV for 29 blocks that saw chats go on, in turn, and other prompts end."""
    simulation = Simulation(make_scheduler(40, 29 * 64 // page + 1, page=page, budget=2048))
    prompts = [random_tokens(70, number) for number in range(8)]
    for turn in range(4):
        for number, prompt in enumerate(prompts):
            prompts[number] = ask(simulation, f"chat {number}, {turn}", prompt)
            ask(simulation, f"single {number}, {turn}", random_tokens(140, 1000 + 4 * number + turn))
    return simulation


def chat(simulation: Simulation, turns: int) -> list[int]:
    """Run a chat, and return the prompt of its next turn."""
    prompt = random_tokens(70, 500)
    for turn in range(turns):
        prompt = ask(simulation, f"turn {turn}", prompt)
    return prompt


def fill(simulation: Simulation) -> None:
    """Run single prompts with 28 full blocks; the pool has 29."""
    for number in range(14):
        ask(simulation, f"later {number}", random_tokens(140, 2000 + number))


@pytest.mark.parametrize("page", [64, 16])
def test_a_chat_keeps_its_kv_beside_single_prompts_that_fill_the_pool(page: int) -> None:
    simulation = learned(page)
    prompt = chat(simulation, turns=4)
    fill(simulation)
    ask(simulation, "last turn", prompt)
    assert simulation.cached["last turn"] == 256
    simulation.check_end()


def test_an_aborted_turn_names_its_pages_too() -> None:
    simulation = learned()
    prompt = chat(simulation, turns=3)
    simulation.add("aborted", prompt, 9)
    for _ in range(2):
        simulation.step()
    simulation.abort("aborted")
    simulation.drain()
    fill(simulation)
    ask(simulation, "again", prompt)
    assert simulation.cached["again"] == 256
    simulation.check_end()


def test_a_reset_leaves_no_page_in_the_order() -> None:
    simulation = learned()
    assert simulation.scheduler.reset_prefix_cache()
    assert simulation.scheduler.prefix_cache.evict_kv(30) == []
    ask(simulation, "after", random_tokens(140, 3))
    assert ask(simulation, "again", random_tokens(140, 3)) and simulation.cached["again"] == 128
    simulation.check_end()


def test_a_page_that_is_lost_in_use_has_no_name_after_it() -> None:
    simulation = learned()
    manager = simulation.scheduler.kv_cache_manager
    simulation.add("user", chat(simulation, turns=3), 9)
    simulation.step()
    manager.evict_blocks({*manager.get_block_ids("user")[0]})
    simulation.drain()  # checks names after each step
    simulation.check_end()
