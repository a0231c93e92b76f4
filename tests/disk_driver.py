"""Engines that are restarted on a directory of files, one after the other, and what they are asked."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from engine_driver import Engines, ask, greedy, hits, tokens_of
from mambacache import LLM

SMALL: dict[str, Any] = {"num_checkpoints": 2, "num_kv_blocks": 12, "max_num_seqs": 2}
PROMPTS = [tokens_of(seed, 150 + seed) for seed in range(5)]
HIT = [128] * len(PROMPTS)
MISS = [0] * len(PROMPTS)


class Restarts:
    """Starts an engine on a directory, the one before it having been closed."""

    def __init__(self, engine: Engines, path: Path) -> None:
        self.path = path
        self._engine = engine
        self._running: list[LLM] = []
        self._pools: list[Any] = []  # so that no other one lies at the same place, as far as it is watched

    def close(self) -> None:
        while self._running:
            self._running.pop().close()

    def __call__(self, model: str | Path = "qwen3_next", **options: Any) -> LLM:
        self.close()
        llm = self._engine(model, **{"host_cache_bytes": 1 << 26, "disk_cache_dir": self.path, **options})
        self._running.append(llm)
        self._pools.append((llm.runner.states, llm.runner.pages))
        return llm

    def files(self) -> list[Path]:
        """Of states and pages."""
        return [path for path in self.path.iterdir() if path.name not in ("lock", "epoch")]

    def __enter__(self) -> Restarts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        assert error is not None or not is_thread_there()


def is_thread_there() -> bool:
    """Whether the thread that reads and writes files runs."""
    return any(thread.name == "mambacache files" for thread in threading.enumerate())


def ask_all(llm: LLM, **params: Any) -> list[int]:
    """The hits of all prompts, one after the other."""
    return hits(ask(llm, PROMPTS, greedy(4, **params), together=False))
