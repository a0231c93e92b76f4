"""Make vLLM's ExampleConnector fail, and load between steps."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import safetensors.torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    ReqMeta,
)


class Load(NamedTuple):
    """Holds the load of a request's tokens from `first` on."""

    name: str
    first: int
    request: ReqMeta


@dataclass
class Loads(ExampleConnectorMetadata):
    loads: list[Load] = field(default_factory=list)


class FaultyExampleConnector(ExampleConnector):
    """Keeps KV in files. `between_steps` says when it loads them, and `failing` how often a load fails.

    A load that fails leaves noise in its pages, from any page on. It writes no page that a request found on the device.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        take = self._kv_transfer_config.get_from_extra_config
        self._between_steps, self._failing = take("between_steps", False), take("failing", 0.0)
        self._rng = random.Random(0)
        self._asked: dict[str, int] = {}
        self._loads: list[Load] = []
        self._bad: set[int] = set()
        self._ended: set[str] = set()
        self.failures = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._asked[request.request_id] = num_computed_tokens
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, bool(count) and self._between_steps

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            tokens, pages, first = request.prompt_token_ids, blocks.get_block_ids()[0], self._asked[request.request_id]
            pages = pages[: (first + num_external_tokens) // self._block_size]
            made = ReqMeta.make_meta(list(tokens), pages, self._block_size, False, [])
            self._loads.append(Load(request.request_id, first, made))

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._loads = self._loads, []
        return Loads(super().build_connector_meta(scheduler_output).requests, loads)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, Loads)
        self._loads += meta.loads
        for load in [*self._loads]:
            if not self._between_steps or self._rng.random() < 0.5:
                self._loads.remove(load)
                self._load(load, forward_context)
                self._ended |= {load.name} if self._between_steps else set()

    def _load(self, load: Load, forward_context: Any) -> None:
        request, slots = load.request, load.request.slot_mapping[load.first :]
        good = len(slots)
        if self._rng.random() < self._failing:
            good = self._rng.randrange(0, len(slots), self._block_size)
            self._bad |= set((slots[good:] // self._block_size).tolist())
            self.failures += 1
        for name, layer in forward_context.no_compile_layers.items():
            cache = getattr(layer, "kv_cache", None)
            file = self._generate_filename_debug(name, request.token_ids, request.mm_hashes)
            if cache is not None and os.path.exists(file):
                kept = safetensors.torch.load_file(file)["kv_cache"][load.first :][: len(slots)]
                kept[good:].normal_()
                cache[slots // self._block_size, :, slots % self._block_size] = kept

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        ended, self._ended = self._ended, set()
        return None, ended

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad
