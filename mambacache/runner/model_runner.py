"""Run step plans on a model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise

import numpy as np
import torch

from mambacache.config import SamplingParams
from mambacache.kernels import StatePool, compiling, keep_paths, pack_arrays
from mambacache.models.adapt import Model
from mambacache.plan import NULL_BLOCK, PageTables, SequenceStep, StepPlan, build_plan, pad
from mambacache.runner.cuda_graphs import DecodeGraphs
from mambacache.runner.device_batch import DeviceBatch
from mambacache.runner.ngram import Histories, Known
from mambacache.runner.sampler import RowSampling, likeliest_tokens, sample, score
from mambacache.warm_up import CompilerThreads

Logprobs = dict[int, float]
"""Log probabilities at a position: of its own token, then of the most likely tokens."""

Score = tuple[int, float, list[int], list[float]]
"""Token, log probability, most likely tokens, and theirs."""


@dataclass(slots=True)
class RowOutput:
    """Holds a batch row's results; `tokens` may be `NOT_FINITE`.

    A decode row has a sample behind each token, valid up to the first rejected draft; prefill has a sample for each
    seed.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: Sequence[Logprobs] = ()
    prompt_logprobs: Sequence[Logprobs] = ()


class Launched:
    """Holds a step in flight.

    Args:
        tokens: int32 [S], samples.
        scores: scored tokens int64 [K], then as `score` returns; or empty.
        counts: int64 [N], valid samples of decode rows; None unless the device drafts.
    """

    def __init__(
        self,
        plan: StepPlan,
        sampling: Sequence[RowSampling],
        batch: DeviceBatch,
        tokens: torch.Tensor,
        scores: Sequence[torch.Tensor],
        counts: torch.Tensor | None = None,
    ) -> None:
        self.tokens = tokens
        self._bounds = list(pairwise(accumulate(batch.samples, initial=0)))  # by row
        self.places = {step.residency: first for step, (first, _) in zip(plan.steps, self._bounds, strict=True)}
        self._sampling, self._batch, self._num_decodes = sampling, batch, plan.num_decodes
        self._drafts = counts is not None
        columns = [tokens, *([] if counts is None else [counts]), *scores]
        self._shapes = [column.shape for column in columns]
        bits = [x.view(torch.int32) if x.is_floating_point() else x.int() for x in columns]
        packed = tokens if len(bits) == 1 else torch.cat([x.flatten() for x in bits])
        self._results = packed.to("cpu", non_blocking=True)
        self._done = torch.cuda.Event() if tokens.is_cuda else None
        if self._done is not None:
            self._done.record()

    def read(self) -> list[RowOutput]:
        """Wait for the device."""
        if self._done is not None:
            self._done.synchronize()
        ends = np.cumsum([shape.numel() for shape in self._shapes])
        parts = np.split(self._results.numpy(), ends[:-1])
        tokens, *rest = (part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True))
        counts = rest.pop(0)[: self._num_decodes].tolist() if self._drafts else []
        columns = (column.view(np.float32) if i % 2 else column for i, column in enumerate(rest))
        scored = list(zip(*(column.tolist() for column in columns), strict=True))
        return self._by_rows(tokens.tolist(), counts, scored)

    def _by_rows(self, tokens: list[int], counts: list[int], scores: list[Score]) -> list[RowOutput]:
        """Split by row; scores of prompts come first."""
        kept = [end - first for first, end in self._bounds]
        kept[: len(counts)] = counts
        if not scores:
            return [
                RowOutput(tokens[first : first + count]) for (first, _), count in zip(self._bounds, kept, strict=True)
            ]
        num_prompts = len(self._batch.prompt_index)
        of_prompts, of_samples = iter(scores[:num_prompts]), iter(scores[num_prompts:])
        return [
            RowOutput(
                tokens[first : first + count],
                _take(of_samples, end - first, row.params.logprobs)[:count],
                _take(of_prompts, len(row.prompt_targets), row.params.prompt_logprobs),
            )
            for (first, end), count, row in zip(self._bounds, kept, self._sampling, strict=True)
        ]


