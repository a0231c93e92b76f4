"""The answers to one prompt, as they are generated."""

from __future__ import annotations

import time

from mambacache.config import SamplingParams
from mambacache.outputs import Completion, RequestOutput
from mambacache.plan import SequenceStep
from mambacache.runner.model_runner import RowOutput
from mambacache.runner.sampler import RowSampling
from mambacache.scheduler.request import Request
from mambacache.text import Detokenizer, Tokenizer


class Answers:
    """`params.n` requests on one prompt, and the output that is made of them.

    Args:
        end_tokens: that end an answer.
        tokenizer: None where there is no text.
        seed: of the first answer's draws; the others count on from it.
    """

    def __init__(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        end_tokens: frozenset[int],
        tokenizer: Tokenizer | None,
        seed: int,
    ) -> None:
        self.params = params
        self._submitted = time.perf_counter()
        self._seeds = tuple(seed + i for i in range(params.n))
        self._given = [0] * params.n  # characters of each text that were handed out
        self._texts = [Detokenizer(tokenizer, params.stop) for _ in range(params.n)] if tokenizer is not None else []
        self.requests = [
            Request(
                f"{request_id}/{i}" if i else request_id,
                prompt,
                params,
                end_tokens,
                self._texts[i].push if self._texts else None,
            )
            for i in range(params.n)
        ]
        self.requests[0].siblings = self.requests[1:]
        completions = [Completion(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
        self.output = RequestOutput(
            request_id, prompt, completions, prompt_logprobs=None if params.prompt_logprobs is None else []
        )

    def sampling(self, step: SequenceStep) -> RowSampling:
        """How a row of these requests is sampled: where the prompt ends, once for each answer."""
        after = slice(step.start + 1, step.start + step.num_tokens + 1)
        targets = self.requests[0].prompt[after] if step.prompt_logits else ()
        index = self._index(step)
        seeds = self._seeds if self.requests[0].siblings else self._seeds[index : index + 1]
        return RowSampling(self.params, seeds, targets)

    def keep_logprobs(self, step: SequenceStep, row: RowOutput) -> None:
        """Notes a row's log probabilities; those of tokens that turn out not to be taken are dropped by `refresh`."""
        output = self.output
        if output.prompt_logprobs is not None and step.prompt_logits:  # a second time after a preemption
            output.prompt_logprobs[step.start : step.start + step.num_tokens] = row.prompt_logprobs
        if self.params.logprobs is None:
            return
        if len(row.logprobs) == len(self.requests) and step.prefill and not self.requests[0].output:
            for completion, entry in zip(output.outputs, row.logprobs, strict=True):
                completion.logprobs = [entry]
        else:
            completion = output.outputs[self._index(step)]
            assert completion.logprobs is not None, "log probabilities were asked for"
            completion.logprobs += row.logprobs

    def refresh(self) -> None:
        """Brings the output up to date with the requests."""
        output = self.output
        for i, (request, completion) in enumerate(zip(self.requests, output.outputs, strict=True)):
            completion.token_ids = request.output
            if completion.logprobs is not None:
                del completion.logprobs[len(request.output) :]
            if self._texts:
                if request.finish_reason is not None:
                    self._texts[i].finish()
                completion.text = self._texts[i].text
            completion.finish_reason, completion.error = request.finish_reason, request.error
        output.cache = self.requests[0].report
        if output.time_to_first_token is None and self.requests[0].output:
            output.time_to_first_token = time.perf_counter() - self._submitted

    def hand_out(self) -> RequestOutput:
        """The output, its deltas from the last call on."""
        for i, completion in enumerate(self.output.outputs):
            completion.delta = completion.text[self._given[i] :]
            self._given[i] = len(completion.text)
        return self.output

    def _index(self, step: SequenceStep) -> int:
        return next(i for i, request in enumerate(self.requests) if request.request_id == step.request_id)
