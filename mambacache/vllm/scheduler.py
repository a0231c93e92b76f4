"""vLLM's scheduler with `PrefixCache` beside its KV cache manager."""

from __future__ import annotations

import time
from math import lcm
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.plan import CHUNK, FOLD, SequenceStep
from mambacache.report import Wait
from mambacache.vllm.config import PAGES, is_cpu
from mambacache.vllm.log import logger
from mambacache.vllm.metrics import Counters
from mambacache.vllm.rows import Sender
from mambacache.vllm.settings import Settings
from mambacache.vllm.sizing import log_slots, read_blocks

REPORT_SECONDS = 60.0
FINISHED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class Mixin:
    """Before one of vLLM's schedulers, which asks it at the places that are meant for connectors and for Mamba.

    A request is admitted by both caches or by none: what `PrefixCache` admitted in a step and vLLM did not schedule is
    withdrawn at its end. The KV that is hit is cut to the state that is hit.
    """

    max_num_active_reqs: int  # vLLM's

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._caching = bool(self.cache_config.enable_prefix_caching)
        groups = self.kv_cache_config.kv_cache_groups
        self._has_attention = [group.layer_names for group in groups] != [[PAGES]]
        blocks = read_blocks(self.vllm_config)
        slots = log_slots(self.vllm_config, blocks)
        self.max_num_active_reqs = min(self.max_num_active_reqs, slots)  # each has a log once it decodes
        self.states = PrefixCache(
            CacheConfig(
                num_state_blocks=blocks,
                num_log_slots=slots,
                max_draft_tokens=self.num_spec_tokens,
                block_size=lcm(CHUNK, self.block_size) if self._has_attention else CHUNK,
                has_attention=self._has_attention,
                max_checkpoints=None if self._caching else 0,
                checkpoint_interval=Settings.of(self.vllm_config).checkpoint_interval,
            )
        )
        self.need_mamba_block_aligned_split = True  # makes schedule() ask _mamba_block_aligned_split for every chunk
        self._runner_v2 = not is_cpu()
        self._rows: dict[str, SequenceStep | None] = {}  # of this schedule(); None: one that is sure of its room
        self._sure: dict[str, int] = {}  # how many rows of a request only add a token to its log from here on
        self._hits: dict[str, tuple[object, int]] = {}  # admitted in this schedule()
        self._held = False  # one that found no room holds back those behind it
        self._sampled: dict[str, list[int]] = {}
        self._gone: list[tuple[str, bool]] | None = None  # who ended inside update_from_output
        self._refused_streams: set[str] = set()
        self._sender = Sender()
        self._steps_out: dict[int, tuple[SequenceStep, ...]] = {}  # by the identity of vLLM's output
        self._reported = time.monotonic()
        self._counters = Counters(self.vllm_config) if self.log_stats else None
        self._allocate_kv = self.kv_cache_manager.allocate_slots
        self.kv_cache_manager.allocate_slots = self._allocate_slots
        logger.info(
            "mambacache: %d states, hits every %d tokens, %s",
            self.states.config.num_state_blocks, self.states.config.block_size,
            f"KV blocks of {self.block_size} tokens" if self._has_attention else "no KV",
        )  # fmt: skip

    # --- requests ---

    def add_request(self, request: Any) -> None:
        name = request.request_id
        if request.prompt_token_ids is None or request.prompt_embeds is not None or request.resumable:
            logger.error("mambacache takes token prompts only, and no streaming input: request %s is refused", name)
            self.encoder_cache_mismatch_reqs.add(name)  # vLLM ends these with an error; to raise would end the engine
            if request.resumable:
                self._refused_streams.add(name)
        elif name in self._refused_streams:  # the front end says that the stream has ended
            self._refused_streams.remove(name)
            if name not in self.requests:
                return
        elif name not in self.requests:
            lora = request.lora_request.lora_name if request.lora_request else ""
            media = [(each.mm_position.offset, each.identifier) for each in request.mm_features or ()]
            self.states.add(
                name,
                request.prompt_token_ids,
                salt=repr((request.cache_salt, lora)),
                extra_keys=media,
                read=self._caching and not request.skip_reading_prefix_cache,
            )
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """False: schedule() passes the request over in this step."""
        if not super()._handle_blocked_waiting_request(request):
            return False
        name = request.request_id
        if self._held or not self.states.knows(name) or self.states.waits(name):
            return False
        blocks, covered = self.kv_cache_manager.empty_kv_cache_blocks, None
        if self._has_attention:
            blocks, covered, *_ = self.kv_cache_manager.get_computed_blocks(request)
        found = self.states.admit(name, kv_tokens=covered)
        if isinstance(found, Wait):
            self._held = found.reason == "no room"
            return False
        if self._has_attention:
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, found.num_tokens)
        self._hits[name] = (blocks, found.num_tokens)
        return True

    def _get_local_prefix_cache_hit(self, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*self._hits[request.request_id], 0, False)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        name = request.request_id
        if name in self._rows:
            del self._rows[name]
            self._forget_pages(name)
        self._sure.pop(name, None)
        super()._preempt_request(request, *args, **kwargs)
        if self.states.runs(name):
            self.states.preempt(name)

    def _forget_pages(self, name: str) -> None:
        """Of a row that will not run: vLLM named its full KV pages when it allocated them, and would hit them."""
        pages, start = self.kv_cache_manager.get_block_ids(name), self.states.progress(name).computed
        sizes = [group.kv_cache_spec.block_size for group in self.kv_cache_config.kv_cache_groups]
        unwritten = {page for own, size in zip(pages, sizes, strict=True) for page in own[start // size :]}
        self.kv_cache_manager.evict_blocks(unwritten)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        name, finished = request.request_id, request.status in FINISHED
        self._sure.pop(name, None)
        if self._gone is not None:  # its last tokens are not accepted yet
            self._gone.append((name, finished))
        elif self.states.knows(name):
            self.states.free(name, finished=finished)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done = super().reset_prefix_cache(*args, **kwargs)
        if done:
            self.states.reset()
        return done

    # --- steps ---

    def _mamba_block_aligned_split(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> int:
        if num_new_tokens <= 1:
            return max(num_new_tokens, 0)
        at = self.states.progress(request.request_id)
        if at.computed >= at.prefill_end:  # a token and drafts, which end with the log: V2's workers see to that
            return num_new_tokens if self._runner_v2 else min(num_new_tokens, FOLD - at.computed % FOLD)
        return self.states.chunk(request.request_id, num_new_tokens)

    def _allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """State first, then KV; None has vLLM preempt its youngest request and ask again.

        Most rows are sure of their room: between two folds a request without drafts needs no block. They are allocated
        in one go when all are known, which the host does faster."""
        name = request.request_id
        if name not in self._rows:  # else it asks again, for as many tokens
            row, sure = None, self._sure.get(name, 0) if num_new_tokens == 1 else 0
            if sure:
                self._sure[name] = sure - 1
            else:
                row = self._allocate_row(request, num_new_tokens)
                if row is None:
                    return None
                if row.samples and not row.prefill and not self.num_spec_tokens:
                    self._sure[name] = FOLD - 1 - (row.start + 1) % FOLD
            self._rows[name] = row
        return self._allocate_kv(request, num_new_tokens, *args, **kwargs)

    def _allocate_row(self, request: Any, num_tokens: int) -> SequenceStep | None:
        name = request.request_id
        if num_tokens == 1:  # nothing is drafted, and where the request is matters to V1 alone
            begun = self._runner_v2 or self.states.progress(name).computed > 0
            return self.states.allocate(name, 1, decode=begun)  # V1 puts a prompt of one token behind decode rows
        at = self.states.progress(name)
        if at.computed >= at.prefill_end:
            return self.states.allocate(name, 1, drafts=request.spec_token_ids[: num_tokens - 1])
        return self.states.allocate(name, num_tokens)

    def _sure_row(self, name: str) -> SequenceStep:
        row = self.states.allocate(name, 1, decode=True)
        assert row is not None, "a row that only adds a token to its log needs no room"
        return row

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._hits.clear()
        self._held = False
        output = super().schedule(*args, **kwargs)
        scheduled = output.num_scheduled_tokens
        steps = [self._rows.pop(name) or self._sure_row(name) for name in scheduled]
        self._rows.clear()  # what is left got a state and no KV: it was admitted in vain
        for name in self._hits:
            if name not in scheduled and self.states.runs(name):
                self.states.withdraw(name)
        rows = self.states.plan_rows(steps)
        if rows:
            self.states.issued(rows)  # workers run steps in this order, and a step that fails ends the engine
            self._steps_out[id(output)] = rows
        if rows or output.finished_req_ids:  # a step without rows still tells workers who has gone
            output.mambacache = self._sender.columns(rows, output.finished_req_ids)
        return output

    def _update_request_with_output(self, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any) -> Any:
        result = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        self._sampled[request.request_id] = list(result[0])
        return result

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._gone = []
        try:
            return super().update_from_output(scheduler_output, model_runner_output)
        finally:
            gone, self._gone = self._gone, None
            sampled, self._sampled = self._sampled, {}
            self.states.accept(self._steps_out.pop(id(scheduler_output), ()), sampled)
            for name, finished in gone:
                if self.states.knows(name):
                    self.states.free(name, finished=finished)
            self._report()

    def _report(self) -> None:
        if self._counters is not None:
            self._counters.tell(self.states, idle=not self.requests)
        now = time.monotonic()
        if now - self._reported < REPORT_SECONDS:
            return
        self._reported = now
        stats = self.states.stats
        losses = ", ".join(f"{reason}: {tokens:,}" for reason, tokens in stats.losses.items() if tokens) or "none"
        logger.info(
            "mambacache: %s of %s prompt tokens hit so far, of %s that had been computed before; lost, by reason: %s",
            f"{stats.hit_tokens:,}", f"{stats.prompt_tokens:,}", f"{stats.ceiling_tokens:,}", losses,
        )  # fmt: skip


class StateScheduler(Mixin, Scheduler):
    """One step at a time."""


class AsyncStateScheduler(Mixin, AsyncScheduler):
    """Steps ahead of the tokens."""


def make(*, vllm_config: Any, **kwargs: Any) -> Scheduler:
    """What stands in `scheduler_cls`: vLLM knows whether it schedules asynchronously only after the config hook."""
    cls = AsyncStateScheduler if vllm_config.scheduler_config.async_scheduling else StateScheduler
    return cls(vllm_config=vllm_config, **kwargs)
