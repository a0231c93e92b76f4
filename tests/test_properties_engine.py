"""Plant faults in a whole `LLM`: a request without a fault gets the same answer as alone, and no block leaks.

Some calls raise in a tokenizer, a draft source, or where a step is planned, run or read. KeyboardInterrupt falls on
any line of `engine/`, `runner/` and `scheduler/`, as a host's own handler raises it. Every run draws the same mixes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mambacache
import mambacache.runner.model_runner
from mambacache import LLM, DraftTree, SamplingParams
from mambacache.engine.answers import Answers
from mambacache.engine.outputs import Completion, RequestOutput
from mambacache.scheduler.request import Request
from mixes import PART, seeds
from symbolic import VOCAB, answer, text
from symbolic_engine import SymbolicModel, symbolic_llm
from symbolic_jobs import Mix
from traced import traced

PACKAGE = Path(mambacache.__file__).parent
TRACED = tuple(str(PACKAGE / name) for name in ("engine", "runner", "scheduler"))

PLANNING = ("schedule", "plan")
RUNNING = ("launch", "logits", "sample", "issued", "cache issued")
TAKING = ("update", "cache accept")
SITES = ("encode", "decode", "draft", *PLANNING, *RUNNING, *TAKING)
MAX_FAULTS = 8  # in a mix


class PlantedError(Exception):
    """Stand for an ordinary error of a program."""


@dataclass
class Fault:
    """Record a raised error, its place, and the step that ran."""

    error: BaseException
    site: str
    after: bool  # the work was done
    rows: tuple[str, ...]  # the ids of the step's rows
    tokens: tuple[int, ...] = ()  # the tokens to decode


class Faults:
    """Raise in one of `calls` calls at `sites`, and after `lines` lines on average (0: on no line)."""

    def __init__(self, rng: random.Random, sites: tuple[str, ...], calls: float, interrupts: bool, lines: int) -> None:
        self.rng = rng
        self.raised: list[Fault] = []
        self.rows: tuple[str, ...] = ()
        self.on = True
        self._sites, self._calls, self._interrupts = sites, calls, interrupts
        self.lines = lines
        self._left = self._next()

    def at(
        self, site: str, after: bool = False, tokens: tuple[int, ...] = (), before: Callable[[], None] | None = None
    ) -> None:
        if site in self._sites and self.rng.random() * self._calls < 1:
            kind = KeyboardInterrupt if self._interrupts and self.rng.random() < 0.5 else PlantedError
            if self.on and len(self.raised) < MAX_FAULTS:
                if before is not None:
                    before()
                self._raise(kind, site, after, tokens)

    def around(self, owner: Any, name: str, site: str, torn: Callable[[], None] | None = None) -> None:
        """Make a function of `owner` raise before or after its work."""
        real = getattr(owner, name)

        def planted(*args: Any, **options: Any) -> Any:
            self.at(site, before=torn)
            result = real(*args, **options)
            self.at(site, after=True)
            return result

        setattr(owner, name, planted)

    def _raise(self, kind: type[BaseException], site: str, after: bool = False, tokens: tuple[int, ...] = ()) -> None:
        error = kind(f"fault {len(self.raised)}")
        self.raised.append(Fault(error, site, after, self.rows, tokens))
        raise error

    def _next(self) -> int:
        return 1 + int(self.rng.expovariate(1 / self.lines)) if self.lines else -1

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(TRACED) or code.co_name == "guarded":  # see `test_engine_interrupts`
            return None
        if event == "line" and self.on:
            self._left -= 1
            if not self._left and len(self.raised) < MAX_FAULTS:
                self._left = self._next()
                self._raise(KeyboardInterrupt, f"{Path(code.co_filename).name} {frame.f_lineno}")
        return self._trace

    def traced(self) -> AbstractContextManager[None]:
        return traced(self._trace) if self.lines else nullcontext()


# --- requests, and their answers alone ---


@cache
def pool_of_jobs() -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Return prompts that share beginnings, with parameters of all kinds."""
    rng = random.Random(0)
    stems = [text(200, seed) for seed in range(2)]
    jobs = []
    for i in range(60):
        prompt = stems[rng.random() < 0.3][: rng.choice([0, 40, 64, 128, 150, 192])] + text(rng.randint(1, 40), i % 7)
        params = SamplingParams(
            max_tokens=rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, 40)]), temperature=rng.choice([0, 0, 1.0]),
            seed=i, n=rng.choice([1, 1, 1, 2, 3]), logprobs=rng.choice([None, None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]), salt=rng.choice(["", "", "", "tenant"]),
            stop=rng.choice([None, None, ["E"], ["[H", "bc", "Z"]]), stop_token_ids=rng.choice([None, None, [7, 21]]),
            read_cache=rng.random() < 0.9, store_cache=rng.random() < 0.9,
        )  # fmt: skip
        jobs.append((tuple(prompt), params))
    return jobs


