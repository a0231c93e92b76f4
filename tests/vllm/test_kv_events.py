"""A consumer of the scheduler's KV events knows all that is cached, and predicts hits."""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scheduler_mixes import random_mix, random_tokens
from simulation import Simulation, make_scheduler
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    hash_block_tokens,
    maybe_convert_block_hash,
)
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import Request

from mambacache.report import Wait

SEEDS = int(os.environ.get("MAMBACACHE_SEEDS", "100"))
PAGES, STATES = 0, 1
KINDS = {PAGES: "full_attention", STATES: "mamba"}
DEVICE_PAGES = PAGES, "GPU"


def place(event: Any, name: Any) -> tuple[int, str, Any]:
    return event.group_idx, event.medium, name


class Consumer:
    """Follow a scheduler's events, and compare what they say with the caches after each step.

    Attributes:
        held: number of blocks for each group, medium and hash.
        batches: lists of events, as they came.
        errors: for each admission the tokens that were expected and hit.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.scheduler = simulation, simulation.scheduler
        self.held: Counter[tuple[int, str, Any]] = Counter()
        self.batches: list[list[Any]] = []
        self.errors: list[tuple[int, int]] = []
        self.config = self.scheduler.prefix_cache.config
        self.size = self.scheduler.block_size if self.config.has_attention else 64
        self.alone = self.scheduler.vllm_config.additional_config["mambacache"].get("kv_event_groups") == 1
        self._hasher = get_request_block_hasher(self.size, sha256)
        self._unread = 0  # tokens in steps whose events are not published
        self._lost: list[set[Any]] = []  # the next events must withdraw a hash of each set
        self._news: list[Any] = []
        self._cleared = False
        self._parents: dict[Any, Any] = {}
        self._whole: dict[Any, bytes | None] = {None: None}
        self.scheduler.kv_event_publisher.publish = self.publish
        self._schedule, self.scheduler.schedule = self.scheduler.schedule, self.schedule
        self._update, self.scheduler.update_from_output = self.scheduler.update_from_output, self.update

    # --- events ---

    def publish(self, batch: KVEventBatch) -> None:
        self.batches.append(batch.events)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.held.clear()
                self._cleared = True
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    if self._cleared and event.medium == "CPU" and event.group_idx == PAGES:
                        self.held[place(event, name)] = 1  # a reset leaves a connector its pages
                    assert self.held[place(event, name)], "a block is withdrawn that was not announced"
                    self.held[place(event, name)] -= 1
            else:
                self._store(event)
        self._news += batch.events

    def _read_news(self) -> None:
        news, self._news = self._news, []
        if not news:
            return
        self._unread = 0
        removed = {name for event in news if isinstance(event, BlockRemoved) for name in event.block_hashes}
        cleared = any(isinstance(event, AllBlocksCleared) for event in news)
        assert cleared or all(lost & removed for lost in self._lost), "a block was lost in silence"
        self._lost.clear()

    def _store(self, event: BlockStored) -> None:
        assert event.kv_cache_spec_kind == KINDS[event.group_idx] and event.block_size == self.size
        assert len(event.token_ids) == self.size * len(event.block_hashes)
        self._learn_hashes({*event.block_hashes, event.parent_block_hash})
        parent = event.parent_block_hash
        keys = event.extra_keys or [None] * len(event.block_hashes)
        ahead = getattr(event, "lookahead_token_ids", None)
        for i, name in enumerate(event.block_hashes):
            tokens = event.token_ids[i * self.size : (i + 1) * self.size]
            if keys[i] is None and place(event, name)[:2] != (PAGES, "CPU"):  # vLLM leaves out salts and adapters there
                more = (None, *ahead[i]) if ahead else None
                whole = hash_block_tokens(sha256, self._whole[parent], tokens, more)
                assert name == maybe_convert_block_hash(whole), "a hash does not follow from what is told"
            self._parents[name] = parent
            self.held[place(event, name)] += 1
            assert self.held[place(event, name)] == 1 or place(event, name)[:2] == DEVICE_PAGES, "it is announced twice"
            parent = name

    def _learn_hashes(self, names: set[Any]) -> None:
        """Note whole hashes: events tell 64 bits."""
        if names <= self._whole.keys():
            return
        for request in self.simulation.requests.values():
            hashes = request.block_hashes if self.config.has_attention else self._hasher(request)
            self._whole |= {maybe_convert_block_hash(each): each for each in hashes}

    # --- what the events shall say ---

    def check(self) -> None:
        """Compare the blocks that were announced with the blocks in both caches."""
        scheduler = self.scheduler
        blocks = [block.block_hash for block in scheduler.kv_cache_manager.block_pool.blocks]
        pages = Counter(maybe_convert_block_hash(get_block_hash(each)) for each in blocks if each is not None)
        admission, hashes = scheduler.prefix_cache._admission, scheduler._hashes
        pools, named = {"GPU": admission.pool, "CPU": admission.tier.states}, set()
        for medium, pool in pools.items():
            states, theirs = pool._blocks.keys(), hashes.theirs
            assert states - theirs.keys() <= hashes.unnamed.keys() or self.simulation.lookahead
            named |= {(medium, maybe_convert_block_hash(theirs[ours])) for ours in states & theirs.keys()}
        if self.alone:
            pages, named = Counter(self._usable(pages.keys(), {name for _, name in named})), set()
        wanted = {(*DEVICE_PAGES, name): count for name, count in pages.items()}
        wanted |= {(STATES, medium, name): 1 for medium, name in named}
        offloaded = {each: 1 for each in +self.held if each[:2] == (PAGES, "CPU")}
        assert +self.held == wanted | offloaded
        self._check_offloaded({name for *_, name in offloaded})

    def _check_offloaded(self, names: set[Any]) -> None:
        """Check that vLLM's connector has the pages that it announced."""
        for name in names:
            key = make_offload_key(self._whole[name], PAGES)
            kept = self.scheduler.connector.connector_scheduler.manager._policy.get(key)
            assert kept is not None and kept.is_ready, "a page is announced that is not in host memory"

    def _usable(self, pages: Any, states: set[Any]) -> set[Any]:
        found: set[Any] = set()
        for name in states & pages:
            while name is not None and name in pages:
                found.add(name)
                name = self._parents.get(name)
        return found

    def expected(self, request: Request) -> int:
        """Return the tokens that a request will hit: up to the deepest state that no missing page precedes.

        Pages on the device count up to the first that is missing, and pages in host memory behind it.
        """
        if request.skip_reading_prefix_cache:
            return 0
        usable, media = 0, ["GPU", "CPU"]
        for i, name in enumerate(self.hashes(request)):
            while self.config.has_attention and media and not self.held[PAGES, media[0], name]:
                del media[0]
            if not media:
                break
            if self.alone or self.held[STATES, "GPU", name] or self.held[STATES, "CPU", name]:
                usable = i + 1
        return usable * self.size

    def hashes(self, request: Request) -> list[Any]:
        """Return the hashes of the blocks that a request may hit."""
        hashes = request.block_hashes if self.config.has_attention else self._hasher(request)
        return [maybe_convert_block_hash(each) for each in hashes[: (request.num_tokens - 1) // self.size]]

    # --- around the scheduler ---

    def schedule(self) -> Any:
        """Expect a hit for each request that may be admitted; check it within what happens in the step."""
        before = {request.request_id: self.expected(request) for request in self.scheduler.requests.values()}
        output = self._schedule()
        self._unread += output.total_num_scheduled_tokens
        for name, (_, hit) in self.scheduler._hits.items():
            if name not in output.num_scheduled_tokens:
                continue
            self.errors.append((before[name], hit))
            if self.alone or self.simulation.lookahead:
                continue
            assert hit - before[name] <= self._unread, "more is hit than was in flight"
            if hit < before[name] and not self.config.num_host_states:
                request = self.simulation.requests[name]
                self._lost.append({*self.hashes(request)[: before[name] // self.size]})
        return output

    def update(self, *args: Any) -> Any:
        told = self._update(*args)
        self._read_news()
        self.check()
        return told

    # --- requests that are sent alone ---

    def send(self, name: str, prompt: list[int], max_tokens: int = 2, **params: Any) -> tuple[int, int]:
        """Send a request that nothing runs beside. Return the tokens expected and hit."""
        self.simulation.add(name, prompt, max_tokens, **params)
        expected = self.expected(self.simulation.requests[name])
        self.simulation.drain()
        return expected, self.simulation.cached[name]


def probes(consumer: Consumer, rng: random.Random) -> list[tuple[int, int]]:
    """Send earlier prompts again, one by one: as they were, cut, with their answers, with other ends."""
    simulation, found = consumer.simulation, []
    room = min((consumer.scheduler.cache_config.num_gpu_blocks - 2) * consumer.scheduler.block_size, 4000)
    for number, request in enumerate([*simulation.requests.values()]):
        tokens = list(request.all_token_ids if rng.random() < 0.5 else request.prompt_token_ids)
        if not request.mm_features:
            tokens = tokens[: rng.choice([len(tokens), rng.randint(1, len(tokens))])]
        lora = request.lora_request
        found.append(
            consumer.send(
                f"probe {number}",
                [*tokens, *random_tokens(rng.choice([0, 1, 70]), number)][:room],
                salt=request.cache_salt or "",
                lora=lora.lora_name if lora else "",
                lora_path=lora.lora_path if lora else "",
                images={each.mm_position.offset: each.identifier for each in request.mm_features},
            )
        )
    return found


def followed(seed: int, **settings: int) -> Consumer:
    consumers: list[Consumer] = []
    random_mix(seed, lambda simulation: consumers.append(Consumer(simulation)), events=True, **settings)
    return consumers[0]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_consumer_predicts_every_hit(seed: int) -> None:
    """It does after a random mix for requests sent alone. In the mix it may lag by a step.

    Where vLLM's hashes cover a token behind the block, a state has a name for each next token, and events tell one.
    """
    consumer = followed(seed)
    found = probes(consumer, random.Random(seed))
    assert all(expected == hit or (consumer.simulation.lookahead and expected < hit) for expected, hit in found), found
    consumer.simulation.check_end()


@pytest.mark.parametrize("seed", [seed for seed in range(SEEDS // 2) if seed % 5 != 4])
def test_a_consumer_of_one_group_expects_no_less_than_is_hit(seed: int) -> None:
    """It is told of pages between two states, and expects them of a prompt that ends or parts there."""
    consumer = followed(seed, kv_event_groups=1)
    for expected, hit in probes(consumer, random.Random(seed)):
        assert hit <= expected or consumer.simulation.lookahead
    consumer.simulation.check_end()


def probes_of_quiet_workers(consumer: Consumer, seed: int) -> list[tuple[int, int]]:
    """Send probes, where every copy ends well."""
    host = consumer.simulation.worker.host
    assert host is not None
    host._failing = 0.0
    return probes(consumer, random.Random(seed))


HOST_STATES = 1, 3, 50


@pytest.mark.parametrize("seed", range(SEEDS // 20))
def test_a_consumer_predicts_hits_from_host_memory(seed: int) -> None:
    """It knows each copy on the host that all ranks have made, amid copies that fail."""
    consumer = followed(seed, host_states=HOST_STATES[seed % 3], ranks=1 + seed % 2)
    found = probes_of_quiet_workers(consumer, seed)
    assert all(expected == hit or (consumer.simulation.lookahead and expected < hit) for expected, hit in found), found
    consumer.simulation.check_end()


@pytest.mark.parametrize("seed", [seed for seed in range(SEEDS // 33) if seed % 5 != 4])
def test_a_consumer_of_one_group_expects_no_less_than_is_hit_from_host_memory(seed: int) -> None:
    consumer = followed(seed, kv_event_groups=1, host_states=HOST_STATES[seed % 3])
    for expected, hit in probes_of_quiet_workers(consumer, seed):
        assert hit <= expected or consumer.simulation.lookahead
    consumer.simulation.check_end()


@pytest.mark.parametrize("seed", range(SEEDS // 33))
def test_a_consumer_predicts_hits_beside_a_connector(seed: int) -> None:
    """vLLM's connector announces its pages beside our states. It does not announce those that a reset left it."""
    options = {"cpu_bytes_to_use": (1 << 30, 64 * 64 * 8 * 2 * 4)[seed % 2], "seed": seed, "slow": 0.5}
    options |= {"self_describing_kv_events": True}
    consumer = followed(seed, host_states=HOST_STATES[seed % 3], connector=options)
    for expected, hit in probes_of_quiet_workers(consumer, seed):
        assert expected == hit or (consumer._cleared and expected < hit)
    consumer.simulation.check_end()


def test_states_in_files_are_announced_once_they_are_read(tmp_path: Path) -> None:
    """The second of two processes finds the files of the first, and expects no more than is hit."""
    for _ in range(2):
        consumer = followed(4, host_states=3, disk=tmp_path)
        assert all(expected <= hit for expected, hit in probes_of_quiet_workers(consumer, 4))
        consumer.simulation.check_end()
        consumer.scheduler.shutdown()
    assert consumer.scheduler.prefix_cache.stats.disk_hit_tokens


def consumer_of(*, ahead: bool = False, **settings: Any) -> Consumer:
    return Consumer(Simulation(make_scheduler(budget=2048, events=True, ahead=ahead, **settings), ahead=ahead))


@pytest.mark.parametrize("alone", [False, True])
def test_few_states_by_hand(alone: bool) -> None:
    """Twelve documents of 960 tokens come three times. There is room for eight states, and for the KV of all.

    The pages of 23,040 tokens come again, and no state does: each time other documents took its place.
    """
    consumer = consumer_of(num_states=9, num_pages=1200, kv_event_groups=2 - alone)
    documents = [random_tokens(960, seed) for seed in range(12)]
    found = [
        consumer.send(f"{number} {again}", [*document, *random_tokens(40, 100 * again + number)])
        for again in range(3)
        for number, document in enumerate(documents)
    ]
    assert found == [(0, 0)] * 36
    removed = [event.group_idx for batch in consumer.batches for event in batch if isinstance(event, BlockRemoved)]
    assert {*removed} == ({PAGES} if alone else {STATES})


@pytest.mark.parametrize(
    ("attention", "groups", "told"),
    [(True, 2, [(PAGES, 4), (STATES, 1)]), (True, 1, [(PAGES, 4)]), (False, 2, [(STATES, 1)])],
)
def test_a_hit_is_reported_once_and_as_long_as_it_is(
    attention: bool, groups: int, told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request asks for a report. Its KV hit is longer, and it waits for room before."""
    simulation = Simulation(make_scheduler(budget=2048, events=True, attention=attention, kv_event_groups=groups))
    scheduler, shared, stored = simulation.scheduler, random_tokens(500), []
    monkeypatch.setattr(scheduler.kv_event_publisher, "publish", lambda batch: stored.extend(batch.events))
    for number, length in enumerate([270, 270, 500]):  # the second finds where the first parts: a state at 256
        simulation.add(str(number), [*shared[:length], *random_tokens(100, number)], 2)
        simulation.drain()
    stored.clear()
    prompt = [*shared[:400], *random_tokens(100, 8)]
    simulation.add("asks", prompt, 2, extra_args={"kv_cache_report_mode": "full"})
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.prefix_cache, "admit", lambda name, kv_tokens: Wait("no room"))
        for _ in range(5):
            simulation.step()
    assert not stored
    simulation.drain()
    assert simulation.cached["asks"] == 256
    asked = simulation.requests["asks"]
    hashes = asked.block_hashes if attention else get_request_block_hasher(64, sha256)(asked)
    names = [*map(maybe_convert_block_hash, hashes[:4])]
    reports = [event for event in stored if isinstance(event, BlockStored) and names[3] in event.block_hashes]
    assert [(event.group_idx, len(event.block_hashes)) for event in reports] == told
    assert all(event.block_hashes == names[-len(event.block_hashes) :] for event in reports)
    assert all(event.token_ids[-64:] == prompt[192:256] for event in reports)


@pytest.mark.parametrize("between_steps", [0.0, 1.0])
def test_a_hit_that_a_connector_loads_is_reported_whole(between_steps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(make_scheduler(8, 30, events=True, connector={"between_steps": between_steps}))
    scheduler, manager, stored = simulation.scheduler, simulation.scheduler.kv_cache_manager, []
    prompt = random_tokens(200)
    simulation.add("first", prompt, 2)
    simulation.drain()
    hashes = simulation.requests["first"].block_hashes
    for block_hash in hashes[1:3]:
        [page] = manager.block_pool.get_cached_block(block_hash, [0])
        manager.evict_blocks({page.block_id})
    monkeypatch.setattr(scheduler.kv_event_publisher, "publish", lambda batch: stored.extend(batch.events))
    simulation.add("asks", prompt, 2, extra_args={"kv_cache_report_mode": "full"})
    simulation.drain()
    assert simulation.cached["asks"] == 192
    names = [*map(maybe_convert_block_hash, hashes[:3])]
    reports = [event for event in stored if isinstance(event, BlockStored) and event.group_idx == STATES]
    assert [event.block_hashes for event in reports] == [names[2:]]
    assert any(event.group_idx == PAGES and event.block_hashes == names for event in stored)


def with_copies(*, slow: float = 0.0, failing: float = 0.0, ranks: int = 2, **settings: Any) -> Consumer:
    """Return a consumer beside four states on the device and many on the host."""
    consumer = consumer_of(num_states=4, host_states=100, ranks=ranks, **settings)
    host = consumer.simulation.worker.host
    assert host is not None
    host._slow, host._failing = slow, failing
    return consumer


def media(consumer: Consumer, group: int) -> Counter[str]:
    """Return the numbers of blocks that are announced."""
    return Counter(medium for found, medium, _ in (+consumer.held).elements() if found == group)


PROMPTS = [random_tokens(200, seed) for seed in range(8)]


def test_a_copy_is_announced_once_it_is_made_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = with_copies(slow=1.0)
    simulation = consumer.simulation
    for number, prompt in enumerate(PROMPTS[:4]):
        assert consumer.send(str(number), prompt) == (0, 0)
    host = simulation.worker.host
    assert host is not None and host._under_way and set(media(consumer, STATES)) == {"GPU"}
    [(transfer, _)] = host._under_way
    host._ranks[0].note(transfer.number, False)
    assert consumer.send("one rank", PROMPTS[4]) == (0, 0) and set(media(consumer, STATES)) == {"GPU"}
    host.end(all_transfers=True)
    consumer.send("all ranks", PROMPTS[5])
    assert media(consumer, STATES)["CPU"] == len(transfer.states) > 0


@pytest.mark.parametrize("alone", [False, True])
def test_states_in_host_memory_are_expected_and_hit(alone: bool) -> None:
    """There is room for four states on the device. All eight come back, and are told as the originals were."""
    consumer = with_copies(kv_event_groups=2 - alone)
    found = [consumer.send(f"{number} {again}", prompt) for again in range(2) for number, prompt in enumerate(PROMPTS)]
    assert found == [(0, 0)] * 8 + [(192, 192)] * 8
    if alone:
        assert media(consumer, PAGES) == {"GPU": 3 * 8} and not media(consumer, STATES)
        return
    told = [event for batch in consumer.batches for event in batch if isinstance(event, BlockStored)]
    states = [event for event in told if event.group_idx == STATES and event.medium == "CPU"]
    assert len(states) >= 8
    for event in states:
        event.medium = "GPU"
        assert event in told


def test_pages_of_a_connector_are_expected_and_hit() -> None:
    """There is room for eight pages and four states on the device, and for all on the host."""
    options = {"cpu_bytes_to_use": 1 << 30, "seed": 0, "slow": 0.0, "self_describing_kv_events": True}
    consumer = with_copies(ranks=1, num_pages=9, connector=options)
    found = [consumer.send(f"{number} {again}", prompt) for again in range(2) for number, prompt in enumerate(PROMPTS)]
    assert found[:8] == [(0, 0)] * 8 and [hit for _, hit in found[8:]] == [192] * 8
    assert found[8:15] == [(192, 192)] * 7, "the last copy is told with the next step"
    assert media(consumer, PAGES)["CPU"] >= 3 * 6


def test_a_state_that_the_host_evicts_is_withdrawn() -> None:
    consumer = consumer_of(num_states=4, host_states=3)
    for number, prompt in enumerate(PROMPTS):
        consumer.send(str(number), prompt)
    removed = [event for batch in consumer.batches for event in batch if isinstance(event, BlockRemoved)]
    assert sum(event.medium == "CPU" for event in removed) >= 3 >= media(consumer, STATES)["CPU"] > 0


def test_a_copy_that_fails_on_a_rank_is_not_announced() -> None:
    consumer = with_copies(failing=1.0)
    for number, prompt in enumerate(PROMPTS):
        consumer.send(str(number), prompt)
    assert consumer.scheduler.prefix_cache.stats.failed_transfers and set(media(consumer, STATES)) == {"GPU"}


@pytest.mark.parametrize("alone", [False, True])
def test_a_reset_leaves_nothing_in_host_memory(alone: bool) -> None:
    """A copy that ends after it commits nothing."""
    consumer = with_copies(kv_event_groups=2 - alone)
    for number, prompt in enumerate(PROMPTS[:6]):
        consumer.send(str(number), prompt)
    host = consumer.simulation.worker.host
    assert host is not None
    host._slow = 1.0
    consumer.send("begins a copy", PROMPTS[6])
    assert host._under_way and consumer.held.total()
    assert consumer.scheduler.reset_prefix_cache()
    assert not +consumer.held and not consumer.scheduler._events._states
    host.end(all_transfers=True)
    assert consumer.send("after it", PROMPTS[7]) == (0, 0)
    assert "CPU" not in media(consumer, STATES)
    assert [consumer.send(str(each), PROMPTS[0])[1] for each in (10, 11)] == [0, 192]


def test_lost_events_withdraw_all_states_and_no_page() -> None:
    consumer = consumer_of()
    consumer.send("a", random_tokens(300))
    scheduler, states = consumer.scheduler, consumer.scheduler.prefix_cache
    ledger = states._admission.ledger
    states.invalidate([*states._admission.pool._blocks])  # without events the states are gone
    ledger._events.clear()
    ledger.stored("state", b"new", 64, "nobody")
    scheduler._follow({})
    scheduler._publish()
    [[event]] = consumer.batches[-1:]
    assert isinstance(event, BlockRemoved) and event.group_idx == STATES
    assert {group for group, *_ in +consumer.held} == {PAGES}


def test_a_state_of_an_aborted_request_is_told() -> None:
    """The request ends before the tokens of its step are read."""
    consumer = consumer_of(ahead=True, v2=True)
    simulation, prompt = consumer.simulation, random_tokens(200)
    simulation.add("a", prompt, 5)
    simulation.step()
    simulation.abort("a")
    simulation.drain()
    assert consumer.send("b", prompt) == (192, 192)


def test_a_state_that_is_stored_as_its_request_ends_is_told() -> None:
    """The 64th token ends a request, and a step that consumes it is out: the state behind it is known by then."""

    def answer_to(prompt: list[int]) -> list[int]:
        first = consumer_of(attention=False)
        first.send("a", prompt, max_tokens=4)
        return first.simulation.answers["a"]

    prompts = [random_tokens(60, seed) for seed in range(20)]
    prompt, answer = next((each, found) for each in prompts if (found := answer_to(each))[3] not in found[:3])
    consumer = consumer_of(ahead=True, v2=True, attention=False)
    consumer.send("a", prompt, max_tokens=9, stop_token_ids=[answer[3]])
    assert consumer.simulation.answers["a"] == answer
    assert consumer.send("b", [*prompt, *answer, 1]) == (64, 64)


@pytest.mark.parametrize("attention", [True, False])
def test_a_reset_is_published_at_once(attention: bool) -> None:
    """No step follows the reset of an idle engine."""
    consumer = consumer_of(attention=attention)
    prompt = random_tokens(300)
    assert consumer.send("a", prompt) == (0, 0) and consumer.send("b", prompt) == (256, 256)
    assert consumer.scheduler.reset_prefix_cache()
    [[event]] = consumer.batches[-1:]
    assert isinstance(event, AllBlocksCleared) and not +consumer.held
    assert consumer.send("c", prompt) == (0, 0) and consumer.send("d", prompt) == (256, 256)


def test_nothing_is_done_for_events_that_are_off() -> None:
    for attention in (True, False):
        scheduler = make_scheduler(attention=attention)
        assert scheduler._events is None and (scheduler._hashes is None) is not attention
        assert "take_events" not in vars(scheduler.kv_cache_manager)
        simulation = Simulation(scheduler)
        simulation.add("a", random_tokens(300), 5)
        simulation.drain()
        simulation.check_end()
