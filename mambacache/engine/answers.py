"""The answers to one prompt, as they are generated."""

from __future__ import annotations

import logging
import time

from mambacache.config import SamplingParams
from mambacache.engine.outputs import Completion, RequestMetrics, RequestOutput
from mambacache.engine.text import Detokenizer, Tokenizer
from mambacache.plan import SequenceStep
from mambacache.runner.adjustments import Adjustment, Tally
from mambacache.runner.model_runner import RowOutput
from mambacache.runner.sampler import RowSampling
from mambacache.scheduler.drafts import agreed
from mambacache.scheduler.request import FinishReason, Request

logger = logging.getLogger(__name__)


class Answers:
    """`params.n` requests on one prompt, and the output that is made of them.

    Args:
        end_tokens: the model's own, which end an answer unless that ignores them.
        tokenizer: None where there is no text.
        seed: of the first answer's draws; the others count on from it.
        text: of the prompt, if that was given.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        end_tokens: frozenset[int],
        tokenizer: Tokenizer | None,
        seed: int,
        text: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        stops = frozenset(params.stop_token_ids or ())
        self._all_ends = stops | end_tokens
        self._stops = stops if params.ignore_eos else stops - end_tokens
        self._adjusts = params.adjusts(0)  # if not at first, then never
        self._tallies: dict[int, Tally] = {}  # of the answers whose logits are adjusted
        self._submitted = time.perf_counter()
        self._seeds = tuple(seed + i for i in range(params.n))
        self._plain = [RowSampling(params, (seed,)) for seed in self._seeds]  # of nearly all rows
        self._given = [0] * params.n  # characters of each text that were handed out
        self._handed_out: list[tuple[int, str | None]] = [(0, None)] * params.n
        self._texts = [_detokenizer(tokenizer, params) for _ in range(params.n)] if tokenizer is not None else []
        self.requests = [
            Request(
                f"{request_id}/{i}" if i else request_id,
                prompt,
                params,
                stops if params.ignore_eos else self._all_ends,
                self._texts[i].completes_stop if self._texts else None,
            )
            for i in range(params.n)
        ]
        self.requests[0].siblings = self.requests[1:]
        self._index = {request.request_id: i for i, request in enumerate(self.requests)}
        completions = [Completion(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        self.output = RequestOutput(
            request_id,
            prompt,
            completions,
            RequestMetrics(time.time()),
            text,
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )

    def sampling(self, step: SequenceStep) -> RowSampling:
        """How a row of these requests is sampled: where the prompt ends, once for each answer."""
        index, siblings = self._index[step.request_id], self.requests[0].siblings
        if not (self._adjusts or siblings or step.prompt_logits):
            return self._plain[index]
        after = slice(step.start + 1, step.start + step.num_tokens + 1)
        targets = self.requests[0].prompt[after] if step.prompt_logits else ()
        seeds = self._seeds if siblings else self._seeds[index : index + 1]
        return RowSampling(self.params, seeds, targets, self._adjustments(step, index))

    def _adjustments(self, step: SequenceStep, index: int) -> list[Adjustment]:
        if not step.samples:
            return []
        answer, prompt = self.requests[index].output, self.output.prompt_token_ids
        answered = step.start + step.num_tokens - len(step.drafts) - len(prompt)
        if not self.params.adjusts(answered):
            return []
        if index not in self._tallies:
            self._tallies[index] = Tally(self.params, prompt, self._all_ends)
        return self._tallies[index].after(answer, step.drafts, answered - len(answer), step.parents)

    def keep_logprobs(self, step: SequenceStep, row: RowOutput) -> None:
        """Notes a row's log probabilities; those of tokens that turn out not to be taken are dropped by `refresh`."""
        output = self.output
        if self.params.logprobs is None and output.prompt_logprobs is None:
            return
        if output.finished:
            return  # by the step before, whose tokens were not read when this one was launched
        if output.prompt_logprobs is not None and step.prompt_logits:  # a second time after a preemption
            first = step.start + 1  # a row's logits are those of the tokens that follow
            output.prompt_logprobs[first : first + step.num_tokens] = row.prompt_logprobs
        if self.params.logprobs is None:
            return
        if len(row.logprobs) == len(self.requests) and step.prefill and not self.requests[0].output:
            for completion, entry in zip(output.outputs, row.logprobs, strict=True):
                completion.logprobs = [entry]
        else:
            completion = output.outputs[self._index[step.request_id]]
            assert completion.logprobs is not None, "log probabilities were asked for"
            if completion.finish_reason is None:
                places = agreed(step, row.tokens) if step.drafts else range(len(row.logprobs))
                completion.logprobs += [row.logprobs[place] for place in places]

    def refresh(self) -> None:
        """Brings the output up to date with the requests."""
        output = self.output
        for i, completion in enumerate(output.outputs):
            if completion.finish_reason is None:
                self._refresh(i, completion)
        output.cache = self.requests[0].report
        if output.time_to_first_token is None and self.requests[0].output:
            since = output.time_to_first_token = time.perf_counter() - self._submitted
            output.metrics.first_token_time = output.metrics.arrival_time + since
        self._note_end()

    def _refresh(self, i: int, completion: Completion) -> None:
        request = self.requests[i]
        reason, error = request.finish_reason, request.error
        completion.token_ids = request.output
        completion.num_draft_tokens = request.num_draft_tokens
        completion.num_accepted_tokens = request.num_accepted_tokens
        if completion.logprobs is not None:
            del completion.logprobs[len(request.output) :]
        if self._texts:
            text = self._texts[i]
            try:
                if reason is FinishReason.STOP and self.params.include_stop_str_in_output:
                    for position in range(text.count, len(request.output)):  # the stop token, which nobody read
                        text.completes_stop(position, request.output[position])
                if reason is not None:
                    text.finish(len(request.output))
            except Exception as failure:
                logger.exception("the tokenizer failed: %s ends", request.request_id)
                reason, error = FinishReason.ERROR, error or f"{type(failure).__name__}: {failure}"
            if text.count <= len(request.output):
                completion.text = text.text
        if reason is FinishReason.STOP:
            completion.stop_reason = self._stop_reason(i)
        completion.finish_reason, completion.error = reason, error

    def _stop_reason(self, i: int) -> str | int | None:
        last = self.requests[i].output[-1]
        return last if last in self._stops else self._texts[i].stop if self._texts else None

    def _note_end(self) -> None:
        metrics = self.output.metrics
        if metrics.finished_time is None and self.output.finished:
            metrics.finished_time = metrics.arrival_time + time.perf_counter() - self._submitted

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends the answers that go on, whatever becomes of their requests."""
        for completion in self.output.outputs:
            if completion.finish_reason is None:
                completion.finish_reason, completion.error = reason, error
        self._note_end()

    @property
    def has_news(self) -> bool:
        """Whether there is more than was handed out."""
        return self._progress() != self._handed_out

    def show(self) -> RequestOutput:
        """The output, its deltas from when it was last handed out."""
        for given, completion in zip(self._given, self.output.outputs, strict=True):
            completion.delta = completion.text[given:]
        return self.output

    def hand_out(self) -> RequestOutput:
        """The output, for the last time with these deltas."""
        output = self.show()
        self._given, self._handed_out = [len(completion.text) for completion in output.outputs], self._progress()
        return output

    def _progress(self) -> list[tuple[int, str | None]]:
        return [(len(completion.token_ids), completion.finish_reason) for completion in self.output.outputs]


def _detokenizer(tokenizer: Tokenizer, params: SamplingParams) -> Detokenizer:
    return Detokenizer(
        tokenizer,
        params.stop or (),
        keep_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens,
    )
