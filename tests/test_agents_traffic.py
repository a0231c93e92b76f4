"""Check that generated traffic repeats, and shares exactly the prefixes that its ceilings say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import replay_agents  # noqa: E402
from replay_agents import compare  # noqa: E402
from replay_trace import Row, Run, load, measure  # noqa: E402
from simulators.agents import FIRST_TOKEN, Setting, Traffic, setting  # noqa: E402
from simulators.parts import GIB  # noqa: E402
from trace_tokens import FIRST_ANSWER_TOKEN, Request  # noqa: E402

ALONE = replace(
    setting(0), applications=1, instructions=600, every=1e6, documents=0, rounds=40, calls=0, window=10**9,
    forgets=False, sub_agents=0, retries=0,
)  # fmt: skip


def common(first: np.ndarray, second: np.ndarray) -> int:
    count = min(len(first), len(second))
    different = np.flatnonzero(first[:count] != second[:count])
    return int(different[0]) if len(different) else count


def whole(request: Request) -> np.ndarray:
    return np.concatenate([request.prompt, request.answer])


def shared(made: Sequence[Request]) -> np.ndarray:
    """Return the tokens that all prompts begin with."""
    return made[0].prompt[: min(common(made[0].prompt, request.prompt) for request in made[1:])]


def traffic(change: Setting, count: int) -> list[Request]:
    return Traffic(change).run(count)


def starts_with(request: Request, before: Request) -> bool:
    return common(request.prompt, whole(before)) == len(whole(before))


@pytest.mark.parametrize("number", range(6))
def test_ceilings_are_the_longest_prefixes_of_earlier_requests(number: int) -> None:
    made = traffic(setting(number), 60)
    for place, request in enumerate(made):
        longest = max((common(request.prompt[:-1], whole(before)) for before in made[:place]), default=0)
        assert request.ceiling == longest


def test_a_setting_gives_the_same_traffic_again_and_other_settings_give_other_traffic() -> None:
    first, again, other = (traffic(setting(number), 40) for number in (3, 3, 4))

    def key(made: Sequence[Request]) -> list[tuple[float, bytes]]:
        return [(request.arrival, whole(request).tobytes()) for request in made]

    assert key(first) == key(again) != key(other)


def test_requests_come_in_order_and_above_the_tokens_of_a_trace() -> None:
    made = traffic(setting(1), 200)
    assert [request.arrival for request in made] == sorted(request.arrival for request in made)
    assert min(int(whole(request).min()) for request in made) == FIRST_TOKEN > FIRST_ANSWER_TOKEN


def test_a_chat_goes_on_where_its_answer_ended() -> None:
    made = traffic(ALONE, 6)
    assert all(starts_with(after, before) for before, after in pairwise(made))


def test_thoughts_vanish_at_the_next_user_message_alone() -> None:
    made = traffic(replace(ALONE, calls=3.0, forgets=True), 30)
    kept = traffic(replace(ALONE, calls=3.0), 30)
    went_on = [starts_with(after, before) for before, after in pairwise(made)]
    assert True in went_on and False in went_on
    assert all(starts_with(after, before) for before, after in pairwise(kept))
    for before, after, goes_on in zip(made, made[1:], went_on, strict=False):
        assert goes_on or len(shared(made)) <= after.ceiling < len(whole(before))


@pytest.mark.parametrize("summarises", [True, False])
def test_histories_stay_within_the_window(summarises: bool) -> None:
    change = replace(ALONE, window=3000, message=200, answer=300, summarises=summarises)
    made, free = traffic(change, 30), traffic(replace(change, window=10**9), 30)
    assert max(len(request.prompt) for request in made) < max(len(request.prompt) for request in free) / 2


def test_retries_repeat_a_prompt() -> None:
    made = traffic(replace(ALONE, retries=0.5), 40)
    again = [np.array_equal(one.prompt, two.prompt) for one, two in pairwise(made)]
    assert 5 < sum(again) < 30
    once = traffic(ALONE, 40)
    assert not any(np.array_equal(one.prompt, two.prompt) for one, two in pairwise(once))


def test_documents_have_many_endings() -> None:
    made = traffic(replace(ALONE, documents=1, document=5000, endings=10**6), 10)
    document = shared(made)
    assert len(document) > 2000
    assert all(request.ceiling == len(document) for request in made[1:])


def test_sub_agents_start_from_instructions_of_their_own() -> None:
    change = replace(ALONE, calls=10, sub_agents=1.0)
    starts = {int(request.prompt[0]) for request in traffic(change, 60)}
    assert len(starts) == 2 and {int(request.prompt[0]) for request in traffic(ALONE, 10)} < starts


def test_traffic_alone_and_mixed_with_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "two.jsonl"
    line = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [3, %d]}\n'
    trace.write_text(line % (0, 4) + line % (600_000, 5))
    run = Run(trace, "qwen3-next", "lru", "20+40", 1, False, None, agents=1)
    name, mixed = load(run)
    assert name == "two+agents-1" and len(mixed) == 2002
    assert [request.arrival for request in mixed] == sorted(request.arrival for request in mixed)
    assert 0 < next(place for place, request in enumerate(mixed) if request.arrival == 600) < 2001
    assert load(replace(run, agents=None))[0] == "two" and load(replace(run, trace=None))[0] == "agents-1"


@pytest.mark.parametrize("policy", ["mambacache", "lru"])
def test_requests_before_the_split_warm_the_cache_and_are_not_counted(policy: str, tmp_path: Path) -> None:
    trace = tmp_path / "three.jsonl"
    line = '{"timestamp": %d, "input_length": 1100, "output_length": 5, "hash_ids": [3, %d, %d]}\n'
    trace.write_text(line % (0, 4, 5) + line % (1000, 6, 7) + line % (2000, 4, 5))
    run = Run(trace, "qwen3-next", policy, "20+40", 1, False, None)
    row, late = measure(run), measure(replace(run, after=2.0))
    assert row.share == pytest.approx(1088 / (512 + 1099)) and late.share == pytest.approx(1088 / 1099)
    assert row.place() != late.place()


def test_a_comparison_has_means_and_settings_far_behind() -> None:
    rows = {1: {"mambacache": 0.9, "lru-joint": 0.8}, 3: {"mambacache": 0.5, "lru-joint": 0.55}}
    assert compare(rows) == [
        "mambacache    70.0   ahead: mean +0.0, worst +0.0, 2 points behind in 0%",
        "lru-joint     67.5   ahead: mean +2.5, worst -5.0, 2 points behind in 50%",
    ]


def test_a_quarter_of_the_states_is_compared_with_unbounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Run] = []

    def measured(run: Run) -> Row:
        runs.append(run)
        return Row("", run.model, run.policy, 1, None, None, 0.0, share=0.8 / len(runs), states_kept=1000)

    monkeypatch.setattr(replay_agents, "measure", measured)
    assert replay_agents.shares("quarter", 1) == {"unbounded": 0.8, "mambacache": 0.4}
    states, kv = map(float, runs[1].budget.split("+"))
    assert runs[0].budget == "unbounded" and abs(states * GIB - 250 * 77_266_944) < 1e6 and kv > 100
