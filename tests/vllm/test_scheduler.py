"""vLLM's own schedulers with ours around them keep every state where its row looks for it."""

from __future__ import annotations

import os
import random
from itertools import accumulate
from typing import Any

import pytest
import sequences
from scheduler_mixes import random_mix, random_tokens
from sequences import VOCABULARY
from simulation import HAS_LOOKAHEAD, Simulation, block_hasher, make_scheduler
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

REPEATED = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
SEEDS = int(os.environ.get("MAMBACACHE_SEEDS", "100"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_requests(seed: int) -> None:
    simulation = random_mix(seed)
    simulation.check_end()
    assert bool(simulation.accepted) == bool(simulation.drafts)
    assert bool(simulation.worker.late) == (simulation.ahead and bool(simulation.drafts))


def test_a_state_goes_first_once_vllm_evicted_its_kv() -> None:
    """The first prompt is used twice, so its state outranks the others."""
    simulation = Simulation(make_scheduler(4, 20, budget=2048))
    manager = simulation.scheduler.kv_cache_manager
    first, second, third = (random_tokens(130, seed) for seed in range(3))
    for number, prompt in enumerate([first, first, second, third]):
        simulation.add(str(number), prompt, 2)
        simulation.drain()
        if number == 1:
            manager.evict_blocks({block.block_id for block in manager.block_pool.blocks if block.block_hash})
    assert simulation.cached == {"0": 0, "1": 128, "2": 0, "3": 0} and simulation.lost
    for number in range(4, 6):  # together they need one state more than there is room for
        simulation.add(str(number), random_tokens(20, number), 2)
    simulation.drain()
    assert simulation.scheduler.prefix_cache.stats.states_evicted == 1
    simulation.add("6", second, 2)
    simulation.drain()
    assert simulation.cached["6"] == 128
    simulation.check_end()


@pytest.mark.skipif(HAS_LOOKAHEAD, reason="vLLM 0.33 hashes such a page once its tokens are accepted")
def test_a_state_with_a_page_that_vllm_never_named_is_evicted_first() -> None:
    """vLLM hashes a page in the step after its last token was accepted, and these requests end before it.

    Their last state stands at 64 if the last drafts were all accepted.
    """
    simulation = Simulation(make_scheduler(drafts=7), drafts=7)
    for number in range(200):
        simulation.add(str(number), random_tokens(50, number), 15)
        simulation.drain()
        if simulation.lost:
            break
    assert simulation.lost
    simulation.check_end()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_misses_steps_amid_its_log(ahead: bool) -> None:
    """The row of the request is then not the row that its worker expects."""
    simulation = Simulation(make_scheduler(ahead=ahead, v2=True), ahead=ahead)
    for name in "ab":
        simulation.add(name, random_tokens(70, ord(name)), 60)
    running = simulation.scheduler.running
    for step in range(40):
        missing = running.pop() if step in (6, 14, 15, 30) else None
        simulation.step()
        if missing is not None:
            running.append(missing)
    simulation.drain()
    simulation.check_end()


@pytest.mark.parametrize("ahead", [False, True])
def test_the_cache_knows_of_all_that_a_request_computed(ahead: bool) -> None:
    """It knows of the last tokens too, though no state is kept after them."""
    simulation = Simulation(make_scheduler(ahead=ahead, v2=True), ahead=ahead)
    simulation.add("a", random_tokens(70), 45)
    simulation.drain()
    simulation.add("b", [*random_tokens(70), *simulation.answers["a"], 1], 2)
    simulation.drain()
    assert simulation.scheduler.prefix_cache.stats.ceiling_tokens == 70 + 44
    simulation.check_end()


def test_last_tokens_of_two_prompts_in_a_step() -> None:
    """A prompt was cut before its last token, and another hits all but its last token: both are decode rows."""
    simulation = Simulation(make_scheduler(budget=64))
    shared = random_tokens(64)
    simulation.add("first", [*shared, 1], 1)
    simulation.drain()
    for _ in range(8):  # in either order
        number = len(simulation.requests)
        simulation.add(f"{number} cut", random_tokens(65, number), 1)
        simulation.step()
        simulation.add(f"{number} hits", [*shared, 2], 1)
        simulation.drain()
    simulation.check_end()


def test_streaming_input_ends_with_an_error_and_nothing_else() -> None:
    simulation = Simulation(make_scheduler())
    simulation.add("before", random_tokens(100), 30)
    simulation.step()
    simulation.add("stream", random_tokens(80), 5, resumable=True)
    simulation.add("after", random_tokens(70), 5)
    simulation.drain()
    assert simulation.requests["stream"].status == RequestStatus.FINISHED_ERROR
    assert simulation.finish_reasons["stream"] == FinishReason.ERROR
    simulation.aborted.add("stream")
    simulation.check_end()


def test_hits_by_hand_and_in_vllms_metrics() -> None:
    """Send prompts of 1000 shared tokens and 300 of its own, in turn. vLLM's metrics and log line count the same."""
    scheduler = make_scheduler(budget=2048)
    simulation = Simulation(scheduler)
    shared = random_tokens(1000)
    hits = []
    for number in range(4):
        before = scheduler.prefix_cache.stats.hit_tokens
        simulation.add(str(number), shared + random_tokens(300, number + 1), 3)
        simulation.drain()
        hits.append(scheduler.prefix_cache.stats.hit_tokens - before)
    assert hits == [0, 0, 960, 960]
    assert simulation.cached == {"0": 0, "1": 0, "2": 960, "3": 960}
    assert (simulation.queries, simulation.hits) == (4 * 1300, 2 * 960)
    simulation.check_end()


@pytest.mark.parametrize("attention", [True, False])  # without attention, nothing but a state's own keys bounds a hit
@pytest.mark.parametrize(
    ("requests", "hits"),
    [
        ([{"salt": "a"}, {"salt": "b"}, {}, {"salt": "a"}, {"salt": "b"}, {}], [0, 0, 0, 256, 256, 256]),
        ([{"lora": "a"}, {"lora": "b"}, {}, {"lora": "a"}, {"lora": "b"}, {}], [0, 0, 0, 256, 256, 256]),
        ([{"salt": "a"}, {"lora": "a"}, {"salt": "a", "lora": "a"}], [0, 0, 0]),
        ([{"images": {150: each}} for each in "aabbc"] + [{}], [0, 256, 0, 256, 128, 128]),
        ([{"images": {70: "a", 150: each}} for each in "ab"] + [{"images": {70: "b", 150: "a"}}], [0, 0, 0]),
    ],
)
def test_hits_need_equal_adapters_salts_and_images(
    requests: list[dict[str, Any]], hits: list[int], attention: bool
) -> None:
    """Adapters and salts share nothing. Images share the tokens before the first image that differs.

    The first request to find that stores a state at the last boundary before it.
    """
    simulation = Simulation(make_scheduler(budget=2048, attention=attention))
    for number, keys in enumerate(requests):
        simulation.add(str(number), [1] * 300, 3, **keys)
        simulation.drain()
    assert list(simulation.cached.values()) == hits
    simulation.check_end()


TRIED = {"lora", "mm", "cache_salt"}  # kinds of keys in vLLM's block hashes that requests of ours may have
FULL = {"salt": "a", "lora": "b", "lora_path": "c", "images": {150: "d", 200: "e"}}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"salt": "other"},
        {"salt": ""},
        {"lora": "other"},
        {"lora": ""},
        {"lora_path": "other"},
        {"images": {150: "other", 200: "e"}},
        {"images": {150: "d", 200: "other"}},
        {"images": {150: "e", 200: "d"}},
        {"images": {151: "d", 200: "e"}},
        {"images": {150: "d", 201: "e"}},
        {"images": {150: "d"}},
        {"images": {}},
    ],
)
@pytest.mark.parametrize("size", [64, 8])
def test_a_changed_key_in_vllms_block_hash_ends_the_hit_there(change: dict[str, Any], size: int) -> None:
    """Only our own keys bound a hit of a model without attention. A state after each block shows where they differ.

    Args:
        size: tokens in a block of vLLM's.
    """
    simulation = Simulation(make_scheduler(budget=2048, attention=False, checkpoint_interval=64))
    simulation.add("first", [1] * 300, 3, **FULL)
    simulation.drain()
    simulation.add("second", [1] * 300, 3, **(FULL | change))
    simulation.drain()
    hashes = [block_hasher(size)(request) for request in simulation.requests.values()]
    common = sum(accumulate((a == b for a, b in zip(*hashes, strict=True)), min))
    assert simulation.cached["second"] == min(common * size, 299) // 64 * 64
    simulation.check_end()


