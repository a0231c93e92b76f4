"""Check the rows that a worker of the vLLM plugin makes from the scheduler's rows. The tests need no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from mambacache.kernels import DecodeBuffers, StateIndices, place_decodes
from mambacache.kernels.state_pool import StatePool, StateTensor
from mambacache.plan import DECODE_ARRAYS, SequenceStep, layout
from mambacache.vllm.rows import Receiver, Sender
from mambacache.vllm.step_context import StepContext


class Layer:
    """One tensor of state."""

    def state_tensors(self) -> list[StateTensor]:
        return [StateTensor((4,), torch.float32)]

    def bind_states(
        self, context: StepContext, states: tuple[torch.Tensor, ...], logs: tuple[torch.Tensor, ...]
    ) -> None:
        self.context, self.states, self.logs = context, states, logs


SLOTS = {"a": 1, "b": 2}


def decode(name: str, src: int, dst: int, start: int, log_start: int = 6) -> SequenceStep:
    return SequenceStep(name, 1, 1, start, 1, False, True, src, dst, SLOTS[name], log_start)


def prefill(name: str, start: int, num_tokens: int, src: int, dst: int, **checkpoints: int) -> SequenceStep:
    stored = {int(position[1:]): block for position, block in checkpoints.items()}
    return SequenceStep(name, 1, 1, start, num_tokens, True, True, src, dst, checkpoints=stored)


def sent(sender: Sender, receiver: Receiver, steps: Sequence[SequenceStep], finished: Sequence[str] = ()) -> list[str]:
    """Send steps, check that the worker's rows lay out as the scheduler's do, and return the names that were sent."""
    columns = sender.columns(steps, finished)
    receiver.take(columns, finished)
    decodes = sum(not step.prefill for step in steps)
    mine = layout([receiver.row(step.request_id) for step in steps], decodes)
    for name, array in layout(steps, decodes).items():
        np.testing.assert_array_equal(mine[name], array)
    return columns.names


def test_only_rows_that_changed_travel() -> None:
    sender, receiver = Sender(), Receiver()
    assert sent(sender, receiver, [prefill("a", 0, 130, 0, 3, p64=5, p128=6), prefill("b", 64, 7, 2, 4)]) == ["a", "b"]
    assert sent(sender, receiver, [decode("a", 3, 0, 130, 2), decode("b", 4, 0, 71, 7)]) == ["a", "b"]
    assert sent(sender, receiver, [decode("a", 3, 0, 131, 2), decode("b", 4, 0, 72, 7)]) == []
    assert sent(sender, receiver, [decode("a", 3, 0, 132, 2)]) == []
    assert sent(sender, receiver, [decode("a", 3, 0, 133, 2), decode("b", 4, 0, 73, 7)]) == ["b"]  # it had paused
    for position in range(74, 79):
        assert sent(sender, receiver, [decode("b", 4, 0, position, 7)]) == []
    assert sent(sender, receiver, [decode("b", 4, 7, 79, 7)]) == ["b"]  # folds into a fresh block
    assert sent(sender, receiver, [decode("b", 7, 0, 80, 0)]) == []  # goes on from there
    for position in range(81, 95):
        assert sent(sender, receiver, [decode("b", 7, 0, position, 0)]) == []
    assert sent(sender, receiver, [decode("b", 7, 7, 95, 0)]) == ["b"]  # and in place
    assert sent(sender, receiver, [decode("b", 7, 0, 96, 0)]) == []
    both = [decode("a", 3, 0, 134, 2), decode("b", 7, 0, 97, 0)]
    assert sent(sender, receiver, both, finished=["a"]) == ["a"]  # a new one
    assert sent(sender, receiver, [prefill("b", 0, 9, 0, 7)]) == ["b"]  # preempted, and admitted again
    assert sent(sender, receiver, [decode("b", 7, 0, 9, 9)]) == ["b"]
    late = decode("b", 7, 8, 10, 9)._replace(unplaced_by=1)
    assert sent(sender, receiver, [late]) == ["b"]
    assert sent(sender, receiver, [late._replace(start=11)]) == []  # folds into the same block, if it does
    sender.columns([], ["a", "b"])
    receiver.take(sender.columns([], ["a", "b"]), ["a", "b"])
    assert not receiver.rows and not sender._sent


@pytest.fixture
def context() -> StepContext:
    layers = [Layer(), Layer()]
    states, logs = (StatePool([layer.state_tensors() for layer in layers], count) for count in (8, 4))
    return StepContext(layers, states, logs, 4)


def decode_rows(indices: StateIndices) -> list[tuple[int, ...]]:
    """src, dst, slot, first entry, the one of the row's token, and how many it has."""
    names = "decode_src", "decode_dst", "log_slot", "log_start", "log_end", "decode_len"
    return list(zip(*(getattr(indices, name).tolist() for name in names), strict=True))


