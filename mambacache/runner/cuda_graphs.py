"""Run decode steps as CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from mambacache.kernels import StateIndices, StatePool
from mambacache.models.adapt import Model
from mambacache.plan import StepPlan, layout, pad
from mambacache.runner.sampler import likeliest_tokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeGraph:
    """Holds a captured model, with `logits` [rows * width, vocabulary] and `likeliest` [rows * width]."""

    rows: int
    width: int
    graph: torch.cuda.CUDAGraph
    indices: StateIndices
    logits: torch.Tensor
    likeliest: torch.Tensor

    def replay(self, indices: StateIndices) -> tuple[torch.Tensor, torch.Tensor]:
        flat = indices.flat[: len(self.indices.flat)]
        self.indices.flat[: len(flat)].copy_(flat)
        self.graph.replay()
        return self.logits, self.likeliest


class DecodeGraphs:
    """Holds graphs by rows and width, powers of 2 or the maximum."""

    def __init__(self, graphs: dict[tuple[int, int], DecodeGraph], max_pages: int) -> None:
        self._graphs, self._max_pages = graphs, max_pages
        self._rows, self._widths = ([*sorted(set(sizes))] for sizes in zip(*graphs, strict=True))

    @classmethod
    @torch.inference_mode()
    def capture(
        cls,
        model: Model,
        states: StatePool,
        logs: StatePool,
        pages: StatePool | None,
        max_rows: int,
        max_width: int,
        max_pages: int,
    ) -> DecodeGraphs | None:
        """Capture the model; None if a layer synchronises or memory runs out.

        In the first shape synchronising raises in all threads.
        """
        sizes, widths = ({1 << bits for bits in range(most.bit_length())} | {most} for most in (max_rows, max_width))
        shapes = sorted(((rows, width) for rows in sizes for width in widths), reverse=True)
        layers = (states.layers, logs.layers, pages.layers if pages is not None else [])
        graphs: dict[tuple[int, int], DecodeGraph] = {}
        pool, before = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
        stream = torch.cuda.Stream()  # torch's own belongs to the device of the first capture
        try:
            for rows, width in tqdm(shapes, desc="CUDA graphs", disable=None):
                indices = StateIndices.from_arrays(_padding(rows, width, max_pages), states.buffer.device)
                likeliest_tokens(model.logits(indices, *layers))  # kernels compile, libraries initialise
                if not graphs:
                    with _waits_raise():  # an error inside a capture leaves the stream broken
                        model.logits(indices, *layers)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    logits = model.logits(indices, *layers)
                    likeliest = likeliest_tokens(logits)
                graphs[rows, width] = DecodeGraph(rows, width, graph, indices, logits, likeliest)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            logger.warning("decode steps run without CUDA graphs, as the model could not be captured: %s", reason)
            torch.cuda.set_stream(before)
            return None
        return cls(graphs, max_pages)

    def fitting(self, plan: StepPlan) -> DecodeGraph | None:
        """Return the smallest fitting graph."""
        rows = next((rows for rows in self._rows if rows >= plan.num_decodes), None)
        width = next((width for width in self._widths if width >= plan.tokens_per_decode), None)
        if rows is None or width is None or len(plan.steps) > plan.num_decodes:
            return None
        num_pages = plan.arrays["block_table"].size if "block_table" in plan.arrays else 0
        return self._graphs[rows, width] if num_pages <= rows * self._max_pages else None


@contextmanager
def _waits_raise() -> Iterator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _padding(rows: int, width: int, max_pages: int) -> dict[str, np.ndarray]:
    none = np.zeros(0, np.int32)
    arrays = {**layout((), 0), "tokens": none, "positions": none}
    if max_pages:
        arrays |= {"kv_slot": none, "kv_len": none, "block_table_start": np.zeros(1, np.int32)}
        arrays["block_table"] = np.zeros(rows * max_pages, np.int32)
    arrays = pad(StepPlan((), 0, 1, arrays), rows, width).arrays
    if max_pages:
        arrays["block_table_start"][-1] = rows * max_pages
    return arrays