@cache
def alone(job: int, attention: bool) -> list[Completion]:
    """Return the answers of a job that is alone in an engine without faults."""
    prompt, params = pool_of_jobs()[job]
    completions = engine_alone(attention).generate(list(prompt), params, use_tqdm=False)[0].outputs
    if not params.temperature:
        right = answer(prompt, params.max_tokens, attention=attention)
        assert all(right[: len(each.token_ids)] == each.token_ids for each in completions)
    return completions


@cache
def engine_alone(attention: bool) -> LLM:
    return symbolic_llm(attention=attention, enable_prefix_caching=False, max_checkpoints=0)


# --- a user of one engine ---


class User:
    """Call an engine in all ways at once, and go on after every error."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        lines = rng.choice([0, 0, 300, 1500])
        sites = () if lines and rng.random() < 0.5 else tuple(rng.sample(SITES, rng.choice([1, 2, len(SITES)])))
        self.faults = Faults(rng, sites, rng.choice([4, 15, 60, 150]), rng.random() < 0.5, lines)
        self.attention = rng.random() < 0.8
        drafts = rng.choice([0, 0, 3])
        self.llm = symbolic_llm(
            num_state_blocks=rng.choice([2, drafts + 3, 40]), num_kv_blocks=rng.choice([4, 8, 60]),
            max_num_seqs=rng.choice([1, 2, 8]), max_checkpoints=rng.choice([0, 2, 3]), attention=self.attention,
            max_num_batched_tokens=rng.choice([60, 100, 1000]), max_draft_tokens=drafts,
            draft=self.draft if drafts else None,
        )  # fmt: skip
        self.llm._step_loop.steps_ahead = rng.choice([0, 1])
        self.jobs = rng.choices(range(len(pool_of_jobs())), k=rng.randint(1, 9))
        self.alone = {job: alone(job, self.attention) for job in self.jobs}
        self.asked: dict[str, int] = {}  # jobs by request id
        self.outputs: dict[str, RequestOutput] = {}
        self.deltas: defaultdict[str, str] = defaultdict(str)
        self.concerned: set[str] = set()  # requests that end if the current call raises
        self.gone: set[str] = set()  # requests that were aborted, or ended when a call raised
        self.streams: list[tuple[set[str], Iterator[RequestOutput]]] = []
        self.steps = 0
        self.plant()

    def plant(self) -> None:
        llm, around = self.llm, self.faults.around
        scheduler, model = llm._step_loop._scheduler, llm.runner.model
        assert isinstance(model, SymbolicModel)
        decode, add = llm.tokenizer.decode, llm._step_loop.add

        def adding(answers: Answers) -> None:
            request_id = answers.output.request_id
            self.concerned.add(request_id)
            self.asked[request_id] = answers.params.seed
            add(answers)

        def decoding(tokens: list[int], **options: Any) -> str:
            self.faults.at("decode", tokens=tuple(tokens))
            return decode(tokens, **options)

        llm.tokenizer.decode, llm._step_loop.add = decoding, adding  # type: ignore[method-assign]
        for owner, name, site in (
            (llm.tokenizer, "encode", "encode"), (scheduler, "schedule", "schedule"), (llm.cache, "plan", "plan"),
            (llm.runner, "launch", "launch"), (scheduler, "issued", "issued"), (llm.cache, "issued", "cache issued"),
            (scheduler, "update", "update"), (llm.cache, "accept", "cache accept"),
        ):  # fmt: skip
            around(owner, name, site)
        around(model, "logits", "logits", torn=model.tear)
        launch, update = llm.runner.launch, scheduler.update

        def updating(plan: Any, sampled: Any) -> Any:
            self.faults.rows = tuple(step.request_id for step in plan.steps)  # another step may be in flight
            return update(plan, sampled)

        def launching(plan: Any, *args: Any) -> Any:
            self.faults.rows = tuple(step.request_id for step in plan.steps)
            self.steps += 1
            return launch(plan, *args)

        llm.runner.launch, scheduler.update = launching, updating  # type: ignore[method-assign]

    def draft(self, request: Request, limit: int) -> list[int] | DraftTree:
        self.faults.at("draft")
        index = int(request.request_id.partition("/")[2] or 0)
        right = self.alone[request.params.seed][index].token_ids[len(request.output) :][:limit]
        if self.rng.random() < 0.4:
            return Mix([], draft_errors=2, trees=True).drafts(list(right), 0)
        return [token if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for token in right]

    # --- calls ---

    def run(self) -> User:
        with pytest.MonkeyPatch.context() as patch:
            module = mambacache.runner.model_runner
            patch.setattr(module, "sample", module.sample)
            self.faults.around(module, "sample", "sample")
            moves = 0
            while self.jobs or self.streams or not self.llm.idle:
                moves += 1
                assert moves < 3000, "no progress"
                self.attempt(self.rng.choice(self.moves()))
        self.faults.on = False
        self.note(self.llm.step())
        self.check()
        return self

    def moves(self) -> list[Callable[[], None]]:
        moves: list[Callable[[], None]] = [self.step] * 20 + [self.abort, self.reset]
        if self.jobs:
            moves += [self.submit, self.submit, self.generate, self.stream]
        if self.streams:
            moves += [self.next_of_stream] * 6 + [self.close_stream]
        return moves

    def attempt(self, move: Callable[[], None]) -> None:
        self.concerned, known = set(), len(self.faults.raised)
        try:
            with self.faults.traced():
                move()
        except (PlantedError, KeyboardInterrupt, ValueError) as error:
            of_prompt = isinstance(error, ValueError)
            new = [fault for fault in self.faults.raised[known:] if fault.error is (error.__cause__ or error)]
            assert new, f"{error} is no fault of this call"
            if not isinstance(error, KeyboardInterrupt):
                assert new[0].site in (("encode",) if of_prompt else PLANNING), f"{error} reaches the caller"
            self.gone |= self.concerned
        llm = self.llm
        llm.cache.quietly(llm.cache.check)

    def step(self) -> None:
        self.note(self.llm.step())

    def note(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs[output.request_id] = output
            for i, completion in enumerate(output.outputs):
                self.deltas[f"{output.request_id}/{i}"] += completion.delta

    def ask(self) -> tuple[Any, SamplingParams]:
        prompt, params = pool_of_jobs()[self.jobs.pop()]
        forms = [list(prompt), {"prompt_token_ids": prompt}, "".join(chr(ord("A") + token) for token in prompt)]
        return self.rng.choice(forms), params

    def submit(self) -> None:
        request_id = f"by hand {len(self.jobs)}"
        assert self.llm.submit(*self.ask(), request_id) == request_id

    def generate(self) -> None:
        asked = [self.ask() for _ in range(self.rng.randint(1, len(self.jobs)))]
        self.note(self.llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False))

    def stream(self) -> None:
        self.streams.append((set(), self.llm.stream(*self.ask())))

    def next_of_stream(self) -> None:
        stream = self.streams.pop(self.rng.randrange(len(self.streams)))
        self.concerned = stream[0]
        output = next(stream[1], None)
        if output is not None:
            self.note([output])
            self.streams.append(stream)

    def close_stream(self) -> None:
        name, stream = self.streams.pop(self.rng.randrange(len(self.streams)))
        self.gone |= name
        self.concerned = name
        stream.close()

    def abort(self) -> None:
        if self.asked:
            request_id = self.rng.choice(list(self.asked))
            self.gone.add(request_id)
            self.llm.abort(request_id)

    def reset(self) -> None:
        self.llm.reset_prefix_cache()

    # --- the end ---

    def check(self) -> None:
        llm = self.llm
        assert llm.idle and llm._step_loop._scheduler.idle
        llm.cache.check_no_leak()
        llm.cache.check_contents()
        for blocks in filter(None, (llm.stats.state_blocks, llm.stats.kv_blocks)):
            assert blocks["writing"] == 0 and blocks["committed"] == blocks["evictable"]
        assert set(self.asked) <= set(self.outputs) | self.gone, "an answer is lost"
        errors: dict[int, set[str]] = {}
        for request_id, output in self.outputs.items():
            right = self.alone[self.asked[request_id]]
            for i, completion in enumerate(output.outputs):
                if completion.finish_reason == "error":
                    number = self.check_failed_answer(request_id, output, i)
                    errors.setdefault(number, set()).add(request_id)
                elif completion.finish_reason in (None, "abort"):
                    assert request_id in self.gone, "an answer has no end"
                else:
                    self.check_complete_answer(output, i, right[i])
                count = len(completion.token_ids)
                assert completion.token_ids == right[i].token_ids[:count]
        assert all(len(requests) == 1 for requests in errors.values()), "a fault costs several requests"
        self.check_every_fault_ended_a_request(errors)

    def check_complete_answer(self, output: RequestOutput, i: int, right: Completion) -> None:
        completion, request_id = output.outputs[i], output.request_id
        for name in ("token_ids", "text", "finish_reason", "error"):
            assert getattr(completion, name) == getattr(right, name), (request_id, i, name)
        assert (completion.logprobs is None) == (right.logprobs is None)
        for found, wanted in zip(completion.logprobs or (), right.logprobs or (), strict=True):
            assert found == pytest.approx(wanted)
        if not self.faults.lines and request_id not in self.gone:
            assert self.deltas[f"{request_id}/{i}"] == right.text

    def check_failed_answer(self, request_id: str, output: RequestOutput, i: int) -> int:
        """Check that an answer with an error had the fault itself, or had not begun when its first answer had it."""
        completion, right = output.outputs[i], self.alone[self.asked[request_id]]
        number = int((completion.error or "").removeprefix("PlantedError: fault "))
        fault = self.faults.raised[number]
        assert isinstance(fault.error, PlantedError)
        of_first = i > 0 and not completion.token_ids and output.outputs[0].error == completion.error
        if fault.site == "decode":
            texts = [bytes(right[k].token_ids) for k in {i, 0 if of_first else i}]
            assert any(bytes(fault.tokens) in text for text in texts), "the fault has tokens of another request"
        else:
            own = f"{request_id}/{i}" if i and not of_first else request_id
            assert fault.site in RUNNING + TAKING and fault.rows == (own,), "the request was not alone in its step"
        return number

    def check_every_fault_ended_a_request(self, errors: dict[int, set[str]]) -> None:
        """Check that a fault of a single request ends that request, unless Ctrl-C came before it was noted."""
        if self.gone:
            return  # these requests may have had the fault
        decoded = [number for number in errors if self.faults.raised[number].site == "decode"]
        for number, (fault, following) in enumerate(zip_longest(self.faults.raised, self.faults.raised[1:])):
            cut_short = following is not None and isinstance(following.error, KeyboardInterrupt)
            if isinstance(fault.error, KeyboardInterrupt) or cut_short:
                continue
            alone_in_step = fault.site in RUNNING and len(fault.rows) == 1
            in_text = fault.site == "decode" and len(decoded) == len(errors)  # another error may come first
            if in_text and number not in errors:  # as may an earlier fault of the same answer
                ended = [right for names in errors.values() for name in names for right in self.alone[self.asked[name]]]
                in_text = not any(bytes(fault.tokens) in bytes(right.token_ids) for right in ended)
            assert number in errors or not (alone_in_step or in_text), "a fault ended no request"


@pytest.mark.mixes
def test_a_fault_costs_no_other_request() -> None:
    steps, sites, ends = 0, set(), set()
    for seed in seeds(150):
        try:
            user = User(seed).run()
        except BaseException as error:
            error.add_note(f"mix {seed}")
            raise
        steps += user.steps
        sites |= {fault.site for fault in user.faults.raised}
        ends |= {completion.finish_reason for output in user.outputs.values() for completion in output.outputs}
    assert steps > 2000 * PART and ends >= {"stop", "length", "error", "abort"}
    if PART >= 1:
        assert sites >= set(SITES) and len(sites) > 100, "few lines of these folders raised"