def test_no_kind_of_key_in_vllms_block_hashes_is_untried() -> None:
    """Check all kinds but prompt embeddings, which are refused."""
    makers = {name for name in vars(kv_cache_utils) if name.startswith("_gen_") and name.endswith("_extra_hash_keys")}
    assert makers == {"_gen_mm_extra_hash_keys", "_gen_lora_extra_hash_keys", "_gen_prompt_embeds_extra_hash_keys"}
    simulation = Simulation(make_scheduler())
    simulation.add("all", [1] * 300, 3, **FULL)
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(simulation.requests["all"], 0, 192, 0)
    assert keys is not None and {key[0] for key in keys} == TRIED


@pytest.mark.parametrize(
    "requests",
    [
        [{"salt": each} for each in ["a", "b", "", "a"]],
        [{"lora": each} for each in ["a", "b", "", "a"]],
        [{"lora": "a", "lora_path": each} for each in "abca"],
    ],
)
def test_no_request_waits_for_another_adapter_or_salt(requests: list[dict[str, str]]) -> None:
    simulation = Simulation(make_scheduler(budget=2048))
    for number, keys in enumerate(requests):
        simulation.add(str(number), [1] * 300, 3, **keys)
    simulation.step()
    assert [request.request_id for request in simulation.scheduler.running] == ["0", "1", "2"]
    simulation.drain()
    assert list(simulation.cached.values()) == [0, 0, 0, 256]
    simulation.check_end()


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ({"max_tokens": 3}, RequestStatus.FINISHED_LENGTH_CAPPED),
        ({"stop_token_ids": list(range(VOCABULARY))}, RequestStatus.FINISHED_STOPPED),
        ({"repetition_detection": REPEATED}, RequestStatus.FINISHED_REPETITION),
        ({}, RequestStatus.FINISHED_ABORTED),
    ],
)
def test_answers_that_ended_by_themselves_count_as_finished(
    params: dict[str, Any], status: RequestStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "sampled", lambda prefix: 1)
    simulation = Simulation(make_scheduler())
    states = simulation.scheduler.prefix_cache
    freed: list[bool] = []
    free = states.free
    monkeypatch.setattr(states, "free", lambda name, finished: (freed.append(finished), free(name, finished=finished)))
    simulation.add("one", [5], **{"max_tokens": 20, **params})
    for _ in range(2):
        simulation.step()
    if not params:
        simulation.abort("one")
    simulation.drain()
    assert simulation.requests["one"].status == status
    assert freed == [status != RequestStatus.FINISHED_ABORTED]


def test_a_request_that_waits_for_a_prefix_is_not_looked_up_in_each_step() -> None:
    """A look-up of a long prompt's KV takes as long as a decode step of several rows."""
    scheduler = make_scheduler(budget=64)
    simulation = Simulation(scheduler)
    rng = random.Random(0)
    shared = [rng.randrange(VOCABULARY) for _ in range(640)]
    for name in ("first", "second", "third"):
        simulation.add(name, shared + [rng.randrange(VOCABULARY) for _ in range(30)], 2)
    simulation.step()
    looked_up: list[str] = []
    find = scheduler.kv_cache_manager.get_computed_blocks

    def noting(request: Any) -> Any:
        looked_up.append(request.request_id)
        return find(request)

    scheduler.kv_cache_manager.get_computed_blocks = noting
    simulation.step()
    assert not looked_up
    simulation.drain()
    assert looked_up == ["second", "third"]
    simulation.check_end()
