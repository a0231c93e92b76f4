"""A consumer of the scheduler's KV events knows all that is cached, and predicts hits."""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any

import pytest
from mixes import random_mix, random_tokens
from simulation import Simulation, make_scheduler
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    hash_block_tokens,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from mambacache.report import CacheEvent

SEEDS = int(os.environ.get("MAMBACACHE_SEEDS", "100"))
PAGES, STATES = 0, 1
KINDS = {PAGES: "full_attention", STATES: "mamba"}


class Consumer:
    """Follow a scheduler's events, and compare what they say with the caches after each step.

    Attributes:
        held: number of blocks for each group and hash.
        batches: lists of events, as they came.
        errors: for each admission the tokens that were expected and hit.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.scheduler = simulation, simulation.scheduler
        self.held: Counter[tuple[int, Any]] = Counter()
        self.batches: list[list[Any]] = []
        self.errors: list[tuple[int, int]] = []
        self.config = self.scheduler.prefix_cache.config
        self.size = self.scheduler.block_size if self.config.has_attention else 64
        self.alone = self.scheduler.vllm_config.additional_config["mambacache"].get("kv_event_groups") == 1
        self._hasher = get_request_block_hasher(self.size, sha256)
        self._unread = 0  # tokens in steps whose events are not published
        self._lost: list[set[Any]] = []  # hashes of which the next batch must withdraw some
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
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    assert self.held[event.group_idx, name], "a block is withdrawn that was not announced"
                    self.held[event.group_idx, name] -= 1
            else:
                self._store(event)
        self._unread = 0
        removed = {name for event in batch.events if isinstance(event, BlockRemoved) for name in event.block_hashes}
        cleared = any(isinstance(event, AllBlocksCleared) for event in batch.events)
        assert cleared or all(lost & removed for lost in self._lost), "a block was lost in silence"
        self._lost.clear()

    def _store(self, event: BlockStored) -> None:
        assert event.kv_cache_spec_kind == KINDS[event.group_idx] and event.block_size == self.size
        assert len(event.token_ids) == self.size * len(event.block_hashes)
        self._learn_hashes({*event.block_hashes, event.parent_block_hash})
        parent = event.parent_block_hash
        keys = event.extra_keys or [None] * len(event.block_hashes)
        for i, name in enumerate(event.block_hashes):
            tokens = event.token_ids[i * self.size : (i + 1) * self.size]
            if keys[i] is None and not getattr(event, "lookahead_token_ids", None):
                whole = hash_block_tokens(sha256, self._whole[parent], tokens)
                assert name == maybe_convert_block_hash(whole), "a hash does not follow from what is told"
            self._parents[name] = parent
            self.held[event.group_idx, name] += 1
            parent = name

    def _learn_hashes(self, names: set[Any]) -> None:
        """Note the hashes of which events tell 64 bits."""
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
        states = scheduler.prefix_cache._admission.pool._blocks
        theirs = scheduler._hashes.theirs
        assert states.keys() - theirs.keys() <= scheduler._hashes.unnamed.keys() or self.simulation.lookahead
        named = {maybe_convert_block_hash(theirs[ours]) for ours in states if ours in theirs}
        if self.alone:
            pages, named = Counter(self._usable(pages.keys(), named)), set()
        wanted = {(PAGES, name): count for name, count in pages.items()} | {(STATES, name): 1 for name in named}
        assert +self.held == wanted

    def _usable(self, pages: Any, states: set[Any]) -> set[Any]:
        found: set[Any] = set()
        for name in states & pages:
            while name is not None and name in pages:
                found.add(name)
                name = self._parents.get(name)
        return found

    def expected(self, request: Request) -> int:
        """Return the tokens that a request will hit: up to the deepest state that no missing page precedes."""
        if request.skip_reading_prefix_cache:
            return 0
        usable = 0
        for i, name in enumerate(self.hashes(request)):
            if self.config.has_attention and not self.held[PAGES, name]:
                break
            if self.alone or self.held[STATES, name]:
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
            if hit < before[name]:
                request = self.simulation.requests[name]
                self._lost.append({*self.hashes(request)[: before[name] // self.size]})
        return output

    def update(self, *args: Any) -> Any:
        told = self._update(*args)
        self.check()
        return told

    # --- requests that are sent alone ---

    def send(self, name: str, prompt: list[int], **params: Any) -> tuple[int, int]:
        """Send a request that nothing runs beside. Return the tokens expected and hit."""
        self.simulation.add(name, prompt, 2, **params)
        expected = self.expected(self.simulation.requests[name])
        self.simulation.drain()
        return expected, self.simulation.cached[name]


def probes(consumer: Consumer, rng: random.Random) -> list[tuple[int, int]]:
    """Send earlier prompts again, one by one: as they were, cut, with their answers, with other ends."""
    simulation, found = consumer.simulation, []
    for number, request in enumerate([*simulation.requests.values()]):
        tokens = list(request.all_token_ids if rng.random() < 0.5 else request.prompt_token_ids)
        if not request.mm_features:
            tokens = tokens[: rng.choice([len(tokens), rng.randint(1, len(tokens))])]
        lora = request.lora_request
        found.append(
            consumer.send(
                f"probe {number}",
                tokens + random_tokens(rng.choice([0, 1, 70]), number),
                salt=request.cache_salt or "",
                lora=lora.lora_name if lora else "",
                lora_path=lora.lora_path if lora else "",
                images={each.mm_position.offset: each.identifier for each in request.mm_features},
            )
        )
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_consumer_predicts_every_hit(seed: int) -> None:
    """It does after a random mix for requests sent alone. In the mix it may lag by a step.

    Where vLLM's hashes cover a token behind the block, a state has a name for each next token, and events tell one.
    """
    consumers: list[Consumer] = []
    simulation = random_mix(seed, lambda simulation: consumers.append(Consumer(simulation)), events=True)
    [consumer] = consumers
    found = probes(consumer, random.Random(seed))
    if simulation.lookahead:
        assert all(expected <= hit for expected, hit in found)
    else:
        assert all(expected == hit for expected, hit in found), found
    simulation.check_end()
