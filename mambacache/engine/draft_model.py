"""Drafts from a smaller model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from secrets import token_hex
from weakref import WeakKeyDictionary

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import EngineConfig, SamplingParams
from mambacache.engine.answers import Answers
from mambacache.engine.prompts import Limits
from mambacache.engine.stepper import Stepper, alone
from mambacache.scheduler.request import Request

DRAFT_SHARE = 0.1
"""Of what the weights of both models leave for states and KV, how much is for those of the one that drafts."""


def draft_config(config: EngineConfig) -> EngineConfig | None:
    """That of the model that drafts; None if none does."""
    if config.speculative is None or config.speculative == "ngram":
        return None
    return EngineConfig(
        config.speculative,
        device=config.device,
        dtype=config.dtype,
        state_dtype=config.state_dtype,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=config.enforce_eager,
    )


class DraftModel:
    """A `DraftSource` that gives what a model of its own answers, greedily, to all that is known of each request.

    Each call asks anew, for all its requests side by side, and none of them outlives it: where a state was when guesses
    turned out wrong need not be known, since its own prefix cache has all but the last tokens, 64 and the new ones at
    most. Requests share there what their salts let them share; what one shall not store it shares with none.

    Args:
        stepper: runs the model, for this source alone.
        cache: what it caches.
        limits: what it can take; a request that is longer, or holds tokens that it does not know, gets no guess.
        stores: whether any request is to be found by others.
    """

    def __init__(self, stepper: Stepper, cache: PrefixCache, limits: Limits, stores: bool) -> None:
        self._stepper = stepper
        self._cache = cache
        self._limits = limits
        self._stores = stores
        self._salts: WeakKeyDictionary[Request, str] = WeakKeyDictionary()  # of requests that share with none

    @alone
    def __call__(self, limits: Mapping[Request, int]) -> list[Sequence[int]]:
        """For each request as many tokens as its limit says; fewer where the model fails.

        Raises:
            RuntimeError: the device has failed, nothing can run, or this source is closed.
        """
        stepper, asked = self._stepper, {}
        for request, limit in limits.items():
            with suppress(ValueError):
                asked[request] = self._answers(request, limit)
        stepper.left.extend(asked.values())  # whatever is raised, none of them outlives this call
        for answers in asked.values():
            stepper.add(answers)
        while not all(answers.output.finished for answers in asked.values()):
            stepper.advance()
        return [asked[request].requests[0].output if request in asked else () for request in limits]

    def _answers(self, request: Request, limit: int) -> Answers:
        name = request.request_id
        tokens = self._limits.tokens_of([*request.prompt, *request.output], name, None)
        salt = request.params.salt
        if not (self._stores and request.params.store_cache):
            salt = self._salts.setdefault(request, token_hex(16))
        params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, salt=salt)
        return Answers(name, tokens, self._limits.fit(params, len(tokens), name), frozenset(), None, seed=0)

    def reset_prefix_cache(self) -> None:
        """Forgets all that is cached."""
        self._cache.reset()

    def close(self) -> None:
        """Gives the memory of model and pools back; twice is no matter."""
        if not self._stepper.closed:
            self._stepper.close()
