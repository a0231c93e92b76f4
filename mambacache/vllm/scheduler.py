"""Run `PrefixCache` beside the KV cache manager in vLLM's scheduler."""

from __future__ import annotations

import time
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from math import lcm
from operator import attrgetter
from secrets import token_hex
from typing import Any

from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.plan import CHUNK, FOLD, SequenceStep
from mambacache.report import Wait
from mambacache.vllm.config import PAGES, is_cpu, settle_connector
from mambacache.vllm.connector import External
from mambacache.vllm.files import StateFiles
from mambacache.vllm.kv_events import ChunkHashes, StateEvents
from mambacache.vllm.kv_watch import HashMap, KVWatch
from mambacache.vllm.log import logger
from mambacache.vllm.metrics import Counters
from mambacache.vllm.page_queue import PageQueue
from mambacache.vllm.rows import Sender
from mambacache.vllm.settings import Settings
from mambacache.vllm.sizing import log_slots, read_sizes
from mambacache.vllm.soundness import Question
from mambacache.vllm.transfers import Copies

REPORT_SECONDS = 60.0
FINISHED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def _salt(request: Any) -> str:
    """Return the keys in vLLM's block hashes beside tokens and images."""
    return repr(generate_block_hash_extra_keys(request, 0, 0, 0)[0])  # an empty block at 0 overlaps no image


