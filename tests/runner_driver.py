"""Drive a model by hand-made plans, without cache or scheduler, on blocks of a shuffled pool full of NaN."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from mambacache.kernels import StateIndices, StatePool
from mambacache.models.adapt import Model
from mambacache.plan import CHUNK, FOLD, SequenceStep, StepPlan
from mambacache.runner.kv_pages import allocate_kv_pages
from mambacache.runner.model_runner import ModelRunner, RowOutput
from mambacache.runner.sampler import RowSampling

NUM_LOGS = 16


@dataclass
class Request:
    """Hold a running sequence: its tokens, and the places of its KV and of its state after `computed` tokens."""

    tokens: list[int]
    kv_blocks: list[int]
    computed: int = 0
    state: int = 0
    log_slot: int = 0
    log_start: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)  # position -> block


@dataclass
class Row:
    """Describe a request's row in one step.

    The row prefills `num_tokens`, or decodes one token and verifies `drafts` up to the next multiple of 16.
    """

    request: Request
    num_tokens: int = 0
    drafts: tuple[int, ...] | None = None
    checkpoints: Sequence[int] = ()
    all_logits: bool = False

    @property
    def prefill(self) -> bool:
        return self.drafts is None

    @property
    def tokens(self) -> list[int]:
        start, known = self.request.computed, self.request.tokens
        if self.drafts is None:
            return known[start : start + self.num_tokens]
        return [known[start], *self.drafts[: FOLD - 1 - start % FOLD]]


class Driver:
    """Run rows of requests on a model with pools of its own."""

    def __init__(
        self,
        model: Model,
        *,
        num_state_blocks: int = 40,
        num_kv_blocks: int = 80,
        block_size: int = CHUNK,
        state_dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.block_size = block_size
        device = model.module.device
        states = StatePool(model.state_layers(state_dtype), num_state_blocks, device)
        logs = StatePool(model.log_layers(state_dtype), NUM_LOGS, device)
        pages = allocate_kv_pages(model.kv_layers, num_kv_blocks, block_size, device)
        for pool in filter(None, (states, logs, pages)):
            pool.buffer.fill_(0xFF)  # NaN in every dtype; between tensors too, so that pools compare as a whole
        self.runner = ModelRunner(model, states, logs, pages)
        self.free_states = list(range(1, num_state_blocks + 1))
        self.free_kv = list(range(1, num_kv_blocks + 1))
        self.free_logs = list(range(1, NUM_LOGS + 1))
        shuffle = random.Random(seed)
        shuffle.shuffle(self.free_logs)
        shuffle.shuffle(self.free_states)
        shuffle.shuffle(self.free_kv)

    def add(self, tokens: Sequence[int]) -> Request:
        """Return a request with no token computed."""
        return Request(list(tokens), [])

    def resume(self, other: Request, position: int, suffix: Sequence[int]) -> Request:
        """Return a request that shares the tokens, KV and checkpoint of `other` up to `position`, and continues with
        `suffix`."""
        block = other.checkpoints[position]
        shared = other.kv_blocks[: position // self.block_size]
        return Request([*other.tokens[:position], *suffix], list(shared), position, block)

    def plan(self, rows: Sequence[Row]) -> StepPlan:
        """Plan one step of these rows, decode rows first, and take dst blocks and KV blocks for them."""
        return build_plan(rows, [self._step(row) for row in rows], self.block_size)

    def advance(self, rows: Sequence[Row], plan: StepPlan, accepted: Sequence[int] | None = None) -> None:
        """Move the requests on. Decode row i keeps `accepted[i]` tokens, or all of them without `accepted`."""
        for i, (row, step) in enumerate(zip(rows, plan.steps, strict=True)):
            request, count = row.request, step.num_tokens
            if not row.prefill and accepted is not None:
                count = accepted[i]
            if row.drafts:
                request.tokens[request.computed + 1 : request.computed + count] = row.drafts[: count - 1]
            request.computed += count
            unused = step.dst
            if step.dst and count == step.num_tokens:
                unused, request.state = request.state, step.dst
                request.log_start = request.computed % FOLD
                if request.computed % CHUNK == 0:
                    request.checkpoints[request.computed] = step.dst
            request.checkpoints |= step.checkpoints
            self.free_states += {unused} - {*request.checkpoints.values(), 0}

    def logits(self, rows: Sequence[Row], accepted: Sequence[int] | None = None) -> torch.Tensor:
        """Run a step, and return the logits [L, vocabulary] after the wanted tokens."""
        plan = self.plan(rows)
        indices = StateIndices.from_arrays(plan.arrays, self.runner.model.module.device)
        pages = self.runner.pages.layers if self.runner.pages is not None else []
        logits = self.runner.model.logits(indices, self.runner.states.layers, self.runner.logs.layers, pages)
        self.advance(rows, plan, accepted)
        return logits.cpu()

    def execute(self, rows: Sequence[Row], sampling: Sequence[RowSampling]) -> list[RowOutput]:
        plan = self.plan(rows)
        outputs = self.runner.launch(plan, sampling).read()
        self.advance(rows, plan)
        return outputs

    def _step(self, row: Row) -> SequenceStep:
        request, start = row.request, row.request.computed
        end = start + len(row.tokens)
        while len(request.kv_blocks) * self.block_size < end:
            request.kv_blocks.append(self.free_kv.pop())
        if not row.prefill and not request.log_slot:
            request.log_slot = self.free_logs.pop()
        return SequenceStep(
            request_id=str(id(request)),
            residency=1,
            row=0,
            start=start,
            num_tokens=end - start,
            prefill=row.prefill,
            samples=True if not row.prefill else end == len(request.tokens),
            src=request.state,
            dst=self.free_states.pop() if row.prefill or end % FOLD == 0 else 0,
            log_slot=request.log_slot,
            log_start=request.log_start,
            drafts=tuple(row.tokens[1:]) if not row.prefill else (),
            checkpoints={position: self.free_states.pop() for position in row.checkpoints if position < end},
        )


def build_plan(rows: Sequence[Row], steps: Sequence[SequenceStep], block_size: int) -> StepPlan:
    """Return the plan of a step, decode rows first."""
    decodes = [step for step in steps if not step.prefill]
    prefills = [step for step in steps if step.prefill]
    assert list(steps) == decodes + prefills
    per_row = max((step.num_tokens for step in decodes), default=1)
    flat_start = [i * per_row for i in range(len(decodes))]
    query_start = np.cumsum([len(decodes) * per_row, *(step.num_tokens for step in prefills)])
    flat_start += query_start[:-1].tolist()
    size = int(query_start[-1])
    tokens, positions, kv_slot = np.zeros(size), np.zeros(size), np.full(size, -1)
    tables = [row.request.kv_blocks for row in rows]
    wanted: list[int] = []
    for row, step, first in zip(rows, steps, flat_start, strict=True):
        where = np.arange(first, first + step.num_tokens)
        blocks = np.array(row.request.kv_blocks)
        at = np.arange(step.start, step.start + step.num_tokens)
        tokens[where], positions[where] = row.tokens, at
        kv_slot[where] = blocks[at // block_size] * block_size + at % block_size
        wanted += where.tolist() if row.all_logits or not step.prefill else where[-1:].tolist() * step.samples
    arrays = {
        "decode_src": [step.src for step in decodes],
        "decode_dst": [step.dst for step in decodes],
        "log_slot": [step.log_slot for step in decodes],
        "log_start": [step.log_start for step in decodes],
        "log_end": [step.start % FOLD for step in decodes],
        "decode_len": [step.num_tokens for step in decodes],
        "late_len": [0 for _ in decodes],
        "query_start_loc": query_start,
        "context_len": [step.start for step in prefills],
        "src": [step.src for step in prefills],
        **_chunks(prefills, query_start.tolist()),
        "tokens": tokens,
        "positions": positions,
        "kv_slot": kv_slot,
        "block_table": [block for table in tables for block in table],
        "block_table_start": np.cumsum([0, *map(len, tables)]),
        "kv_len": [step.start + step.num_tokens for step in steps],
        "logits_index": wanted,
    }
    return StepPlan(
        tuple(steps), len(decodes), per_row, {name: np.asarray(x, dtype=np.int32) for name, x in arrays.items()}
    )


def _chunks(prefills: Sequence[SequenceStep], query_start: Sequence[int]) -> dict[str, list[int]]:
    """Return the chunk table: rows cut at absolute multiples of 64."""
    table: dict[str, list[int]] = {"chunk_seq": [], "chunk_start": [], "chunk_dst": [], "seq_chunk_start": [0]}
    for i, step in enumerate(prefills):
        position, end = step.start, step.start + step.num_tokens
        while position < end:
            following = min(end, (position // CHUNK + 1) * CHUNK)
            table["chunk_seq"].append(i)
            table["chunk_start"].append(query_start[i] + position - step.start)
            table["chunk_dst"].append(step.dst if following == end else step.checkpoints.get(following, 0))
            position = following
        table["seq_chunk_start"].append(len(table["chunk_seq"]))
    return table
