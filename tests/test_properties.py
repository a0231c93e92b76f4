"""Run random mixes of requests on the symbolic model: each request gets the same tokens as alone.

Every run that imports the same modules draws the same mixes, since hypothesis takes constants from these modules.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mixes import mixes, seeds
from symbolic import VOCAB, answer
from symbolic_driver import Driver, Job, Mix

_random = random.Random(0)
STEMS = [[_random.randrange(VOCAB) for _ in range(48)] for _ in range(3)]


def prompt(path: list[int], length: int) -> list[int]:
    """Walk through few stems, so that prompts share beginnings of all lengths."""
    return [token for stem in path for token in STEMS[stem]][:length]


@st.composite
def job_lists(draw: st.DrawFn, longest: int, count: int, options: bool, attention: bool, many: bool) -> list[Job]:
    jobs: list[Job] = []
    for _ in range(draw(st.integers(1, count))):
        path = draw(st.lists(st.sampled_from([0, 0, 0, 1, 2]), min_size=6, max_size=6))
        length = draw(st.one_of(st.integers(1, longest), st.sampled_from([64, 65, 128, 129, 192])))
        job = Job(prompt(path, min(length, longest)), arrives=draw(st.integers(0, 12)))
        job.max_tokens = draw(st.one_of(st.integers(1, 5), st.integers(1, 70)))
        if jobs and draw(st.integers(0, 3)) == 0:  # the next turn of a chat
            earlier = draw(st.sampled_from(jobs))
            said = answer(earlier.prompt, earlier.max_tokens, attention=attention)
            job.prompt = (earlier.prompt + said + job.prompt[:40])[: longest + 75]
        if options:
            job.salt = draw(st.sampled_from(["", "", "", "tenant"]))
            job.aborts = draw(st.one_of(st.none(), st.none(), st.integers(job.arrives, 40)))
            job.read, job.store = draw(st.integers(0, 5)) > 0, draw(st.integers(0, 5)) > 0
            job.marks = tuple(draw(st.lists(st.integers(0, 300), max_size=2)))
            if draw(st.booleans()):
                said = answer(job.prompt, job.max_tokens, attention=attention)
                job.stop = (draw(st.sampled_from(said)),)
        if many:
            job.n = draw(st.sampled_from([1, 1, 2, 4]))
        jobs.append(job)
    return jobs


@st.composite
def shared_memory(draw: st.DrawFn, whole: int) -> dict[str, Any]:
    """Draw `CacheConfig` fields for a shared memory that holds the longest request, alone or with others."""
    states, pages = draw(st.sampled_from([(1, 1), (1, 2), (1, 5), (1, 5), (3, 1), (1, 20)]))
    reserve = draw(st.sampled_from([2, 2, 4]))
    slabs = -(-draw(st.sampled_from([whole, whole + 1, 2 * whole, 60])) // pages)
    blocks = {"num_state_blocks": (reserve + slabs) * states, "num_kv_blocks": slabs * pages}
    return {"slab": (states, pages), **blocks}


@st.composite
def any_mix(draw: st.DrawFn, drafts: bool = False, faults: bool = False) -> Mix:
    size = draw(st.sampled_from([64, 64, 64, 128]))
    budget = draw(st.sampled_from([1, 7, 63, 64, 65, 100, 200, 200, 1000, 1000]))
    small = budget < 60
    attention = draw(st.integers(0, 4)) > 0
    jobs = draw(job_lists(120 if small else 280, 3 if small else 6, True, attention, many=not small))
    whole = max(-(-(len(job.prompt) + job.max_tokens) // size) for job in jobs)
    max_drafts = draw(st.integers(1, 7)) if drafts else 0
    cache = {
        "block_size": size,
        "has_attention": attention,
        "num_kv_blocks": draw(st.sampled_from([whole, whole + 1, 2 * whole, 60])) if attention else 0,
        "num_state_blocks": draw(st.sampled_from([2, 3, 5, 12, 40])),
        "max_draft_tokens": max_drafts,
        "max_checkpoints": draw(st.sampled_from([None, None, None, 0, 1, 3])),
        "checkpoint_interval": draw(st.sampled_from([0, 0, 0, 1, 2])) * size,
        "strict_reuse": draw(st.integers(0, 3)) == 0,
    }
    if attention and draw(st.booleans()):
        cache |= draw(shared_memory(whole))
    mix = Mix(jobs, budget=budget, cache=cache)
    mix.max_num_seqs = draw(st.sampled_from([1, 2, 3, 8, 8]))
    mix.long_prefill = draw(st.sampled_from([0, 0, 0, 5, 64, 90]))
    mix.draft_errors = draw(st.integers(1, 9)) if drafts else None
    mix.trees = draw(st.booleans())
    mix.ahead = draw(st.sampled_from([0, 0, 1, 1, 3]))
    if faults:
        mix.fails = frozenset(draw(st.lists(st.integers(0, 60), max_size=4)))
        mix.late_fails = frozenset(draw(st.lists(st.integers(0, 40), max_size=6)))
        mix.resets = frozenset(draw(st.lists(st.integers(0, 60), max_size=2)))
        mix.bad = draw(st.one_of(st.none(), st.integers(0, len(jobs) - 1)))
    return mix


@mixes(250)
@given(any_mix())
def test_any_mix(mix: Mix) -> None:
    Driver(mix).run()


@mixes(250)
@given(any_mix(drafts=True))
def test_any_mix_with_drafts(mix: Mix) -> None:
    Driver(mix).run()


@mixes(250)
@given(any_mix(faults=True))
def test_any_mix_with_failing_steps_and_resets(mix: Mix) -> None:
    Driver(mix).run()


@pytest.mark.mixes
@pytest.mark.parametrize("part", range(4))
def test_requests_for_the_same_prompt_come_and_go_while_issued_steps_fail(part: int) -> None:
    rng = random.Random(part)
    for _ in seeds(30):
        prompt = rng.choices(range(VOCAB), k=rng.choice((130, 200)))
        ends = [rng.choice((None, rng.randrange(40))) for _ in range(4)]
        jobs = [Job(prompt, 12, arrives=rng.randrange(30), aborts=end) for end in ends]
        mix = Mix(jobs, budget=rng.choice((64, 300)), ahead=rng.choice((1, 1, 2)))
        mix.cache = {"num_state_blocks": 12, "num_kv_blocks": 30}
        mix.late_fails = frozenset(rng.sample(range(30), 6))
        Driver(mix).run()