class Mixin:
    """Overrides vLLM's methods for connectors and for Mamba.

    Both caches admit a request, or neither. The KV hit is cut to the state hit.
    """

    max_num_active_reqs: int  # vLLM's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caching = bool(self.cache_config.enable_prefix_caching)
        groups = self.kv_cache_config.kv_cache_groups
        self._has_attention = [group.layer_names for group in groups] != [[PAGES]]
        settings, sizes = Settings.of(self.vllm_config), read_sizes(self.vllm_config)
        slots = log_slots(self.vllm_config, sizes.blocks)
        self.max_num_active_reqs = min(self.max_num_active_reqs, slots)  # each needs a token log
        files = StateFiles.of(self.vllm_config, sizes.state_bytes) if sizes.host_slots else None
        self._of_this_process = token_hex() if files is not None else ""
        self.prefix_cache = PrefixCache(
            CacheConfig(
                num_state_blocks=sizes.blocks,
                num_log_slots=slots,
                max_draft_tokens=self.num_spec_tokens,
                block_size=lcm(CHUNK, self.block_size) if self._has_attention else CHUNK,
                has_attention=self._has_attention,
                max_checkpoints=None if self._caching else 0,
                checkpoint_interval=settings.checkpoint_interval,
                num_host_states=sizes.host_slots,
                state_bytes=sizes.state_bytes,
            ),
            files,
        )
        unused = {
            "state_host_bytes": settings.state_host_bytes is not None,
            "state_disk_dir": settings.state_disk_dir is not None,
        }
        for option, given in unused.items():
            if given and not self._caching:
                logger.warning("mambacache: %s has no effect: prefix caching is off", option)
        if self.connector is not None and not self._caching:
            logger.warning("mambacache: the KV connector stores KV that is never loaded: prefix caching is off")
        self._copies = Copies.of(self.vllm_config, self.prefix_cache, files) if sizes.host_slots else None
        self.need_mamba_block_aligned_split = True  # calls _mamba_block_aligned_split for every chunk
        self._runner_v2 = not is_cpu()
        self._rows: dict[str, SequenceStep] = {}  # of this schedule()
        self._later: dict[str, int] = {}  # `_step` of the last row in the cache
        self._step = 0  # calls of schedule()
        self._hits: dict[str, tuple[object, int]] = {}  # admitted in this schedule()
        self._external = External(self.connector) if self.connector is not None else None
        self._held = False  # no room: all wait
        self._gone: list[Any] | None = None  # of update_from_output
        self._refused_streams: set[str] = set()
        self._sender = Sender()
        self._steps_out: dict[int, list[SequenceStep]] = {}  # by id() of the output, oldest first
        self._suspects: dict[bytes, tuple[int, set[int]]] = {}  # by prefix hash: state, pages
        self._asked: dict[int, list[bytes]] = {}  # by id() of the output
        self._reported = time.monotonic()
        self._counters = Counters(self.vllm_config) if self.log_stats else None
        self._hashes: HashMap | None = None
        self._watch: KVWatch | None = None
        self._events: StateEvents | None = None
        self._page_queue: PageQueue | None = None
        watches = self._has_attention and self._external is None  # else it may have evicted KV
        if self._caching and (watches or self.enable_kv_cache_events):
            self._follow_states(len(groups), watches)
        self._allocate_kv = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        logger.info(
            "mambacache: %d states, hits every %d tokens, %s",
            self.prefix_cache.config.num_state_blocks, self.prefix_cache.config.block_size,
            f"KV blocks of {self.block_size} tokens" if self._has_attention else "no KV",
        )  # fmt: skip

    def _follow_states(self, num_groups: int, watches: bool) -> None:
        pool = self.kv_cache_manager.block_pool
        hashes_of: Callable[[Any], Sequence[bytes]] = attrgetter("block_hashes")
        size = pool.hash_block_size
        if not self._has_attention:
            hashes_of, size = ChunkHashes(self.cache_config.prefix_caching_hash_algo), CHUNK
        self._hashes = HashMap(self.prefix_cache, hashes_of, size)
        if watches:
            self._watch = KVWatch(self.prefix_cache, self._hashes, pool, num_groups)
            self._page_queue = PageQueue(self.kv_cache_manager, self.prefix_cache)
        if self.enable_kv_cache_events:
            alone = Settings.of(self.vllm_config).kv_event_groups == 1
            self._events = StateEvents(
                self.kv_cache_manager, self._hashes, has_attention=self._has_attention, alone=alone
            )

    # --- requests ---

    def add_request(self, request: Any) -> None:
        name = request.request_id
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
            logger.error("mambacache takes token prompts only, and no streaming input: request %s is refused", name)
            self.encoder_cache_mismatch_reqs.add(name)  # vLLM ends them with an error; raising would end the engine
            if request.resumable:
                self._refused_streams.add(name)
        elif name in self._refused_streams:
            self._refused_streams.remove(name)
            if name not in self.requests:
                return
        elif name not in self.requests:
            media = [(each.mm_position.offset, each.identifier) for each in request.mm_features or ()]
            self.prefix_cache.add(
                name,
                request.prompt_token_ids,
                salt=_salt(request) + (self._of_this_process if request.lora_request is not None else ""),
                extra_keys=media,
                read=self._caching and not request.skip_reading_prefix_cache,
            )
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """Return whether both caches admit a request, and its KV is loaded."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        name = request.request_id
        if not self.prefix_cache.knows(name):
            return False
        runs = self.prefix_cache.runs(name)
        if self._external is not None and (runs or request.num_computed_tokens):
            if runs and request.num_computed_tokens == self.prefix_cache.progress(name).computed:
                return True
            self._give_up_load(request)
            self._external.failed.add(name)
        if self._held or self.prefix_cache.waits(name):
            return False
        blocks, local, covered = self.kv_cache_manager.empty_kv_cache_blocks, 0, None
        if self._has_attention:
            blocks, local, *_ = self.kv_cache_manager.get_computed_blocks(request)
            external = self._external.ask(request, local) if self._external is not None else 0
            if external is None:
                return False
            covered = local + external
        found = self.prefix_cache.admit(name, kv_tokens=covered)
        if isinstance(found, Wait):
            self._held = found.reason == "no room"
            return False
        hit = found.num_tokens
        if self._has_attention:
            hit = min(local, hit)
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, hit)
        if self._external is not None:
            self._external.take(name, found.num_tokens - hit)
        self._hits[name] = (blocks, hit)
        return True

    def _give_up_load(self, request: Any) -> None:
        """Undo an admission without its KV or its state."""
        if self.prefix_cache.runs(request.request_id):
            self.prefix_cache.withdraw(request.request_id)
        if request.num_computed_tokens:
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0

    def _get_local_prefix_cache_hit(self, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*self._hits[request.request_id], 0, False)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        name = request.request_id
        self._tell(request)
        self._rows.pop(name, None)
        runs = self.prefix_cache.runs(name)
        if runs:
            self._forget_pages(name, self.prefix_cache.progress(name).computed)
        if self._external is not None:
            self._external.leaves(name, self.kv_cache_manager)
        super()._preempt_request(request, *args, **kwargs)
        if runs:
            self.prefix_cache.preempt(name)

    def _forget_pages(self, name: str, start: int) -> None:
        """Forget a request's KV pages behind a position, written badly or never."""
        self.kv_cache_manager.evict_blocks(self._pages(name, start, None))

    def _pages(self, name: str, start: int, end: int | None) -> set[int]:
        pages = self.kv_cache_manager.get_block_ids(name)
        sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]
        return {
            page
            for own, size in zip(pages, sizes, strict=True)
            for page in own[start // size : None if end is None else end // size]
        }

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if self._external is not None:
            self._external.leaves(request.request_id, self.kv_cache_manager)
        if self._gone is not None:  # its last tokens are not accepted yet
            self._gone.append(request)
            return super()._free_request(request, *args, **kwargs)
        freed = super()._free_request(request, *args, **kwargs)
        self._free(request)  # the cache ranks its pages before
        return freed

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done = super().reset_prefix_cache(*args, **kwargs)
        if done:
            self.prefix_cache.reset()
            if self._page_queue is not None:
                self._page_queue.start_over()
            if self._hashes is not None:
                self._hashes.follow(self.requests)  # vLLM announced that all blocks are gone
            if self._events is not None:
                self._events.forget()
        self._publish()
        return done

    def shutdown(self) -> None:
        super().shutdown()
        if self._copies is not None:
            self._copies.close()

    # --- steps ---

    def has_requests(self) -> bool:
        """Return whether there is work, for requests or for files."""
        return super().has_requests() or (self._copies is not None and self._copies.flushing)

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        if num_new_tokens <= 1:
            return max(num_new_tokens, 0)
        at = self.prefix_cache.progress(request.request_id)
        if at.computed >= at.prefill_end:  # V2's workers cut drafts at the end of the log
            return num_new_tokens if self._runner_v2 else min(num_new_tokens, FOLD - at.computed % FOLD)
        return self.prefix_cache.next_tokens(request.request_id, num_new_tokens)

    def _allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Allocate state, then KV; None makes vLLM preempt and retry. Rows that only add to a log wait for `_tell`."""
        name = request.request_id
        adds = name in self._later and num_new_tokens == 1 and request.num_computed_tokens % FOLD < FOLD - 1
        if num_new_tokens and not adds and name not in self._rows:  # else a load between steps, or a retry
            self._tell(request)
            row = self._allocate_row(request, num_new_tokens)
            if row is None:
                return None
            self._rows[name] = row
        return self._allocate_kv(request, num_new_tokens, *args, **kwargs)

    def _allocate_row(self, request: Any, num_tokens: int) -> SequenceStep | None:
        name = request.request_id
        if num_tokens == 1:
            begun = self._runner_v2 or self.prefix_cache.progress(name).computed > 0
            return self.prefix_cache.allocate(name, 1, decode=begun)  # V1 puts a prompt of one token behind decode rows
        at = self.prefix_cache.progress(name)
        if at.computed >= at.prefill_end:
            return self.prefix_cache.allocate(name, 1, drafts=request.spec_token_ids[: num_tokens - 1])
        return self.prefix_cache.allocate(name, num_tokens)

    def _tell(self, request: Any) -> None:
        """Tell the cache of rows that only added to a log. Unread rows are allocated now."""
        name = request.request_id
        known = self._later.pop(name, None)
        if known is None:
            return
        tokens = self._new_tokens(request)
        if tokens:
            self.prefix_cache.decoded(name, tokens)
        unread, out = self._step - known - len(tokens), [*self._steps_out.values()]
        assert 0 <= unread <= len(out), "it was part of every step since"
        for rows in out[len(out) - unread :]:
            row = self.prefix_cache.allocate(name, 1, decode=True)
            assert row is not None, "a row that only adds a token to its log needs no room"
            rows += self.prefix_cache.plan_rows([row])
            self.prefix_cache.issued(rows[-1:])

    def _new_tokens(self, request: Any) -> list[int]:
        """Return the tokens that the cache lacks."""
        return request.all_token_ids[len(self.prefix_cache.tokens(request.request_id)) :]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._hits.clear()
        if self._external is not None:
            self._external.start_over()
        self._held = False
        if self._copies is not None:
            self._copies.end()
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        steps = [self._rows.pop(name) for name in scheduled if name in self._rows]
        for name, row in self._rows.items():  # rows left got no KV
            if name not in self._hits:
                self.prefix_cache.drop(row)
        self._rows.clear()
        for name in self._hits:
            loads = self.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS
            if name not in scheduled and not loads and self.prefix_cache.runs(name):
                self.prefix_cache.withdraw(name)
        for name in self._later.keys() - scheduled.keys():  # else workers would advance it
            self._tell(self.requests[name])
        rows = self.prefix_cache.plan_rows(steps)
        # Before `issued`: workers launch these copies before this step.
        output.mambacache_transfers = (
            self._copies.begin(idle=not self.has_unfinished_requests()) if self._copies is not None else ()
        )
        self.prefix_cache.issued(rows)  # workers run in order, and a failed step ends the engine
        self._follow(self.requests)
        if self._events is not None:
            for new in output.scheduled_new_reqs:
                self._events.report(self.requests[new.req_id], new.num_computed_tokens)
        self._step += 1
        if scheduled:
            self._steps_out[id(output)] = list(rows)
        if scheduled or output.finished_req_ids:  # even without rows workers must forget requests
            output.mambacache = self._sender.columns(rows, output.finished_req_ids)
        if scheduled and self._suspects:
            output.mambacache_question = self._ask()
            self._asked[id(output)], self._suspects = list(self._suspects), {}
        if self._external is not None:
            self._external.sent(output, self.kv_cache_manager)
        if not self.num_spec_tokens:
            self._later |= {row.request_id: self._step for row in rows if row.samples and not row.prefill}
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._gone = []
        if self._external is not None:
            told = model_runner_output.kv_connector_output
            bad = told.invalid_block_ids if told is not None else set()
            pages = self._external.bad_pages(scheduler_output, bad, self.running, self.kv_cache_manager)
            self._external.failed |= pages.keys() & self.requests.keys()
            self._forget_failed_loads(pages)
        rows = self._steps_out.get(id(scheduler_output), [])
        self._take_answer(self._asked.pop(id(scheduler_output), []), model_runner_output)
        not_finite = self._suspect(rows, getattr(model_runner_output, "num_nans_in_logits", None) or {})
        try:
            return super().update_from_output(scheduler_output, model_runner_output)
        finally:
            gone, self._gone = self._gone, None
            self._steps_out.pop(id(scheduler_output), None)
            sampled, ended = {}, {request.request_id: request for request in gone}
            for name in (row.request_id for row in rows):
                request = ended.get(name) or self.requests.get(name)
                if request is not None and self.prefix_cache.knows(name):
                    sampled[name] = self._new_tokens(request)
            self.prefix_cache.accept(rows, sampled, not_finite=not_finite)
            for request in gone:
                self._free(request)
            self._follow(ChainMap(ended, self.requests))
            self._publish()
            self._report()

    def _forget_failed_loads(self, pages: Mapping[str, set[int]]) -> None:
        """Forget all that requests computed from pages that failed to load, and start these requests anew."""
        if not pages:
            return
        for name in [*self._later]:
            self._tell(self.requests[name])
        self.kv_cache_manager.evict_blocks(set().union(*pages.values()))
        rows = [row for rows in self._steps_out.values() for row in rows if row.request_id in pages]
        self.prefix_cache.cancel(rows)  # preempts requests that resumed from their states, too
        for request in [each for each in self.running if not self.prefix_cache.runs(each.request_id)]:
            self.running.remove(request)
            self._forget_pages(request.request_id, 0)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)

    def _follow(self, requests: Mapping[str, Any]) -> None:
        """Take note of states that were stored or lost; `requests` include requests that end now."""
        if self._hashes is None:
            return
        gone, new = self._hashes.follow(requests)
        if self._watch is not None:
            self._watch.look(new)
        if self._events is not None:
            self._events.note(gone, new)

    def _publish(self) -> None:
        """Publish KV events in vLLM's place."""
        if self._events is not None and (events := self._events.take()):
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))

    # --- NaN logits (VLLM_COMPUTE_NANS_IN_LOGITS=1) ---

    def _suspect(self, rows: Sequence[SequenceStep], num_nans: Mapping[str, int]) -> list[str]:
        """Return requests with NaN logits. Forget pages that they wrote; suspect blocks that they resumed from."""
        bad = [row.request_id for row in rows if num_nans.get(row.request_id)]
        for name in bad:
            if name not in self.requests or not self.prefix_cache.runs(name):
                continue
            proven = self.prefix_cache.progress(name).proven
            read = self._pages(name, 0, proven)
            self._forget_pages(name, proven)
            for block in self.prefix_cache.suspects(name):
                self._suspects[block.block_hash] = block.state, read
        return bad

    def _ask(self) -> Question:
        states, pages = zip(*self._suspects.values(), strict=True)
        return Question(states, tuple(sorted(set().union(*pages))))

    def _take_answer(self, hashes: Sequence[bytes], model_runner_output: Any) -> None:
        """Drop blocks that workers found bad."""
        found = getattr(model_runner_output, "mambacache_sound", None)
        if found is not None:
            self.prefix_cache.invalidate([each for each, sound in zip(hashes, found.states, strict=True) if not sound])
            self.kv_cache_manager.evict_blocks(set(found.bad_pages))

    def _free(self, request: Any) -> None:
        if self.prefix_cache.knows(request.request_id):
            self._tell(request)
            self.prefix_cache.free(request.request_id, finished=request.status in FINISHED)
        if self._external is not None:
            self._external.failed.discard(request.request_id)

    def _report(self) -> None:
        if self._counters is not None:
            self._counters.tell(self.prefix_cache, idle=not self.requests)
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        stats = self.prefix_cache.stats
        losses = ", ".join(f"{reason}: {tokens:,}" for reason, tokens in stats.losses.items() if tokens) or "none"
        logger.info(
            "mambacache: %s of %s prompt tokens hit so far, of %s that had been computed before; lost, by reason: %s",
            f"{stats.hit_tokens:,}", f"{stats.prompt_tokens:,}", f"{stats.ceiling_tokens:,}", losses,
        )  # fmt: skip


class StateScheduler(Mixin, Scheduler):
    """Schedules step by step."""


class AsyncStateScheduler(Mixin, AsyncScheduler):
    """Schedules ahead of tokens."""


def make(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Make the scheduler; vLLM decides on asynchronous scheduling after the config hook."""
    settle_connector(vllm_config)
    cls = AsyncStateScheduler if vllm_config.scheduler_config.async_scheduling else StateScheduler
    return cls(vllm_config=vllm_config, **kwargs)
