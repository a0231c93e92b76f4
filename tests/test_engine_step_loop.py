"""Check with a bare scheduler that a step is taken or failed, wherever an error is raised, and that nobody waits for
ever."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bare_scheduler import LENGTH, Line
from mambacache import SamplingParams
from mambacache.engine.answers import Answers
from mambacache.engine.outputs import RequestOutput
from mambacache.engine.step_loop import StepLoop
from mambacache.scheduler.request import FinishReason


class Bench:
    """A step_loop, and requests that were put in line: `ids`. On a GPU it goes a step ahead."""

    def __init__(self, device: str = "cpu", requests: int = 2, ahead: int | None = None) -> None:
        self.line = Line()
        self.step_loop = StepLoop(self.line, self.line, torch.device(device))  # type: ignore[arg-type]
        if ahead is not None:
            self.step_loop.steps_ahead = ahead
        self.line.ahead = self.step_loop.steps_ahead
        self.ids = [f"request {i}" for i in range(requests)]
        self.outputs: dict[str, RequestOutput] = {}
        for request_id in self.ids:
            self.add(request_id)

    def add(self, request_id: str) -> Answers:
        params = SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0)
        answers = Answers(request_id, [1, 2, 3], params, frozenset(), None, 0)
        self.step_loop.add(answers)
        return answers

    def plant(self, method: str, *errors: BaseException | None, after: bool = False) -> None:
        """Make the next calls of a method of `Line` raise `errors`, after its work or before."""
        real, coming = getattr(self.line, method), iter(errors)

        def planted(*args: Any) -> Any:
            error = next(coming, None)
            if error is None:
                return real(*args)
            if after:
                real(*args)
            raise error

        setattr(self.line, method, planted)

    def step(self) -> list[str]:
        """Run a step as each call of the engine does. Return the ids with news."""
        try:
            self.step_loop.begin()
            self.step_loop.advance()
        finally:
            self.step_loop.settle()
        news = list(self.step_loop.touched.values())
        self.outputs |= {answers.request_id: self.step_loop.hand_out(answers) for answers in news}
        return [answers.request_id for answers in news]

    def run(self) -> list[BaseException]:
        """Steps until all have ended; gives what came out of the steps."""
        raised: list[BaseException] = []
        for _ in range(50):
            if not self.step_loop.answers:
                return raised
            try:
                self.step()
            except BaseException as error:
                raised.append(error)
        raise AssertionError(f"requests are left after 50 steps; {raised[-3:]}")

    def check_answers(self) -> None:
        """Check that all answers are whole, and that each log probability comes from the same step as its token."""
        assert set(self.outputs) == set(self.ids)
        taken = [-plan.number for what, plan in self.line.told if what == "updated"][-LENGTH:]
        for output in self.outputs.values():
            completion = output.outputs[0]
            assert completion.token_ids == list(range(10, 10 + LENGTH))
            assert completion.logprobs == [{token: step} for token, step in enumerate(taken, start=10)]
            assert (completion.finish_reason, completion.error) == ("length", None)


# Where a step can break: the planted method, and whether it has done its work by then.
PLACES = [("launch", False), ("launch", True), ("read", False), ("issued", False), ("issued", True), ("update", False)]
KINDS = [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "after"), PLACES)
def test_step_that_breaks(method: str, after: bool, kind: type[BaseException]) -> None:
    """Its plan is failed once, before anything else is planned; only what is no Exception goes on to the caller."""
    bench = Bench()
    error = kind("planted")
    bench.plant(method, None, error, after=after)
    raised = bench.run()
    bench.check_answers()
    assert raised == ([] if isinstance(error, Exception) else [error])
    failures = [i for i, (what, _) in enumerate(bench.line.told) if what == "failed"]
    assert len(failures) == 1
    (_, plan), (_, reason) = bench.line.told[failures[0] : failures[0] + 2]
    assert reason is error if isinstance(error, Exception) else not isinstance(reason, Exception)
    assert ("updated", plan) not in bench.line.told
    assert len([what for what, _ in bench.line.told if what == "updated"]) == LENGTH


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "after"), PLACES)
def test_step_that_breaks_with_another_in_flight(method: str, after: bool, kind: type[BaseException]) -> None:
    """Check that the step behind it fails too, without a fault of its own. The step ahead of it is read, unless the
    call breaks off."""
    bench = Bench(ahead=1)
    error = kind("planted")
    bench.plant(method, None, error, after=after)
    raised = bench.run()
    bench.check_answers()
    assert raised == ([] if isinstance(error, Exception) else [error])
    told = bench.line.told
    failed = [(plan.number, told[i + 1][1]) for i, (what, plan) in enumerate(told) if what == "failed"]
    if isinstance(error, Exception):
        assert [reason for _, reason in failed if isinstance(reason, Exception)] == [error]
    assert {plan.number for what, plan in told if what == "updated"}.isdisjoint(dict(failed))
    assert len(failed) == len(dict(failed)) <= 4 and not bench.step_loop._flights


def test_a_step_ahead() -> None:
    """Check that the next step is launched before this step is read. A step without live requests is read, too."""
    bench = Bench(ahead=1)
    real, launched = bench.line.launch, []
    bench.line.launch = lambda plan, *args: launched.append(plan.number) or real(plan, *args)  # type: ignore
    reads = []
    bench.line.read, read = lambda plan: reads.append((plan.number, len(launched))) or read(plan), bench.line.read  # type: ignore
    assert bench.run() == []
    bench.check_answers()
    assert reads == [*((number, number + 2) for number in range(LENGTH)), (LENGTH, LENGTH + 1)]
    assert launched == [*range(LENGTH + 1)]
    assert bench.line.told[-1][0] == "in vain"


def test_step_that_brings_nothing_on() -> None:
    """There is nothing to give of the requests that it ran."""
    bench = Bench()
    bench.plant("launch", None, RuntimeError("planted"))
    assert [bench.step() for _ in range(3)] == [bench.ids, [], bench.ids]
    assert bench.run() == []


def test_interrupt_while_a_failure_is_handled() -> None:
    """The plan that is still there is failed before the next step."""
    bench = Bench()
    bench.plant("launch", RuntimeError("planted"))
    bench.plant("failed", KeyboardInterrupt())
    raised = bench.run()
    bench.check_answers()
    assert {type(error) for error in raised} == {KeyboardInterrupt}
    assert [what for what, _ in bench.line.told][:4] == ["failed", "because of", "issued", "updated"]


def test_failure_that_cannot_be_handled(caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler keeps its books in order whatever it raises: it is told once, and steps go on."""
    bench = Bench()
    bench.plant("launch", RuntimeError("planted"))
    bench.plant("failed", ValueError("planted too"), ValueError("never reached"), after=True)
    assert bench.run() == []
    bench.check_answers()
    assert [what for what, _ in bench.line.told].count("failed") == 1
    assert "a failed step was not taken back in order" in caplog.text