class ModelRunner:
    def __init__(self, model: Model, states: StatePool, logs: StatePool, pages: StatePool | None) -> None:
        self.model = model
        self.states, self.logs = states, logs
        self.pages = pages
        self._graphs: DecodeGraphs | None = None
        self._histories: Histories | None = None

    def draft(self, max_model_len: int, max_draft_tokens: int, block_size: int) -> None:
        """Make drafts that later plans leave open."""
        slots, device = len(self.logs.slabs) - 1, self.states.buffer.device
        self._histories = Histories(slots, max_model_len, max_draft_tokens, device)
        self._block_size = block_size if self.pages is not None else None

    def capture(self, max_rows: int, max_draft_tokens: int, max_pages: int) -> None:
        """Capture decode steps in CUDA graphs, or warn and stay eager."""
        with torch.cuda.device_of(self.states.buffer):
            self._graphs = DecodeGraphs.capture(
                self.model, self.states, self.logs, self.pages, max_rows, max_draft_tokens + 1, max_pages
            )

    def warm_up(self, batches: Sequence[Sequence[SequenceStep]], block_size: int) -> None:
        """Run batches without states; a first run compiles kernels in parallel."""
        with torch.cuda.device_of(self.states.buffer):
            if self.states.buffer.is_cuda:
                with CompilerThreads() as threads, compiling(threads):
                    self._run(batches, block_size)
            self._run(batches, block_size)
        if self._histories is not None:
            self._histories.forget()

    def _run(self, batches: Sequence[Sequence[SequenceStep]], block_size: int) -> None:
        if any(step.drafts for steps in batches for step in steps):
            unmoved = torch.tensor([[0, 1] + [-1] * 7], dtype=torch.int32, device=self.states.buffer.device)
            for pool in filter(None, (self.logs, self.pages)):
                keep_paths(pool, unmoved)
        for steps in batches:
            counts = [-(-step.num_tokens // block_size) for step in steps]
            pages = PageTables([array("i", [NULL_BLOCK] * count) for count in counts], counts, [0] * len(steps))
            tokens = [array("i", bytes(4 * step.num_tokens)) for step in steps]
            plan = build_plan(steps, tokens, pages if self.pages is not None else None, block_size)
            self.launch(plan, [RowSampling(SamplingParams(temperature=0), (0,))] * len(steps)).read()

    @torch.inference_mode()
    def launch(
        self,
        plan: StepPlan,
        sampling: Sequence[RowSampling],
        unread: Launched | None = None,
        known: Known = lambda request_id: (),
    ) -> Launched:
        """Launch a step without waiting for the device.

        Args:
            unread: step before, if the plan lacks its tokens.
            known: returns a request's tokens, for drafts made on the device.
        """
        with torch.cuda.device_of(self.states.buffer):  # Triton launches on the current device
            pages = self.pages.layers if self.pages is not None else []
            for source, target in plan.kv_copies:
                for page in (page for layer in pages for page in layer):
                    page[target] = page[source]
            self._keep_paths(plan)
            graph = self._graphs.fitting(plan) if self._graphs is not None else None
            if graph is not None:
                plan = pad(plan, graph.rows, graph.width)
            places = unread.places if unread is not None else {}
            batch = DeviceBatch.build(plan, sampling, self.states.buffer.device, places)
            if unread is not None and len(batch.unknown):
                batch.indices.tokens[batch.unknown] = unread.tokens.index_select(0, batch.source).clamp_(min=0)
            histories, counts = self._histories if plan.num_decodes else None, None
            if histories is not None:
                begun = histories.begin(plan, batch.indices, known, self._block_size)
                batch.draw_late(begun.late)
            if graph is not None:
                logits, likeliest = graph.replay(batch.indices)
            else:
                logits = self.model.logits(batch.indices, self.states.layers, self.logs.layers, pages)
                likeliest = likeliest_tokens(logits)
            draws = batch.draw_index, batch.draw_parameters, batch.draw_groups
            tokens = sample(logits, likeliest, batch.sample_index, *draws, batch.adjustments)
            scores = _scores(logits, tokens, batch)
            if histories is not None:
                counts = histories.end(batch.indices, begun, tokens.long())
            return Launched(plan, sampling, batch, tokens, scores, counts)

    def finite(self, states: Sequence[int], pages: Sequence[int]) -> list[bool]:
        """Wait for the device; tell whether each state and KV page are finite."""
        sound = self.states.finite(states)
        if self.pages is None:
            return sound
        return [both[0] and both[1] for both in zip(sound, self.pages.finite(pages), strict=True)]

    def _keep_paths(self, plan: StepPlan) -> None:
        """Move accepted draft paths into place."""
        arrays = {"log": plan.log_paths, "kv": plan.kv_paths}
        paths = {name: array for name, array in arrays.items() if array is not None}
        moved = pack_arrays(paths, self.states.buffer.device) if paths else {}
        if "log" in moved:
            keep_paths(self.logs, moved["log"])
        if self.pages is not None and "kv" in moved:
            keep_paths(self.pages, moved["kv"])


def _scores(logits: torch.Tensor, tokens: torch.Tensor, batch: DeviceBatch) -> list[torch.Tensor]:
    if not len(batch.prompt_index) + len(batch.scored_samples):
        return []
    scored_at = torch.cat([batch.prompt_index, batch.sample_index[batch.scored_samples]])
    scored = torch.cat([batch.prompt_token, tokens[batch.scored_samples].clamp(min=0)]).long()
    return [scored, *score(logits[scored_at], scored, batch.num_top)]


def _take(scores: Iterator[Score], count: int, top: int | None) -> list[Logprobs]:
    if top is None:
        return []
    return [
        {token: logprob, **dict(zip(best[:top], best_logprobs[:top], strict=True))}
        for token, logprob, best, best_logprobs in islice(scores, count)
    ]
