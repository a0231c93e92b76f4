"""KV connectors on the simulated scheduler, workers included: with loads that are late, partial, failed or lost, and
vLLM's own with copies that end late.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput

GARBAGE = -1
"""KV that was not loaded, and all that is computed from it."""


@dataclass
class Chances:
    """Say how often a connector does not know yet, loads between steps, fails, forgets a page, and goes on for a step.

    Attributes:
        partly: a load that fails has failed from its first page on, unless `partly`.
    """

    unknown: float = 0.0
    between_steps: float = 0.5
    failing: float = 0.0
    partly: float = 0.5
    lost: float = 0.0
    slow: float = 0.5


@dataclass
class LoadOfPages:
    name: str
    hashes: list[bytes]
    pages: list[int]
    between_steps: bool
    fails_from: int | None


@dataclass
class Loads(KVConnectorMetadata):
    loads: list[LoadOfPages]


class FaultyConnector(KVConnectorBase_V1):
    """Keep the KV of every page that the scheduler named, by its hash. It is scheduler and worker in one."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.rng = random.Random(extra.pop("seed", 0))
        self.chances = Chances(**extra)
        self.kept: dict[bytes, list[int]] = {}  # the KV of a page
        self.size = vllm_config.cache_config.block_size
        self.pool: Any = None
        self.under_way: list[LoadOfPages] = []
        self.asked: dict[str, tuple[list[bytes], bool]] = {}
        self.planned: list[LoadOfPages] = []
        self.loaded = self.failures = self.parked = 0

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    # --- scheduler ---

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.rng.random() < self.chances.unknown:
            return None, False
        first, found = num_computed_tokens // self.size, []
        for block_hash in request.block_hashes[first : (request.num_tokens - 1) // self.size]:
            if block_hash not in self.kept:
                break
            found.append(block_hash)
        between_steps = bool(found) and self.rng.random() < self.chances.between_steps
        self.asked[request.request_id] = found, between_steps
        return len(found) * self.size, between_steps

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            return
        hashes, between_steps = self.asked.pop(request.request_id)
        count = num_external_tokens // self.size
        assert num_external_tokens % self.size == 0 and count <= len(hashes)
        first = request.block_hashes.index(hashes[0])
        pages = [block.block_id for block in blocks.blocks[0]][first : first + count]
        fails_from = None
        if self.rng.random() < self.chances.failing:
            fails_from = self.rng.randrange(count) if self.rng.random() < self.chances.partly else 0
        self.planned.append(LoadOfPages(request.request_id, hashes[:count], pages, between_steps, fails_from))
        self.parked += between_steps

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        planned, self.planned = self.planned, []
        return Loads(planned)

    # --- worker ---

    def run(self, metadata: Loads, kv: dict[int, list[int]]) -> KVConnectorOutput:
        """Load KV for this step, and end some loads of earlier steps. Pages that failed hold garbage."""
        output = KVConnectorOutput()
        for load in metadata.loads:
            for page in load.pages:
                kv[page] = [GARBAGE] * self.size
            if load.between_steps:
                self.under_way.append(load)
            else:
                self._end(load, kv, output)
        for load in [*self.under_way]:
            if self.rng.random() >= self.chances.slow:
                self.under_way.remove(load)
                self._end(load, kv, output)
                output.finished_recving = {*(output.finished_recving or ()), load.name}
        return output

    def _end(self, load: LoadOfPages, kv: dict[int, list[int]], output: KVConnectorOutput) -> None:
        good = len(load.pages) if load.fails_from is None else load.fails_from
        for number, (block_hash, page) in enumerate(zip(load.hashes, load.pages, strict=True)):
            if number < good and block_hash in self.kept:
                kv[page] = list(self.kept[block_hash])
            else:
                output.invalid_block_ids.add(page)
        self.loaded += not output.invalid_block_ids
        self.failures += bool(output.invalid_block_ids)

    def keep(self, kv: dict[int, list[int]]) -> None:
        """Keep all pages that have a name, and lose some that it kept before."""
        for block_hash in [each for each in self.kept if self.rng.random() < self.chances.lost]:
            del self.kept[block_hash]
        for block in self.pool.blocks:
            content = kv.get(block.block_id, [])
            if block.block_hash is not None and len(content) == self.size and GARBAGE not in content:
                self.kept[get_block_hash(block.block_hash)] = list(content)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class SimulatedOffloading(OffloadingConnector):
    """Copies as vLLM's worker does: a store begins with the next step, and copies end with any later step."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.rng, self.slow = random.Random(extra["seed"]), extra["slow"]
        self.size = vllm_config.cache_config.block_size
        self.kept: dict[int, list[int]] = {}  # the KV of a page in host memory
        self.last: dict[int, TransferJob] = {}  # stores of the last step
        self.under_way: dict[int, TransferJob] = {}
        self.loaded = self.stored = self.parked = self.flushed = 0

    def run(self, metadata: OffloadingConnectorMetadata, kv: dict[int, list[int]]) -> KVConnectorOutput:
        """End the copies that this step must wait for, and some others. Pages that wait for a load hold garbage."""
        awaited = metadata.jobs_to_flush or set()
        stores, loads = dict(metadata.store_jobs), metadata.load_jobs
        self.under_way |= self.last | {number: stores.pop(number) for number in awaited & stores.keys()}
        self.last = stores
        told, received = OffloadingWorkerMetadata(), set()
        for number in awaited & self.under_way.keys():
            self._end(number, kv, told)
            self.flushed += 1
        for number, load in loads.items():
            self.under_way[number] = load
            kv.update((page, [GARBAGE] * self.size) for page in load.dst_spec.block_ids.tolist())
            if getattr(load, "sync", False):  # from vLLM 0.33 on
                self._end(number, kv, told)
        for number, job in [*self.under_way.items()]:
            if self.rng.random() >= self.slow:
                self._end(number, kv, told)
                received |= {job.req_id} if isinstance(job.dst_spec, GPULoadStoreSpec) else set()
        self.parked += len(received)
        return KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=told)

    def _end(self, number: int, kv: dict[int, list[int]], told: OffloadingWorkerMetadata) -> None:
        job = self.under_way.pop(number)
        to_device = isinstance(job.dst_spec, GPULoadStoreSpec)
        source, target = (self.kept, kv) if to_device else (kv, self.kept)
        pairs = zip(job.src_spec.block_ids.tolist(), job.dst_spec.block_ids.tolist(), strict=True)
        target.update((there, list(source[here])) for here, there in pairs)
        self.loaded += to_device
        self.stored += not to_device
        told.mark_completed(number)

    def keep(self, kv: dict[int, list[int]]) -> None: ...


class PlainWorker(OffloadingWorker):
    """Copy between tensors on the CPU, where vLLM has no worker. A copy ends with every second step on average."""

    def __init__(self, kv_caches: Any, places: int) -> None:
        self._device = [each.tensor.view(torch.int8) for each in kv_caches.tensors]
        self._host = [torch.zeros(places, *each.shape[1:], dtype=torch.int8) for each in self._device]
        self._jobs: dict[int, tuple[Any, Any]] = {}
        self._ended: list[TransferResult] = []
        self._rng = random.Random(0)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = src_spec, dst_spec
        return True

    submit_load = submit_store

    def get_finished(self) -> list[TransferResult]:
        self.wait({number for number in self._jobs if self._rng.random() < 0.5})
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        for number in job_ids & self._jobs.keys():
            src, dst = self._jobs.pop(number)
            to_device = isinstance(dst, GPULoadStoreSpec)
            sources, targets = (self._host, self._device) if to_device else (self._device, self._host)
            for source, target in zip(sources, targets, strict=True):
                target[dst.block_ids.tolist()] = source[src.block_ids.tolist()]
            self._ended.append(TransferResult(number, True))
