"""Ctrl-C on any line of the engine's own: it ends the call in which it falls, and the engine goes on unharmed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
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
from mambacache.engine.stepper import Stepper
from traced import traced

ENGINE = str(Path(mambacache.engine.__file__).parent)
PARAMS = SamplingParams(max_tokens=LENGTH, temperature=0)
STRIDE = 3

Outputs = dict[str, RequestOutput]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of the engine that is run; no more is traced then. Not inside `alone`:
    between a lock that is taken and the `with` that gives it back Python looks for no signal, and only a tracer can
    raise there."""

    def __init__(self, after: int) -> None:
        self._left = after
        self.raised = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Interrupt | None:
        code = frame.f_code
        if not code.co_filename.startswith(ENGINE) or code.co_name == "guarded":
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                self.raised = True
                raise KeyboardInterrupt
        return self


@contextmanager
def settling_interrupted(stepper: Stepper, first: Interrupt, after: int) -> Iterator[None]:
    """Interrupts a call a second time, where what the first time left is put in order."""
    settle, second = stepper.settle, Interrupt(after)

    def settling() -> None:
        with traced(second if first.raised and not second.raised else sys.gettrace()):
            settle()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stepper, "settle", settling)
        yield


def generate(llm: LLM, outputs: Outputs) -> None:
    llm.generate([[1, 2], [3, 4]], PARAMS, use_tqdm=False)


def step(llm: LLM, outputs: Outputs) -> None:
    while not llm.idle:
        outputs |= {output.request_id: output for output in llm.step()}


def stream(llm: LLM, outputs: Outputs) -> None:
    for _ in llm.stream([1, 2], PARAMS):
        pass


@pytest.mark.parametrize("act", [generate, step, stream])
@pytest.mark.parametrize("twice", [False, True])
def test_interrupt_on_any_line(
    engine: Engines, text_model: Path, act: Callable[[LLM, Outputs], None], twice: bool
) -> None:
    """Of a second request, which is stepped by hand, nothing is lost, and of the call's own nothing is left."""
    llm = engine(text_model)
    for after in count(1, STRIDE):
        line = Line()
        llm._stepper = Stepper(line, line, torch.device("cpu"))  # type: ignore[arg-type]
        line.ahead = llm._stepper.steps_ahead = after % 2
        by_hand = llm.submit([5, 6], PARAMS)
        outputs: Outputs = {}
        interrupt = Interrupt(after)
        again = settling_interrupted(llm._stepper, interrupt, 1 + after % 40) if twice else nullcontext()
        with suppress(KeyboardInterrupt), again, traced(interrupt):
            act(llm, outputs)
        if not interrupt.raised:
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
    assert after > 300


def test_interrupt_while_outputs_are_given(engine: Engines, text_model: Path) -> None:
    """They are given again by the next call, although their requests had ended and had never been seen before."""
    llm = engine(text_model)
    for after in count(1):
        line = Line()
        llm._stepper = Stepper(line, line, torch.device("cpu"))  # type: ignore[arg-type]
        line.ahead = llm._stepper.steps_ahead = after % 2
        ids = {llm.submit([5, 6], SamplingParams(max_tokens=1, temperature=0)) for _ in range(2)}
        outputs: Outputs = {}
        interrupt = Interrupt(after)
        with suppress(KeyboardInterrupt), traced(interrupt):
            step(llm, outputs)
        step(llm, outputs)
        assert set(outputs) == ids and llm.idle, after
        assert {output.outputs[0].delta for output in outputs.values()} == {llm.tokenizer.decode([10])}
        if not interrupt.raised:
            break
    assert after > 100