def ones(names: list[str]) -> np.ndarray:
    """Rows of one token."""
    return np.ones(len(names), np.int64)


def test_decode_buffers_follow_the_rows_and_their_order(context: StepContext) -> None:
    sender, padding = Sender(), (0,) * 6

    def run(steps: list[SequenceStep], names: list[str], padded_rows: int | None) -> StateIndices:
        context.receive(sender.columns(steps, []), [])
        context.begin(names, ones(names), None if padded_rows is None else (padded_rows, padded_rows))
        indices = context.indices(len(names) if padded_rows is None else padded_rows)
        context.end()
        return indices

    for _ in range(2):  # as graphs are captured
        context.begin([], ones([]), (4, 4))
        assert decode_rows(context.indices(4)) == [padding] * 4
    captured = run([decode("a", 3, 0, 70), decode("b", 4, 0, 73)], ["a", "b"], 4)
    assert decode_rows(captured) == [(3, 0, 1, 6, 6, 1), (4, 0, 2, 6, 9, 1), padding, padding]
    assert run([decode("a", 3, 0, 71), decode("b", 4, 0, 74)], ["a", "b"], 4) is captured  # nothing travelled
    assert decode_rows(captured)[:2] == [(3, 0, 1, 6, 7, 1), (4, 0, 2, 6, 10, 1)]
    assert run([decode("a", 3, 0, 72), decode("b", 4, 0, 75)], ["b", "a"], 4) is captured
    assert decode_rows(captured)[:2] == [(4, 0, 2, 6, 11, 1), (3, 0, 1, 6, 8, 1)]
    run([decode("a", 3, 0, 73), decode("b", 4, 0, 76)], ["a", "b"], None)  # beside a prefill, say: not in the buffers
    assert run([decode("a", 3, 0, 74), decode("b", 4, 0, 77)], ["b", "a"], 4) is captured
    assert decode_rows(captured)[:2] == [(4, 0, 2, 6, 13, 1), (3, 0, 1, 6, 10, 1)]
    context.begin(["dummy"], ones(["dummy"]), (4, 4))  # a dummy batch between steps
    assert decode_rows(context.indices(4)) == [padding] * 4
    run([decode("a", 3, 0, 75), decode("b", 4, 0, 78)], ["b", "a"], 4)
    run([decode("a", 3, 0, 76), decode("b", 4, 5, 79)], ["b", "a"], 4)
    assert decode_rows(captured)[:2] == [(4, 5, 2, 6, 15, 1), (3, 0, 1, 6, 12, 1)]
    assert captured.folds.tolist()[:6] == [1, 4, 5, 2, 6, 16]
    run([decode("a", 3, 0, 77), decode("b", 5, 0, 80, 0)], ["b", "a"], 4)
    assert decode_rows(captured)[:2] == [(5, 0, 2, 0, 0, 1), (3, 0, 1, 6, 13, 1)] and captured.folds[0] == 0
    late = decode("b", 5, 6, 81, 0)._replace(unplaced_by=1)
    for step in range(2):
        run([decode("a", 3, 0, 78 + step), late._replace(start=81 + step)], ["b", "a"], 4)
        assert decode_rows(captured)[:2] == [(5, 6, 2, 0, 1 + step, 1), (3, 0, 1, 6, 14 + step, 1)]


def test_decode_buffers_are_filled_where_rows_may_have_changed(context: StepContext, monkeypatch: Any) -> None:
    """Check that a step copies nothing if every row moved on by a token. A step after a fold, after other widths or
    after late rows does copy."""
    sender, fills = Sender(), list[int]()
    fill = DecodeBuffers.fill
    monkeypatch.setattr(DecodeBuffers, "fill", lambda *args: fills.append(1) or fill(*args))
    positions = torch.tensor([72, 0, 0, 0], dtype=torch.int64)

    def run(step: SequenceStep, width: int = 1) -> int:
        fills.clear()
        context.receive(sender.columns([step], []), [])
        context.begin(["a"], np.array([width]), (4, 4 * width), positions.repeat_interleave(width))
        indices = context.indices(4 * width)
        wanted = StateIndices.from_arrays(layout([step], 1, width), "cpu")
        if step.unplaced_by:
            place_decodes(wanted, positions[:1])
        for name in DECODE_ARRAYS:
            assert getattr(indices, name).tolist()[:1] == getattr(wanted, name).tolist(), name
        assert indices.folds[: len(wanted.folds)].tolist() == wanted.folds.tolist()
        context.end()
        return len(fills)

    assert [run(decode("a", 3, 0, position)) for position in (70, 71, 72)] == [1, 0, 0]
    assert run(decode("a", 3, 0, 73)._replace(num_tokens=3, drafts=(1, 2)), width=3) == 1
    assert run(decode("a", 3, 0, 70)._replace(unplaced_by=2)) == 1
    assert [run(decode("a", 3, 0, position)) for position in (73, 74)] == [1, 0]
    sender.columns([], [])  # a step of others
    assert [run(decode("a", 3, 0, 75)), run(decode("a", 3, 0, 76))] == [1, 0]
    assert [run(decode("a", 3, 5, 79)), run(decode("a", 5, 0, 80, 0)), run(decode("a", 5, 0, 81, 0))] == [1, 1, 0]


