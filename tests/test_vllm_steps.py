"""What a worker of the vLLM plugin makes of the scheduler's rows: needs no vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from mambacache.kernels import StateIndices
from mambacache.kernels.state_pool import StatePool, StateTensor
from mambacache.plan import SequenceStep, layout
from mambacache.vllm.rows import Receiver, Sender
from mambacache.vllm.step_context import StepContext


class Layer:
    """One tensor of state."""

    def state_tensors(self) -> list[StateTensor]:
        return [StateTensor((4,), torch.float32)]

    def bind_states(self, context: StepContext, views: tuple[torch.Tensor, ...]) -> None:
        self.context, self.views = context, views


def decode(name: str, src: int, dst: int, start: int = 70) -> SequenceStep:
    return SequenceStep(name, 1, 1, start, 1, False, True, src, src, 0, (dst,))


def prefill(name: str, start: int, num_tokens: int, src: int, dst: int, **checkpoints: int) -> SequenceStep:
    stored = {int(position[1:]): block for position, block in checkpoints.items()}
    return SequenceStep(name, 1, 1, start, num_tokens, True, True, src, src, 0, (dst,), (), stored)


def sent(sender: Sender, receiver: Receiver, steps: Sequence[SequenceStep], finished: Sequence[str] = ()) -> list[str]:
    """What travels; afterwards the worker's rows lay out as the scheduler's do."""
    columns = sender.columns(steps, finished)
    receiver.take(columns, finished)
    decodes = sum(not step.prefill for step in steps)
    mine = layout([receiver.rows[step.request_id] for step in steps], decodes)
    for name, array in layout(steps, decodes).items():
        np.testing.assert_array_equal(mine[name], array)
    return columns.names


def test_only_rows_that_changed_travel() -> None:
    sender, receiver = Sender(), Receiver()
    assert sent(sender, receiver, [prefill("a", 0, 130, 0, 3, p64=5, p128=6), prefill("b", 64, 7, 2, 4)]) == ["a", "b"]
    assert sent(sender, receiver, [decode("a", 3, 3), decode("b", 4, 4)]) == ["a", "b"]
    assert sent(sender, receiver, [decode("a", 3, 3, 71), decode("b", 4, 7)]) == ["b"]  # b goes on in a fresh block
    assert sent(sender, receiver, [decode("a", 3, 3, 72), decode("b", 7, 7)]) == ["b"]
    assert sent(sender, receiver, [decode("b", 7, 7)]) == []
    assert sent(sender, receiver, [decode("a", 3, 3), decode("b", 7, 7)], finished=["a"]) == ["a"]  # a new one
    assert sent(sender, receiver, [prefill("b", 0, 9, 0, 7)]) == ["b"]  # preempted, and admitted again
    assert sent(sender, receiver, [decode("b", 7, 7)]) == ["b"]
    sender.columns([], ["a", "b"])
    receiver.take(sender.columns([], ["a", "b"]), ["a", "b"])
    assert not receiver.rows and not sender._sent


@pytest.fixture
def context() -> StepContext:
    layers = [Layer(), Layer()]
    return StepContext(layers, StatePool([layer.state_tensors() for layer in layers], 8), 4)


def decode_rows(indices: StateIndices) -> list[tuple[int, int, int]]:
    return [
        (src, dst, length)
        for src, dst, length in zip(
            indices.decode_src.tolist(), indices.decode_dst[:, 0].tolist(), indices.decode_len.tolist(), strict=True
        )
    ]


def test_decode_buffers_follow_the_rows_and_their_order(context: StepContext) -> None:
    sender = Sender()

    def run(steps: list[SequenceStep], names: list[str], padded_rows: int | None) -> StateIndices:
        context.receive(sender.columns(steps, []), [])
        context.begin(names, padded_rows)
        indices = context.indices(len(names) if padded_rows is None else padded_rows)
        context.end()
        return indices

    both = [decode("a", 3, 3), decode("b", 4, 4)]
    captured = run(both, ["a", "b"], 4)
    assert decode_rows(captured) == [(3, 3, 1), (4, 4, 1), (0, 0, 0), (0, 0, 0)]
    assert run(both, ["a", "b"], 4) is captured  # nothing changed
    assert run(both, ["b", "a"], 4) is captured and decode_rows(captured)[:2] == [(4, 4, 1), (3, 3, 1)]
    run([decode("a", 3, 5), decode("b", 4, 4)], ["a", "b"], None)  # beside a prefill, say: not in the buffers
    assert run([decode("a", 5, 5), decode("b", 4, 4)], ["b", "a"], 4) is captured
    assert decode_rows(captured)[:2] == [(4, 4, 1), (5, 5, 1)]
    context.begin(["dummy"], 4)  # a dummy batch between steps
    assert decode_rows(context.indices(4)) == [(0, 0, 0)] * 4
    assert run([decode("a", 5, 5), decode("b", 4, 4)], ["b", "a"], 4) is captured
    assert decode_rows(captured)[:2] == [(4, 4, 1), (5, 5, 1)]


def test_runs_without_a_plan_store_nothing(context: StepContext) -> None:
    context.receive(None, [])
    context.begin(["dummy"])
    indices = context.indices(150)
    assert indices.num_tokens == 150 and indices.num_prefills == 1
    assert indices.src.tolist() == [0] and not indices.chunk_dst.any()


def test_a_row_that_did_not_travel_is_no_silence(context: StepContext) -> None:
    context.receive(Sender().columns([decode("a", 3, 3)], []), [])
    with pytest.raises(KeyError):
        context.begin(["a", "b"])
