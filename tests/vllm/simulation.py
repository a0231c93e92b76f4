"""Run vLLM's own scheduler with ours around it, and workers without a model.

The state after a sequence's first n tokens is a number: `prefix[n]`, made from `prefix[n - 1]` and the n-th token. A
state block holds such a number, a KV slot too, and a sampled token is a function of it. So each state, each KV slot and
each answer can be compared with the right value.
"""

from __future__ import annotations

import json
import random
from collections import deque
from functools import cache
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from connectors import GARBAGE, FaultyConnector, SimulatedOffloading
from sequences import VOCABULARY, Sequence, expected, extend, keys_of, prefixes
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_block_hash, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids

from mambacache.kernels import StateIndices, place_decodes
from mambacache.plan import FOLD, SequenceStep, Transfer, layout
from mambacache.runner.directory import DamagedError, Folder, StoredFile
from mambacache.vllm import files, sizing
from mambacache.vllm.config import PAGES
from mambacache.vllm.rows import Receiver
from mambacache.vllm.scheduler import make
from mambacache.vllm.transfers import Ends

STOP = 7
HAS_LOOKAHEAD = "num_hash_lookahead_tokens" in signature(get_request_block_hasher).parameters
"""This says whether a block's hash may cover tokens behind the block, as in vLLM 0.33 for drafts of the MTP kind."""
MAX_STEPS = 4000
IMAGE = 30
"""An image has this many tokens."""
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 4096,
}  # fmt: skip


@cache
def model_config() -> ModelConfig:
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        return ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=4096)


def block_hasher(size: int, lookahead: int = 0) -> Any:
    """Return vLLM's function that hashes a request's blocks, each with `lookahead` tokens behind it."""
    return get_request_block_hasher(size, sha256, *([lookahead] if lookahead else []))