@pytest.mark.parametrize("folds_in", range(4))
@pytest.mark.parametrize("others", [False, True])
def test_a_graph_after_an_eager_step_has_the_rows_of_its_own_step(
    context: StepContext, folds_in: int, others: bool
) -> None:
    """Steps run eagerly, in a graph, eagerly and in a graph. Row a folds in one of them, beside a row that never does.

    Args:
        others: the eager steps hold a prompt, too, as is usual.
    """
    sender, first, state = Sender(), 79 - folds_in, {"src": 3, "log_start": 6}
    for step, graph in enumerate([False, True, False, True, True]):
        position = first + step
        a = decode("a", state["src"], 5 if position == 79 else 0, position, state["log_start"])
        b = decode("b", 4, 0, 64 + step, 0)
        rows = [a, b] if graph or not others else [a, b, prefill("c", 0, 70, 0, 6)]
        names = [row.request_id for row in rows]
        context.receive(sender.columns(rows, []), [])
        context.begin(names, np.array([row.num_tokens for row in rows]), (4, 4) if graph else None)
        indices, wanted = context.indices(4), StateIndices.from_arrays(layout(rows, 2), "cpu")
        assert decode_rows(indices)[:2] == decode_rows(wanted), step
        assert indices.folds[: len(wanted.folds)].tolist() == wanted.folds.tolist(), step
        context.end()
        if a.dst:
            state = {"src": 5, "log_start": 0}


def test_runs_without_a_plan_store_nothing(context: StepContext) -> None:
    context.receive(None, [])
    context.begin(["dummy"], ones(["dummy"]))
    indices = context.indices(150)
    assert indices.num_tokens == 150 and indices.num_prefills == 1
    assert indices.src.tolist() == [0] and not indices.chunk_dst.any()


def test_a_row_that_did_not_travel_is_no_silence(context: StepContext) -> None:
    context.receive(Sender().columns([decode("a", 3, 0, 70)], []), [])
    with pytest.raises(KeyError):
        context.begin(["a", "b"], ones(["a", "b"]))


@pytest.mark.parametrize("seed", range(30))
def test_batches_in_any_order_are_rearranged_and_back(seed: int) -> None:
    """Decode rows with drafts, which other rows stand between; each token of the batch is its own number."""
    rng = np.random.default_rng(seed)
    states, logs = (StatePool([Layer().state_tensors()], count) for count in (80, 20))
    context, sender = StepContext([Layer()], states, logs, 40), Sender()
    steps = []
    for i in range(int(rng.integers(1, 20))):
        is_prompt, tokens = rng.random() < 0.4, int(rng.integers(1, 9))
        log = (0, 0) if is_prompt else (i + 1, 0)
        steps.append(SequenceStep(str(i), 1, i, 64, tokens, is_prompt, True, i + 1, 50 + i if is_prompt else 0, *log))
    context.receive(sender.columns(steps, ()), ())
    context.begin([step.request_id for step in steps], np.array([step.num_tokens for step in steps]))
    batch = torch.arange(sum(step.num_tokens for step in steps))
    ends = np.cumsum([step.num_tokens for step in steps])
    starts = {step.request_id: int(end) - step.num_tokens for step, end in zip(steps, ends, strict=True)}
    indices, order = context.indices(len(batch)), context.order
    ordered = sorted(steps, key=lambda step: step.prefill)
    if order is None:
        assert ordered == steps and len({step.num_tokens for step in steps if not step.prefill}) <= 1
        return
    taken, width = batch[order.taken].tolist(), indices.tokens_per_decode
    assert len(taken) == indices.num_tokens and torch.equal(batch[order.taken][order.back], batch)
    firsts = [i * width for i in range(indices.num_decodes)] + indices.query_start_loc[:-1].tolist()
    for step, first in zip(ordered, firsts, strict=True):
        own = [*range(starts[step.request_id], starts[step.request_id] + step.num_tokens)]
        assert taken[first : first + step.num_tokens] == own
