"""Collect the answers to a prompt in its output."""

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
    """Hold a prompt's `params.n` requests; answer i draws with seed + i."""

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
        stops = frozenset(params.stop_token_ids or ())
        ends = stops if params.ignore_eos else stops | end_tokens
        self._model_ends = end_tokens
        self._adjusts = params.adjusts(0)  # if not at token 0, then never
        self._tallies: dict[int, Tally] = {}
        self._submitted = time.perf_counter()
        self._plain = [RowSampling(params, (seed + i,)) for i in range(params.n)]
        self._given = [0] * params.n  # characters
        self._handed_out: list[tuple[int, str | None]] = [(0, None)] * params.n
        self._texts = [
            Detokenizer(
                tokenizer,
                params.stop or (),
                keep_stop=params.include_stop_str_in_output,
                min_tokens=params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
            )
            for _ in range(params.n)
            if tokenizer is not None
        ]
        self.requests = [
            Request(
                f"{request_id}/{i}" if i else request_id,
                prompt,
                params,
                ends,
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

    @property
    def request_id(self) -> str:
        return self.requests[0].request_id

    @property
    def params(self) -> SamplingParams:
        return self.requests[0].params

    def sampling(self, step: SequenceStep) -> RowSampling:
        """Describe the sampling of a batch row."""
        index, siblings = self._index[step.request_id], self.requests[0].siblings
        if not (self._adjusts or siblings or step.prompt_logits):
            return self._plain[index]
        after = slice(step.start + 1, step.start + step.num_tokens + 1)
        targets = self.requests[0].prompt[after] if step.prompt_logits else ()
        seeds = tuple(plain.seeds[0] for plain in self._plain) if siblings else self._plain[index].seeds
        return RowSampling(self.params, seeds, targets, self._adjustments(step, index))

    def _adjustments(self, step: SequenceStep, index: int) -> list[Adjustment]:
        if not step.samples:
            return []
        request, params = self.requests[index], self.params
        answered = step.start + step.num_tokens - len(step.drafts) - len(request.prompt)
        if not params.adjusts(answered):
            return []
        if index not in self._tallies:
            ends = self._model_ends.union(params.stop_token_ids or ())
            self._tallies[index] = Tally(params, request.prompt, ends)
        return self._tallies[index].after(request.output, step.drafts, answered - len(request.output), step.parents)

    def keep_logprobs(self, step: SequenceStep, row: RowOutput) -> None:
        """Add a batch row's log probabilities; `refresh` drops the excess."""
        output = self.output
        if self.params.logprobs is None and output.prompt_logprobs is None:
            return
        if output.finished:
            return  # this step was in flight at the end
        if output.prompt_logprobs is not None and step.prompt_logits:
            first = step.start + 1
            output.prompt_logprobs[first : first + step.num_tokens] = row.prompt_logprobs
        if self.params.logprobs is None:
            return
        if len(row.logprobs) == len(self.requests) and step.prefill and not self.requests[0].output:
            for completion, entry in zip(output.outputs, row.logprobs, strict=True):
                completion.logprobs = [entry]
        else:
            completion = output.outputs[self._index[step.request_id]]
            assert completion.logprobs is not None, "log probabilities were requested"
            if completion.finish_reason is None:
                places = agreed(step, row.tokens) if step.drafts else range(len(row.logprobs))
                completion.logprobs += [row.logprobs[place] for place in places]

    def refresh(self) -> None:
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
                    for position in range(text.count, len(request.output)):  # the scheduler passes no end token
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
        if last in (self.params.stop_token_ids or ()) and (self.params.ignore_eos or last not in self._model_ends):
            return last
        return self._texts[i].stop if self._texts else None

    def _note_end(self) -> None:
        metrics = self.output.metrics
        if metrics.finished_time is None and self.output.finished:
            metrics.finished_time = metrics.arrival_time + time.perf_counter() - self._submitted

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End all open answers, in the output only."""
        for completion in self.output.outputs:
            if completion.finish_reason is None:
                completion.finish_reason, completion.error = reason, error
        self._note_end()

    @property
    def has_news(self) -> bool:
        return self._progress() != self._handed_out

    def show(self) -> RequestOutput:
        """Return the output, with deltas since `hand_out`."""
        for given, completion in zip(self._given, self.output.outputs, strict=True):
            completion.delta = completion.text[given:]
        return self.output

    def hand_out(self) -> RequestOutput:
        """Return the output, and start new deltas."""
        output = self.show()
        self._given, self._handed_out = [len(completion.text) for completion in output.outputs], self._progress()
        return output

    def _progress(self) -> list[tuple[int, str | None]]:
        return [(len(completion.token_ids), completion.finish_reason) for completion in self.output.outputs]