def test_interrupt_when_tokens_were_taken() -> None:
    """The outputs of the requests that it brought on are given all the same, those that ended with it too."""
    bench = Bench()
    bench.plant("update", None, None, None, KeyboardInterrupt(), after=True)
    assert len(bench.run()) == 1
    bench.check_answers()


@pytest.mark.parametrize("failures", [1, 2])
def test_planning_that_fails_is_tried_again(failures: int, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.plant("schedule", None, *[RuntimeError("planted")] * failures, None, *[RuntimeError("planted")] * failures)
    assert bench.run() == []
    bench.check_answers()
    assert caplog.text.count("planning a step failed: it is tried again") == 2 * failures


def test_planning_that_fails_again_and_again() -> None:
    """The third time in a row it is the caller's affair; later calls may find it well again."""
    bench = Bench()
    errors = [RuntimeError(f"planted {i}") for i in range(3)]
    bench.plant("schedule", None, *errors)
    assert bench.run() == [errors[-1]]
    bench.check_answers()


def test_interrupt_while_a_step_is_planned() -> None:
    bench = Bench()
    bench.plant("schedule", KeyboardInterrupt())
    assert len(bench.run()) == 1
    bench.check_answers()
    assert "failed" not in [what for what, _ in bench.line.told]


def test_nothing_can_run_and_requests_are_left() -> None:
    bench = Bench()
    bench.step()
    bench.line.stuck = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nothing can run and 2 requests are left: abort them"):
            bench.step()
    bench.line.stuck = False
    assert bench.run() == []
    bench.check_answers()


def test_request_that_ended_outside_of_a_step() -> None:
    """It is no request that is left: its end is told."""
    bench = Bench(requests=1)
    bench.step()
    request = bench.line.requests.pop(bench.ids[0])
    request.finish_reason, request.error = FinishReason.ERROR, "ValueError: planted"
    assert bench.run() == []
    completion = bench.outputs[bench.ids[0]].outputs[0]
    assert (completion.finish_reason, completion.error) == ("error", "ValueError: planted")


def test_abort_that_fails() -> None:
    """The request is forgotten all the same, and the others finish."""
    bench = Bench()
    bench.step()
    answers = bench.step_loop.answers[bench.ids[0]]
    bench.plant("abort", RuntimeError("planted"))
    bench.step_loop.abort(answers)
    assert answers.output.outputs[0].finish_reason == "abort" and set(bench.step_loop.answers) == set(bench.ids[1:])
    del bench.ids[0], bench.outputs["request 0"]
    bench.line.requests.pop("request 0", None)
    assert bench.run() == []
    bench.check_answers()


def test_abort_whose_last_words_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that ends the call whenever it is asked keeps no request in line."""

    def fail(answers: Answers) -> None:
        raise SystemExit

    bench = Bench()
    answers = bench.step_loop.answers[bench.ids[0]]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Answers, "refresh", fail)
        bench.step_loop.abort(answers)
    assert bench.ids.pop(0) not in bench.step_loop.answers
    assert answers.output.outputs[0].finish_reason == "abort" and bench.run() == []
    bench.check_answers()


def test_row_of_a_request_that_was_forgotten() -> None:
    """Check that the step fails and the scheduler is told, so that a bad plan cannot make the engine stand still."""
    bench = Bench()
    bench.step_loop._forget(bench.step_loop.answers[bench.ids[0]])
    bench.step()
    assert [what for what, _ in bench.line.told] == ["failed", "because of"]
    assert isinstance(bench.line.told[1][1], KeyError)


def test_forgotten_answers_are_not_ended_twice() -> None:
    """Nor is another request that has their id now."""
    bench = Bench(requests=1)
    first = bench.step_loop.answers[bench.ids[0]]
    bench.step_loop.abort(first)
    bench.add(bench.ids[0])
    bench.step_loop.abort(first)
    assert bench.run() == []
    bench.check_answers()


# --- a device that fails for good ---

CUDA_ERROR = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable it.\n"
ENDED = "the CUDA device failed (RuntimeError: CUDA error: device-side assert triggered): start a new process"


@pytest.fixture
def broken_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Has the CUDA device that there is not fail whatever it is asked."""

    def fail(device: object = None) -> None:
        raise RuntimeError(CUDA_ERROR)

    return lambda: monkeypatch.setattr(torch.cuda, "synchronize", fail)


def test_device_that_fails_for_good(broken_device: Callable[[], None], caplog: pytest.LogCaptureFixture) -> None:
    """All requests end with one sentence, which the log holds once; no step is tried again; later calls raise it."""
    bench = Bench("cuda", requests=5)
    bench.plant("launch", None, None, RuntimeError(CUDA_ERROR))
    bench.step()
    broken_device()
    with caplog.at_level(logging.DEBUG):
        bench.step()
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [(ENDED, None)]
    assert set(bench.outputs) == set(bench.ids) and not bench.step_loop.answers
    for output in bench.outputs.values():
        completion = output.outputs[0]
        assert (completion.token_ids, completion.finish_reason, completion.error) == ([10], "error", ENDED)
    for call in (bench.step_loop.advance, lambda: bench.add("later")):
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                call()
            assert str(error.value) == ENDED
    bench.step_loop.settle()
    assert not bench.step_loop.answers


def test_news_of_a_failed_device_are_given_before_it_is_raised(broken_device: Callable[[], None]) -> None:
    """To a stream that has its turn later, too."""
    bench = Bench("cuda")
    broken_device()
    bench.plant("launch", RuntimeError(CUDA_ERROR))
    streams = [bench.step_loop.answers[each] for each in bench.ids]
    bench.step_loop.advance()
    for answers in streams:
        bench.step_loop.advance()
        output = bench.step_loop.next_output(answers)
        assert output is not None and output.outputs[0].error == ENDED
        assert bench.step_loop.next_output(answers) is None


def test_interrupt_while_a_failed_device_is_told_of(
    broken_device: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench("cuda")
    broken_device()
    bench.plant("launch", RuntimeError(CUDA_ERROR))
    end, interrupts = Answers.end, iter([KeyboardInterrupt()])

    def interrupted(answers: Answers, *told: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        end(answers, *told)

    monkeypatch.setattr(Answers, "end", interrupted)
    assert len(bench.run()) == 1
    assert [bench.outputs[each].outputs[0].error for each in bench.ids] == [ENDED] * 2


def test_device_that_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that does not stick, as lack of memory, is one step's affair. A CPU is not asked."""
    asked: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    for device in ("cuda", "cpu"):
        bench = Bench(device)
        bench.plant("launch", None, torch.OutOfMemoryError("planted"))
        assert bench.run() == []
        bench.check_answers()
    assert asked == [torch.device("cuda")]


def test_interrupt_is_no_failure_of_the_device(broken_device: Callable[[], None]) -> None:
    bench = Bench("cuda")
    broken_device()
    bench.plant("launch", KeyboardInterrupt())
    assert len(bench.run()) == 1
    bench.check_answers()