def make_scheduler(
    num_states: int = 40,
    num_pages: int = 400,
    *,
    page: int = 64,
    budget: int = 200,
    ahead: bool = False,
    policy: str = "fcfs",
    attention: bool = True,
    drafts: int = 0,
    v2: bool = False,
    events: bool = False,
    host_states: int = 0,
    ranks: int = 1,
    disk: Path | None = None,
    connector: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return our scheduler on vLLM's, with memory for `num_states` states and `num_pages` KV pages of `page` tokens.

    Without attention there is a page for each of 8 requests that may run. `v2` chooses model runner V2 on any device.
    With `events` it publishes KV events, to nobody. Each of `ranks` workers keeps `host_states` states in host memory,
    and more in files below `disk`. `connector` has the chances of a `FaultyConnector`, or with `cpu_bytes_to_use` the
    options of vLLM's own.
    """
    if not host_states:
        settings["num_state_blocks"] = num_states
    speculative = None
    if drafts:
        speculative = SpeculativeConfig(
            method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, target_model_config=model_config(),
            target_parallel_config=ParallelConfig(),
        )  # fmt: skip
    if not attention:
        num_pages, page = 9, 4096 + 64
    config = VllmConfig(
        model_config=model_config(),
        cache_config=CacheConfig(block_size=page, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget, max_num_seqs=8, max_model_len=4096, is_encoder_decoder=False, policy=policy
        ),
        device_config=DeviceConfig("cpu"),
        speculative_config=speculative,
        kv_transfer_config=None
        if connector is None
        else KVTransferConfig(
            kv_connector="SimulatedOffloading" if "cpu_bytes_to_use" in connector else "FaultyConnector",
            kv_connector_module_path="connectors",
            kv_role="kv_both",
            kv_connector_extra_config=connector,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if events else None,
        additional_config={"mambacache": settings},
    )
    config.parallel_config.world_size = ranks
    if host_states:
        sizing.write_sizes(config, sizing.Sizes(num_states, host_states))
        if disk is not None:
            settings |= {"state_host_bytes": 1, "state_disk_dir": str(disk)}
            for rank in range(ranks):
                files.tell_identity(config, rank, f"rank {rank}")
        made = [Ends(config, rank, new=True) for rank in range(ranks)]
    config.scheduler_config.async_scheduling = ahead  # vLLM's choice depends on the device
    config.cache_config.num_gpu_blocks = num_pages
    spec = FullAttentionSpec(block_size=page, num_kv_heads=1, head_size=8, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer" if attention else PAGES], spec)]
    scheduler = make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=num_pages, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=page,
        log_stats=True,
    )
    scheduler.ends_of_ranks = made if host_states else []
    scheduler.folders_of_ranks = [Folder(path) for path in files.folders(config)]
    scheduler._runner_v2 |= v2
    # A model with images has these. vLLM believes that no text model has images.
    scheduler.max_num_encoder_input_tokens = budget + IMAGE
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=8 * IMAGE)
    return scheduler


class HostStates:
    """Keep states in host memory on all ranks. A transfer takes a while on each rank, and may fail on some of them.

    Args:
        states: the pool, by block.
        folders: of the files of all ranks.
        failing, slow: chances that a transfer fails on a rank, and that it goes on for another step.
    """

    def __init__(
        self, states: dict[int, int], ranks: list[Ends], folders: list[Folder], failing: float, slow: float, seed: int
    ) -> None:
        self._folders = folders
        self._states, self._ranks, self._failing, self._slow = states, ranks, failing, slow
        self._slots: dict[int, int] = {}
        self._under_way: list[tuple[Transfer, set[int]]] = []
        self._rng = random.Random(seed)
        self.loaded = self.failed = 0

    def launch(self, transfers: tuple[Transfer, ...]) -> None:
        for transfer in transfers:
            assert transfer.states or self._folders
            assert all(map(all, transfer.states)) and not transfer.pages
            assert not (transfer.states and transfer.files)
            blocks = {block for block, _ in transfer.states}
            assert not blocks & self.busy(), "two transfers use a block"
            for block, slot in transfer.states:
                if transfer.to_host:
                    assert block in self._states, "a block without a state goes out"
                    self._slots.pop(slot, None)
                else:
                    self._states.pop(block, None)
            self._under_way.append((transfer, set(range(len(self._ranks)))))

    def busy(self, reading: bool = True) -> set[int]:
        """Return the blocks that transfers write, and if `reading` those that they read."""
        return {b for each, _ in self._under_way if reading or not each.to_host for b, _ in each.states}

    def end(self, all_transfers: bool = False) -> None:
        for transfer, left in [*self._under_way]:
            for rank in [*left]:
                if not all_transfers and self._rng.random() < self._slow:
                    continue
                left.remove(rank)
                failed = self._rng.random() < self._failing or not self._file(transfer, rank)
                self.failed += failed
                self._ranks[rank].note(transfer.number, failed)
            if not left:
                self._under_way.remove((transfer, left))
                self._copy(transfer)

    def _file(self, transfer: Transfer, rank: int) -> bool:
        """Read or write files of a rank, and return whether all are good."""
        good = True
        for each in transfer.files:
            assert each.kind == "state" and each.slot
            file, block = StoredFile("state", each.block_hash, each.exact, 8), bytearray(8)
            if transfer.to_host:
                try:
                    self._folders[rank].read(file, memoryview(block))
                    self._slots[each.slot] = int.from_bytes(block, signed=True)
                except (DamagedError, FileNotFoundError):
                    good = False
            else:
                self._folders[rank].write(file, memoryview(self._slots[each.slot].to_bytes(8, signed=True)))
        return good

    def _copy(self, transfer: Transfer) -> None:
        self.loaded += bool(transfer.states) and not transfer.to_host
        for block, slot in transfer.states:
            if transfer.to_host:
                self._slots[slot] = self._states[block]
            elif slot in self._slots:
                self._states[block] = self._slots[slot]


class Worker:
    """Run steps in the order of their schedules. It knows the scheduler's messages, and each token that it sampled."""

    def __init__(self, page: int | None, v2: bool) -> None:
        self.page, self.v2 = page, v2  # page is None without attention; v2: its model runner is V2
        self.states: dict[int, int] = {}
        self.logs: dict[tuple[int, int], int] = {}  # by slot and entry
        self.kv: dict[int, list[int]] = {}
        self.sequences: dict[str, Sequence] = {}
        self.receiver = Receiver()
        self.host: HostStates | None = None
        self.connector: FaultyConnector | SimulatedOffloading | None = None
        self.may_read_garbage = False
        self.late = 0  # rows that may have begun later than the scheduler knew
        self._rng = random.Random(0)

    def run(self, output: SchedulerOutput, rows: tuple[SequenceStep, ...], requests: dict[str, Request]) -> Any:
        if self.host is not None:
            self.host.launch(output.mambacache_transfers)
            self.host.end()
        told = None
        if self.connector is not None:
            told = self.connector.run(output.kv_connector_metadata, self.kv)
            self.may_read_garbage |= bool(told.invalid_block_ids)
        starts = self._take(output, requests)
        if (columns := getattr(output, "mambacache", None)) is not None:
            self.receiver.take(columns, output.finished_req_ids)
        scheduled = output.num_scheduled_tokens
        known = {row.request_id for row in rows}
        added = [self.receiver.row(name) for name in scheduled if name not in known]  # each adds a token to its log
        assert not any(row.prefill or row.dst or row.checkpoints or row.num_tokens > 1 for row in added)
        rows = (*rows, *added)
        order = self._rng.sample(list(scheduled), len(scheduled))  # requests keep their places while others come and go
        order = self._batch_order(order, output, starts)
        drafted = output.scheduled_spec_decode_tokens
        self._check_rows(order, rows, sorted_by_kind=not drafted)
        placed = self._placed(rows)
        for row in placed:
            sequence = self.sequences[row.request_id]
            sequence.drafts = sequence.drafts[: len(drafted.get(row.request_id, ()))]
            if not row.prefill:  # tokens beyond the end of its log were not computed
                starts[row.request_id], sequence.drafts = row.start, sequence.drafts[: row.num_tokens - 1]
            for token in sequence.drafts:
                sequence.prefix.append(extend(sequence.prefix[-1], token))
        garbage = self._read_and_write({row.request_id: row for row in placed}, starts)
        tokens: list[list[int]] = []
        for name in order:
            sequence, end = self.sequences[name], starts[name] + scheduled[name] - len(drafted.get(name, ()))
            tokens.append(sequence.verified() if end == len(sequence.tokens) else [])
            if name in garbage:
                tokens[-1] = [(token + 1) % VOCABULARY for token in tokens[-1][:1]]
        for name, new in zip(order, tokens, strict=True):
            sequence = self.sequences[name]
            del sequence.prefix[len(sequence.tokens) + 1 :]
            sequence.tokens += new
            for token in new:
                sequence.prefix.append(extend(sequence.prefix[-1], token))
        if self.connector is not None:
            self.connector.keep(self.kv)
        return ModelRunnerOutput(order, {name: i for i, name in enumerate(order)}, tokens, kv_connector_output=told)

    def _placed(self, rows: tuple[SequenceStep, ...]) -> list[SequenceStep]:
        """Return the rows where the device has them: late rows begin with a sequence's last token."""
        decode = [row for row in rows if not row.prefill]
        indices = StateIndices.from_arrays(layout(decode, len(decode)), "cpu")
        starts = [len(self.sequences[row.request_id].tokens) - 1 if row.unplaced_by else row.start for row in decode]
        place_decodes(indices, torch.tensor(starts, dtype=torch.int32))
        arrays = "decode_src", "decode_dst", "log_start", "decode_len"
        columns = zip(*(getattr(indices, name).tolist() for name in arrays), strict=True)
        names = [row.request_id for row in decode]
        placed = dict(zip(names, zip(starts, columns, strict=True), strict=True))
        self.late += sum(row.unplaced_by > 0 for row in decode)
        found = []
        for row in rows:
            if not row.prefill:
                start, (src, dst, log_start, length) = placed[row.request_id]
                assert row.start <= start <= row.start + row.unplaced_by
                row = row._replace(start=start, src=src, dst=dst, log_start=log_start, num_tokens=length)
            found.append(row)
        return found

    def _take(self, output: SchedulerOutput, requests: dict[str, Request]) -> dict[str, int]:
        """Note vLLM's own part of the output. Return each row's start."""
        for name in output.finished_req_ids:
            self.sequences.pop(name, None)
        starts = {}
        cached = output.scheduled_cached_reqs
        begun = [(each.req_id, each.block_ids, each.num_computed_tokens) for each in output.scheduled_new_reqs]
        for name, pages, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            starts[name] = start
            if name in cached.resumed_req_ids:
                begun.append((name, pages, start))
            elif pages is not None:
                self.sequences[name].pages += pages[0]
        for name, pages, start in begun:
            request = requests[name]
            tokens = list(request.all_token_ids)
            starts[name], keys = start, keys_of(request)
            self.sequences[name] = Sequence(
                tokens, request.num_prompt_tokens, keys, list(pages[0]), prefixes(tokens, keys)
            )
        return starts

    def _batch_order(self, names: list[str], output: SchedulerOutput, starts: dict[str, int]) -> list[str]:
        """Return the requests in the order of a model runner's batch."""
        if self.v2:
            lengths = {name: output.num_scheduled_tokens[name] for name in names}
            return sort_batch_req_ids(lengths, output.scheduled_spec_decode_tokens, 1)
        batch = SimpleNamespace(
            req_ids=names,
            num_computed_tokens_cpu=np.array([starts[name] for name in names]),
            num_prompt_tokens=np.array([self.sequences[name].prompt for name in names]),
        )

        def swap_states(i: int, j: int) -> None:
            names[i], names[j] = names[j], names[i]

        batch.swap_states = swap_states
        reorder_batch_to_split_decodes_and_prefills(batch, output, 1)
        return names

    def _check_rows(self, order: list[str], rows: tuple[SequenceStep, ...], sorted_by_kind: bool) -> None:
        """Check that the planned rows arrived, in an order that can be laid out."""
        planned = {row.request_id: row for row in rows}
        assert planned.keys() == set(order)
        by_kind = sorted(order, key=lambda name: planned[name].prefill)
        assert order == by_kind or not sorted_by_kind
        order = by_kind
        decodes = sum(not row.prefill for row in rows)
        wanted = layout([planned[name] for name in order], decodes)
        arrived = layout([self.receiver.row(name) for name in order], decodes)
        for name, values in wanted.items():
            assert np.array_equal(values, arrived[name]), name

    def _read_and_write(self, rows: dict[str, SequenceStep], starts: dict[str, int]) -> set[str]:
        """Return the requests that read garbage; they write nothing else."""
        garbage: set[str] = set()
        written: list[int] = []
        pages: list[int] = []
        slots: list[int] = []
        states: dict[int, int] = {}
        for name, row in rows.items():
            sequence, end = self.sequences[name], row.start + row.num_tokens
            assert row.start == starts[name], f"{name} runs from {starts[name]}, its row from {row.start}"
            held = self.states[row.src] if row.src else prefixes([], sequence.keys)[0]
            stands = row.start if row.prefill else row.start // FOLD * FOLD + row.log_start
            logged = [self.logs[row.log_slot, position % FOLD] for position in range(stands, row.start)]
            if GARBAGE in (held, *logged, *self._kv_before(sequence, row.start)):
                assert self.may_read_garbage, f"{name} reads garbage"
                garbage.add(name)
            else:
                assert held == sequence.prefix[stands], f"{name} does not find its state at {stands}"
                assert logged == sequence.prefix[stands + 1 : row.start + 1], f"{name} does not find its log"
            if not row.prefill:
                assert row.log_slot and row.num_tokens == 1 + len(sequence.drafts)
                for position in range(row.start, end):
                    assert position // FOLD == row.start // FOLD, f"{name} goes beyond its log"
                    self.logs[row.log_slot, position % FOLD] = (
                        GARBAGE if name in garbage else sequence.prefix[position + 1]
                    )
                slots.append(row.log_slot)
            pages += self._attend(name, row.start, end, name in garbage)
            ends = {position: block for position, block in {end: row.dst, **row.checkpoints}.items() if block}
            assert all(row.start < position <= end for position in ends) and (ends or end % FOLD)
            written += ends.values()
            states |= {
                block: GARBAGE if name in garbage else sequence.prefix[position] for position, block in ends.items()
            }
        read = {row.src for row in rows.values() if row.dst != row.src}
        assert len(set(slots)) == len(slots), "two rows write one log"
        assert len(set(written)) == len(written), "two rows write one state block"
        assert not read & set(written), "a row writes a state that another one reads"
        if self.host is not None:
            assert not self.host.busy() & set(written), "a row writes a state amid its copy"
            assert not self.host.busy(reading=False) & read, "a row reads a state amid its copy"
        assert len(set(pages)) == len(pages), "two rows write one page"
        self.states |= states
        return garbage

    def _kv_before(self, sequence: Sequence, start: int) -> list[int]:
        """Return a sequence's KV before `start`."""
        pages = sequence.pages[: -(-start // self.page)] if self.page is not None else []
        return [value for page in pages for value in self.kv[page]][:start]

    def _attend(self, name: str, start: int, end: int, garbage: bool) -> list[int]:
        """Check a sequence's KV before `start`, and write the KV up to `end`. Return the written pages."""
        if self.page is None:
            return []
        sequence, first = self.sequences[name], start // self.page
        known = self._kv_before(sequence, start)
        assert garbage or known == sequence.prefix[1 : start + 1], f"{name} does not find its KV before {start}"
        new = [GARBAGE] * (end - start) if garbage else sequence.prefix[start + 1 : end + 1]
        values = known[first * self.page :] + new
        own = sequence.pages[first : -(-end // self.page)]
        for i, page in enumerate(own):
            self.kv[page] = values[i * self.page : (i + 1) * self.page]
        return own


def _has_failed(given: ModelRunnerOutput) -> bool:
    """Tell whether a step ran on KV that was not loaded, or told of a load between steps that failed."""
    return given.kv_connector_output is not None and bool(given.kv_connector_output.invalid_block_ids)


class Simulation:
    """Loop as an engine core around a scheduler.

    With `ahead`, two steps are out before the first step's tokens are read. With `drafts`, the worker guesses up to
    that many tokens. If it is `secretive`, it tells the scheduler their number alone. vLLM's block hashes cover
    `lookahead` tokens behind their blocks. Copies of states fail and take long by the chances `failing` and `slow`.

    Attributes:
        answers: the tokens of each request, as they came; `finish_reasons` says why they ended.
        cached: the tokens of each prompt that vLLM counts as hit.
        queries, hits: tokens in vLLM's report on its prefix cache.
        requests: the requests that were added.
        accepted: drafts that were right.
        lost: the prefix hashes of states that outlived their KV in vLLM.
    """

    def __init__(
        self, scheduler: Any, *, ahead: bool = False, drafts: int = 0, secretive: bool = False, lookahead: int = 0,
        failing: float = 0.0, slow: float = 0.5, seed: int = 0,
    ) -> None:  # fmt: skip
        self.scheduler, self.lookahead = scheduler, lookahead
        page = scheduler.block_size if scheduler.prefix_cache.config.has_attention else None
        self.worker = Worker(page, scheduler._runner_v2)
        if scheduler.ends_of_ranks:
            ranks = scheduler.ends_of_ranks, scheduler.folders_of_ranks
            self.worker.host = HostStates(self.worker.states, *ranks, failing, slow, seed)
        self.worker.connector = scheduler.connector
        self.answers: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, FinishReason] = {}
        self.cached: dict[str, int] = {}
        self.queries = self.hits = 0
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.accepted = 0
        self.lost: set[bytes] = set()
        self._depth = 2 if ahead else 1
        self.ahead, self.drafts, self._secretive, self._rng = ahead, drafts, secretive, random.Random(drafts)
        self._out: deque[tuple[SchedulerOutput, Any]] = deque()
        self._planned: tuple[SequenceStep, ...] = ()
        self._meanings: dict[bytes, int] = {}
        states = scheduler.prefix_cache
        issued = states.issued

        def watched(rows: tuple[SequenceStep, ...]) -> None:
            self._planned = rows  # schedule() issues the rows of its own step last
            issued(rows)

        states.issued = watched
        self._prefixes: dict[bytes, dict[bytes, list[bytes]]] = {}  # vLLM's hashes of each prefix, by the last hash
        free = states.free

        def noting_free(name: str, **kwargs: Any) -> None:
            self._note_prefixes(name)  # the prefixes of its last tokens
            free(name, **kwargs)

        states.free = noting_free
        init_none_hash(sha256)
        self._hasher = block_hasher(scheduler.block_size, lookahead)
        scheduler.kv_cache_manager.block_pool.num_hash_lookahead_tokens = lookahead

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        *,
        salt: str = "",
        lora: str = "",
        lora_path: str = "nowhere",
        images: dict[int, str] | None = None,
        priority: int = 0,
        resumable: bool = False,
        **params: Any,
    ) -> None:
        """Add a request; `images` maps positions to identifiers."""
        given = SamplingParams(temperature=0, max_tokens=max_tokens, **params)
        number = 1 + sum(lora.encode())
        adapter = LoRARequest(lora_name=lora, lora_int_id=number, lora_path=lora_path) if lora else None
        media = [
            MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=position, length=IMAGE))
            for position, identifier in (images or {}).items()
        ]
        self.requests[name] = Request(
            name, prompt, given, None, arrival_time=float(len(self.requests)), cache_salt=salt or None,
            lora_request=adapter, mm_features=media, priority=priority, block_hasher=self._hasher, resumable=resumable,
        )  # fmt: skip
        self.answers[name] = []
        self.scheduler.add_request(self.requests[name])

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        self.aborted.add(name)

    def step(self) -> None:
        """Schedule a step. Read the tokens of the oldest step that is out if there are enough of them."""
        if self.scheduler.has_requests():
            self._planned = ()
            output = self.scheduler.schedule()
            self.worker.may_read_garbage = any(_has_failed(given) for _, given in self._out)
            self._out.append((output, self.worker.run(output, self._planned, self.scheduler.requests)))
            for sequence in self.worker.sequences.values() if self.drafts and self._depth > 1 else ():
                sequence.draft(self._rng, self.drafts)
            self._check_pages()
        if len(self._out) >= self._depth or not self.scheduler.has_requests():
            self.read()
        self.scheduler.prefix_cache.check()
        self._check_later()
        self._check_cold()

    def _check_later(self) -> None:
        """Check that the cache lags behind decoding requests by steps up to their next fold at most."""
        for name, known in self.scheduler._later.items():
            at, more = self.scheduler.prefix_cache.progress(name), self.scheduler._step - known
            assert at.computed >= at.prefill_end and at.computed % FOLD + more < FOLD, (name, more, at)
            assert at.computed + more == self.requests[name].num_computed_tokens, (name, more, at)

    def _note_prefixes(self, name: str) -> None:
        chain, hashes = self.scheduler.prefix_cache._admission.requests[name].chain, self.requests[name].block_hashes
        per_block = self.scheduler.prefix_cache.config.block_size // self.scheduler.block_size
        for depth in range(1, min(len(chain) - 1, len(hashes) // max(per_block, 1)) + 1):
            pages = hashes[: depth * per_block]
            self._prefixes.setdefault(chain[depth], {})[pages[-1]] = pages

    def _check_cold(self) -> None:
        """Check that a state is evicted first if vLLM lost KV of its prefix, and only then.

        Where hashes cover a token more, vLLM may have other KV of the prefix, for another next token.
        """
        if self.scheduler._watch is None:
            return
        for name in self.scheduler.prefix_cache.request_ids:
            self._note_prefixes(name)
        pool = self.scheduler.prefix_cache._admission.pool
        states = pool._blocks
        cold = {block_hash for block_hash, block in states.items() if pool.useless[block]}
        named = {block.block_hash for block in self.scheduler.kv_cache_manager.block_pool.blocks}
        kv = {get_block_hash(each) for each in named if each is not None}
        lost = {each for each in states if not any(map(kv.issuperset, self._prefixes.get(each, {}).values()))}
        self.lost |= lost
        assert lost <= cold, "a state without KV keeps its rank"
        assert cold <= lost or self.lookahead, "a state with KV is evicted first"
        hashes = self.scheduler._hashes
        config = self.scheduler.prefix_cache.config
        assert len(hashes.theirs) <= config.num_state_blocks + config.num_host_states
        assert hashes.ours == {theirs: ours for ours, theirs in hashes.theirs.items()}

    def _check_pages(self) -> None:
        """Check that every page is free or used, that each with a hash is written, and that a hash means the same."""
        pool = self.scheduler.kv_cache_manager.block_pool
        free = sorted(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
        assert free == [block.block_id for block in pool.blocks if not (block.ref_cnt or block.is_null)]
        assert len(free) == pool.get_num_free_blocks()
        order = self.scheduler.prefix_cache._admission.kv_order
        kept = [pool.blocks[page] for page in order._hashes if not order.has(page)]
        assert all(block.block_hash or block.ref_cnt for block in kept), "a name outlives its page"
        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                content = self.worker.kv.get(block.block_id, [])
                assert len(content) == self.worker.page, f"page {block.block_id} has a hash and {len(content)} tokens"
                if GARBAGE in content and any(_has_failed(given) for _, given in self._out):
                    continue
                assert GARBAGE not in content, f"page {block.block_id} has a hash, and was never loaded"
                assert self._meanings.setdefault(block.block_hash, content[-1]) == content[-1]

    def _draft(self, names: list[str]) -> None:
        told = []
        for name in names:
            sequence = self.worker.sequences[name]
            sequence.draft(self._rng, self._rng.randint(0, self.drafts))
            told.append([-1] * len(sequence.drafts) if self._secretive else list(sequence.drafts))
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, told))

    def read(self) -> None:
        if not self._out:
            return
        output, given = self._out.popleft()
        told = self.scheduler.update_from_output(output, given)
        self.accepted += sum(max(len(tokens) - 1, 0) for tokens in given.sampled_token_ids)
        if self.drafts and self._depth == 1:
            self._draft(given.req_ids)
        for outputs in told.values():
            if outputs.scheduler_stats is not None:
                self.queries += outputs.scheduler_stats.prefix_cache_stats.queries
                self.hits += outputs.scheduler_stats.prefix_cache_stats.hits
            for each in outputs.outputs:
                if each.prefill_stats is not None:
                    self.cached[each.request_id] = each.prefill_stats.num_cached_tokens
                self.answers[each.request_id] += each.new_token_ids
                if each.finish_reason is not None:
                    self.finish_reasons[each.request_id] = each.finish_reason

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests() and not self._out:
                return
            self.step()
        raise AssertionError(f"no end after {MAX_STEPS} steps")

    def check_end(self) -> None:
        """Check that every answer follows from its prefix, and that nothing is left of any request."""
        for name, request in self.requests.items():
            answer, wanted = self.answers[name], expected(request)
            assert answer == wanted[: len(answer)], f"{name} got {answer} in place of {wanted}"
            assert name in self.aborted or len(answer) == len(wanted), f"{name} got {len(answer)} of {len(wanted)}"
        states = self.scheduler.prefix_cache
        if self.worker.host is not None:
            self.worker.host.end(all_transfers=True)
            self.scheduler._copies.end()
        states.check()
        assert states.request_ids == []
        hashes = self.scheduler._hashes
        if hashes is not None:
            self.scheduler._follow({})
            held = states._admission.pool._blocks.keys() | states._admission.tier.states._blocks.keys()
            assert hashes.theirs.keys() <= held and not hashes.unnamed
        counts = states.stats.state_blocks
        assert not counts["writing"] and counts["committed"] == counts["evictable"], counts
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert self.worker.receiver.rows == {}
