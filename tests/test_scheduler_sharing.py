"""Submit prompts with a shared prefix together: the prefix is computed once."""

from __future__ import annotations

from typing import Any

import pytest

from symbolic import text
from symbolic_driver import Driver, Job, Mix, run

SHARED = text(640)
FEW = {"num_state_blocks": 16, "num_kv_blocks": 64}
BUDGETS = [64, 200, 8192]
KINDS = [pytest.param({}, id="attention"), pytest.param({"has_attention": False, "num_kv_blocks": 0}, id="recurrent")]


def prompts(count: int, length: int = 640) -> list[list[int]]:
    """Return prompts that share `length` tokens; up to 40 of them differ in the next token."""
    return [SHARED[:length] + text(30 + i % 7, i) + [i // 40] for i in range(count)]


def computed(d: Driver) -> int:
    """Count the prompt tokens that were computed."""
    return d.tokens_computed - sum(len(request.output) - 1 for request in d.requests.values() if request.output)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("length", [640, 630])
def test_three_prompts_together_compute_the_shared_tokens_once(length: int, budget: int, kind: dict) -> None:
    three = prompts(3, length)
    d = run([Job(prompt) for prompt in three], budget=budget, **kind)
    shared = length // 64 * 64
    assert [d.hit(i) for i in range(3)] == [0, shared, shared]
    assert computed(d) == sum(map(len, three)) - 2 * shared
    assert d.cache.stats.preemptions == 0


@pytest.mark.parametrize("budget", [64, 200])
def test_another_prompt_takes_over_when_the_first_is_aborted_half_way(budget: int) -> None:
    three = prompts(3)
    d = run([Job(three[0], aborts=3), Job(three[1]), Job(three[2])], budget=budget)
    done = min(3 * (budget // 64 * 64), 640)
    assert [d.hit(i) for i in range(3)] == [0, done, 640]
    assert computed(d) == done + sum(map(len, three[1:])) - done - 640


def test_another_prompt_takes_over_when_the_first_is_aborted_before_it_stored_anything() -> None:
    three = prompts(3)
    d = run([Job(three[0], aborts=2), Job(three[1]), Job(three[2])], budget=30)
    assert [d.hit(i) for i in range(3)] == [0, 0, 640]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_sixty_four_prompts_together(budget: int, kind: dict) -> None:
    many = prompts(64)
    options = {"num_state_blocks": 200, "num_kv_blocks": 400, **kind}
    d = run([Job(prompt) for prompt in many], budget=budget, max_num_seqs=64, **options)
    assert [d.hit(i) for i in range(64)] == [0] + [640] * 63
    assert computed(d) == sum(map(len, many)) - 63 * 640


@pytest.mark.parametrize("blocks", [3, 4, 8])
def test_sixty_four_prompts_together_with_few_states(blocks: int) -> None:
    d = run([Job(prompt, 3) for prompt in prompts(64)], budget=200, max_num_seqs=64, num_state_blocks=blocks)
    assert sum(d.hit(i) == 640 for i in range(64)) >= 62


@pytest.mark.parametrize("budget", BUDGETS)
def test_identical_prompts_together(budget: int) -> None:
    d = run([Job(SHARED[:300])] * 5, budget=budget)
    assert [d.hit(i) for i in range(5)] == [0, 256, 256, 256, 256]
    assert computed(d) == 300 + 4 * 44


def test_a_tree_of_prompts_computes_each_branch_once() -> None:
    branches = [SHARED[:256] + text(256, seed) for seed in (1, 2)]
    leaves = [branch + text(20, seed) for branch in branches for seed in (3, 4, 5)]
    d = run([Job(leaf) for leaf in leaves], budget=8192)
    assert sorted(d.hit(i) for i in range(6)) == [0, 256, 512, 512, 512, 512]
    assert computed(d) == 256 + 2 * 256 + 6 * 20


def test_requests_behind_a_waiting_request_go_ahead() -> None:
    a, b = prompts(2)
    d = Driver(Mix([Job(a), Job(b), Job(text(50, 30), 9)], budget=250, cache=FEW))
    for index in range(3):
        d.submit(index)
    rows: list[list[str]] = []
    schedule = d.scheduler.schedule

    def scheduling() -> Any:
        plan = schedule()
        rows.append([step.request_id for step in plan.steps] if plan is not None else [])
        return plan

    d.scheduler.schedule = scheduling  # type: ignore[method-assign]
    while not d.scheduler.idle:
        d.step()
    d.check()
    assert [request_id for request_id, _ in d.cache.hits] == ["0.0", "2.0", "1.0"]
    assert ["0.0", "1.0", "2.0"] in rows  # in order of arrival again


@pytest.mark.parametrize("options", [{"salt": "other"}, {"read": False}])
def test_a_prompt_that_cannot_share_does_not_wait(options: dict) -> None:
    a, b = prompts(2)
    d = run([Job(a), Job(b, **options)], budget=8192)
    assert d.cache.stats.waits == 0 and computed(d) == len(a) + len(b)


def test_the_first_prompt_is_the_shared_prefix_itself() -> None:
    d = run([Job(SHARED[:256]), Job(SHARED[:300]), Job(SHARED[:256])], budget=100)
    assert [d.hit(i) for i in range(3)] == [0, 256, 192]


def test_the_shared_prefix_grows_while_it_is_waited_for() -> None:
    # The second prompt waits for 256 tokens of the first, the third for 512: both boundaries are stored.
    jobs = [Job(SHARED), Job(SHARED[:256] + text(9, 5)), Job(SHARED[:512] + text(9, 5))]
    d = run(jobs, budget=8192)
    assert [d.hit(i) for i in range(3)] == [0, 256, 512]
