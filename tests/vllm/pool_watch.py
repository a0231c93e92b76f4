"""Watch the pool of states of a vLLM in this process: the writes of every step, and the blocks left at the end."""

from __future__ import annotations

from typing import Any

import torch

from mambacache.plan import SequenceStep

NAN = 0xFF
"""Bytes of this value make NaN in every dtype."""


class PoolWatch:
    """Fill the pool with NaN, and compare all of it before and after each step.

    The scheduler's rows say which blocks a step may write, not the message to the workers.

    Args:
        core: the engine core.

    Attributes:
        mixed: steps with rows of both kinds.
        most_rows: the most rows in one step.
        loaded: states that came back from host memory.
    """

    def __init__(self, core: Any) -> None:
        self.mixed = self.most_rows = self.loaded = 0
        self._core = core
        worker = core.model_executor.driver_worker.worker
        self._states = worker.step_context
        self._slabs = self._states.pool.buffer.view(-1, self._states.pool.block_bytes)
        self._slabs.fill_(NAN)
        self._planned: tuple[SequenceStep, ...] = ()
        self._issued, core.scheduler.prefix_cache.issued = core.scheduler.prefix_cache.issued, self._note
        self._execute, worker.execute_model = worker.execute_model, self._watched

    def _note(self, rows: tuple[SequenceStep, ...]) -> None:
        self._planned = rows  # schedule() issues the rows of its own step last
        self._issued(rows)

    def _watched(self, output: Any, *args: Any, **kwargs: Any) -> Any:
        rows, self._planned = self._planned, ()
        scheduled = output.num_scheduled_tokens
        told = {row.request_id: row.num_tokens for row in rows}  # the other requests add a token to their logs
        assert told.items() <= scheduled.items() and all(
            scheduled[name] == 1 for name in scheduled.keys() - told.keys()
        )
        written = sorted({block for row in rows for block in (row.dst, *row.checkpoints.values())} - {0})
        assert len(written) == sum(bool(row.dst) + len(row.checkpoints) for row in rows), "two rows write one block"
        fresh = [block for block in written if block not in {row.src for row in rows}]
        self._slabs[fresh] = NAN
        before = self._slabs.clone()
        result = self._execute(output, *args, **kwargs)
        loaded = [block for each in output.mambacache_transfers if not each.to_host for block, _ in each.states]
        self.loaded += len(loaded)
        changed = (before.view(torch.int64) != self._slabs.view(torch.int64)).any(1).nonzero().flatten().tolist()
        assert set(changed) <= {*written, *loaded}, f"blocks {changed} changed in a step that writes {written}"
        for tensor in (tensor for layer in self._states.pool.layers for tensor in layer):
            assert tensor[written + loaded].isfinite().all(), f"a block of {written} was not written, or from NaN"
        self.mixed += 0 < sum(row.prefill for row in rows) < len(scheduled)
        self.most_rows = max(self.most_rows, len(scheduled))
        return result

    def check_idle(self) -> None:
        """Check that no request has left anything, in scheduler or worker."""
        scheduler = self._core.scheduler
        while scheduler.has_requests() or self._core.batch_queue:  # workers still learn which requests have gone
            self._core.step_fn()
        states = scheduler.prefix_cache
        if scheduler._copies is not None:
            scheduler._copies.end()
        states.check()
        assert states.request_ids == [] and not scheduler.requests
        blocks = states.stats.state_blocks
        assert blocks["writing"] == 0 and blocks["committed"] == blocks["evictable"], blocks
        pages = scheduler.kv_cache_manager.block_pool
        assert pages.get_num_free_blocks() == pages.num_gpu_blocks - 1
        assert self._states._receiver.rows == {} == scheduler._sender._sent
