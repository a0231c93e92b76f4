"""Ctrl-C on any line of the engine: the first ends the call between two steps, the second closes the engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType

import pytest
import torch

import mambacache.engine
from bare_scheduler import LENGTH, Line
from engine_driver import Engines
from mambacache import LLM, SamplingParams
from mambacache.engine.outputs import RequestOutput
from mambacache.engine.step_loop import StepLoop
from selection import full
from traced import traced

ENGINE = str(Path(mambacache.engine.__file__).parent)
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=0)
STRIDE = 3

Outputs = dict[str, RequestOutput]


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    """Set Python's handler: a shell that runs tests in the background ignores SIGINT, and processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class CtrlC:
    """Sends SIGINT to this process at the n-th line of a guarded call, and again some lines later if `again` is not 0.

    Lines of the guard itself are left out: before its handler is there, and after it, Python raises at once.
    """

    def __init__(self, after: int, again: int = 0) -> None:
        self._left = [after, again]
        self.sent = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> CtrlC | None:
        code = frame.f_code
        handled = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        if (
            not code.co_filename.startswith(ENGINE)
            or code.co_name == "guarded"
            or code.co_filename.endswith("rupts.py")
        ):
            return None
        if event == "line" and handled and self.sent < 2 and self._left[self.sent]:
            self._left[self.sent] -= 1
            if not self._left[self.sent]:
                self.sent += 1
                signal.raise_signal(signal.SIGINT)
        return self


def generate(llm: LLM, outputs: Outputs) -> None:
    llm.generate([[1, 2], [3, 4]], PARAMS, use_tqdm=False)


def step(llm: LLM, outputs: Outputs) -> None:
    while not llm.idle:
        outputs |= {output.request_id: output for output in llm.step()}


def stream(llm: LLM, outputs: Outputs) -> None:
    for _ in llm.stream([1, 2], PARAMS):
        pass


def apart(act: Callable[[LLM, Outputs], None], llm: LLM) -> Iterator[None]:
    """Act inside a generator, which has an exception state of its own.

    CPython leaves the state in disorder where a trace function raises, and later exceptions would seem to follow.
    """
    act(llm, {})
    yield


@contextmanager
def stopped_at(llm: LLM, after: int, again: int = 0) -> Iterator[tuple[CtrlC, Line]]:
    """Run a block with Ctrl-C, on a step_loop without a model."""
    line = Line()
    llm._step_loop = StepLoop(line, line, torch.device("cpu"))  # type: ignore[arg-type]
    line.ahead = llm._step_loop.steps_ahead = after % 2
    yield CtrlC(after, again), line
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("act", [*full(generate, step), stream])
def test_the_first_ctrl_c_costs_its_call_alone(
    engine: Engines, text_model: Path, act: Callable[[LLM, Outputs], None]
) -> None:
    """A second request is stepped by hand and loses nothing; the call's own requests are gone."""
    llm = engine(text_model)
    for after in count(1, STRIDE):
        with stopped_at(llm, after) as (interrupt, line):
            by_hand, outputs = llm.submit([5, 6], PARAMS), Outputs()
            raised = False
            with traced(interrupt):
                try:
                    act(llm, outputs)
                except KeyboardInterrupt:
                    raised = True
            assert raised == bool(interrupt.sent), after
            if not raised:
                llm.abort(by_hand)
                break
            for _ in range(4 * LENGTH):
                if not llm.idle:
                    outputs |= {output.request_id: output for output in llm.step()}
            assert llm.idle and not line.requests, after
            assert set(outputs) == {by_hand}, after
            completion = outputs[by_hand].outputs[0]
            assert completion.token_ids == list(range(10, 10 + LENGTH)), after
            assert (completion.finish_reason, completion.text) == ("length", llm.tokenizer.decode(completion.token_ids))
            assert "failed" not in [told for told, _ in line.told], "no step is broken off"
    assert after > 150


@pytest.mark.parametrize("act", [generate, *full(step, stream)])
def test_the_second_ctrl_c_closes_the_engine(
    engine: Engines, text_model: Path, act: Callable[[LLM, Outputs], None]
) -> None:
    llm, closed = engine(text_model), 0
    for after in count(1, 5 * STRIDE):
        with stopped_at(llm, after, again=1 + after % 7) as (interrupt, _):
            by_hand = llm.submit([5, 6], PARAMS)
            with suppress(KeyboardInterrupt), traced(interrupt):
                next(apart(act, llm))
            if llm._step_loop.interrupts.count == 2:  # not in two calls, as of a stream and of its end
                closed += 1
                with pytest.raises(RuntimeError, match="this LLM is closed: make a new one"):
                    llm.step()
                assert not hasattr(llm._step_loop, "_runner"), "the model's memory is kept"
            elif not interrupt.sent:
                llm.abort(by_hand)
                break
    assert closed > 10


def test_outputs_that_ctrl_c_kept_back_are_given_again(engine: Engines, text_model: Path) -> None:
    llm = engine(text_model)
    for after in count(1):
        with stopped_at(llm, after) as (interrupt, _):
            ids = {llm.submit([5, 6], SamplingParams(max_tokens=1, temperature=0)) for _ in range(2)}
            outputs = Outputs()
            with suppress(KeyboardInterrupt), traced(interrupt):
                step(llm, outputs)
            step(llm, outputs)
            assert set(outputs) == ids and llm.idle, after
            assert {output.outputs[0].delta for output in outputs.values()} == {llm.tokenizer.decode([10])}
        if not interrupt.sent:
            break
    assert after > 60


def test_a_handler_of_the_host_stays(engine: Engines, text_model: Path) -> None:
    """So does a call in another thread, where Python delivers no signal."""
    llm, seen = engine(text_model), []

    def note(*_: object) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    former = signal.signal(signal.SIGINT, note)
    try:
        with traced(CtrlC(40)):
            llm.generate([[1, 2]], PARAMS, use_tqdm=False)
        assert seen == [note]
    finally:
        signal.signal(signal.SIGINT, former)
    thread = threading.Thread(target=llm.generate, args=([[1, 2]], PARAMS), kwargs={"use_tqdm": False})
    thread.start()
    while thread.is_alive():
        assert signal.getsignal(signal.SIGINT) is former
    thread.join()
