"""Show counters in vLLM's /metrics: the scheduler writes a file, and the front end reads it.

With several API servers prometheus_client adds up counts without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.report import Loss
from mambacache.vllm.log import logger
from mambacache.vllm.private_files import folder_of, made_folder_of, remove, remove_left

SECONDS = 1.0
TOTALS = {
    "prompt_tokens": "Prompt tokens of requests that began to run.",
    "hit_tokens": "Prompt tokens that were not computed.",
    "ceiling_tokens": "Prompt tokens that had been computed before.",
}


class Counters:
    """Writes the scheduler's counters."""

    def __init__(self, vllm_config: Any) -> None:
        self._instance_id = vllm_config.instance_id
        self._name = f"{vllm_config.parallel_config.data_parallel_index}.prom"
        self._registry = CollectorRegistry()
        labels = {
            "model_name": vllm_config.model_config.served_model_name,
            "engine": str(vllm_config.parallel_config.data_parallel_index),
        }

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(f"mambacache:{name}", text, [*labels, *more], registry=self._registry)

        lost = counter("lost_tokens", "Prompt tokens that were computed again, by reason.", "reason")
        self._counters = {name: counter(name, text).labels(**labels) for name, text in TOTALS.items()}
        self._counters |= {reason: lost.labels(**labels, reason=reason) for reason in Loss}
        self._told = dict.fromkeys(self._counters, 0)
        self._left: dict[str, int] = {}  # in the file
        self._written = 0.0
        self._warned = False

    def tell(self, prefix_cache: PrefixCache, *, idle: bool) -> None:
        """Write changed counters, at most once a second unless `idle`."""
        now = time.monotonic()
        if not idle and now - self._written < SECONDS:
            return
        self._written, stats = now, prefix_cache.stats
        values = {name: getattr(stats, name) for name in TOTALS} | stats.losses
        if values == self._left:
            return
        for name, value in values.items():
            self._counters[name].inc(value - self._told[name])
        self._told = values
        try:
            made_folder_of(self._instance_id).write(self._name, generate_latest(self._registry))
            self._left = values
        except OSError as error:  # must not end the engine
            if not self._warned:
                logger.warning("mambacache: /metrics has no new counters (%s): set TMPDIR to another folder", error)
            self._warned = True


class Shown:
    """Reads all engines' counters."""

    instance_id = ""

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        with suppress(OSError):
            folder = folder_of(self.instance_id)
            for name in folder.names(".prom"):
                with suppress(OSError, ValueError, LookupError):
                    for found in [*text_string_to_metric_families(folder.read(name).decode())]:
                        family = families.setdefault(found.name, Metric(found.name, found.documentation, found.type))
                        family.samples += found.samples
        yield from families.values()


_shown = Shown()


def show(instance_id: str) -> None:
    """Show a vLLM's counters, and remove its files at exit."""
    registered, _shown.instance_id = bool(_shown.instance_id), instance_id
    if not registered:
        REGISTRY.register(_shown)
    with suppress(OSError):
        remove_left()
    Finalize(None, remove, (instance_id,), exitpriority=0)  # a forked process runs no atexit handlers
