"""`PrefixCache` called as a host engine calls it, one request and one step at a time."""

from __future__ import annotations

from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.plan import SequenceStep, StepPlan
from mambacache.report import Hit, Wait


def make(**options: int | bool | None) -> PrefixCache:
    return PrefixCache(CacheConfig(**{"num_state_blocks": 16, "num_kv_blocks": 16, **options}))  # type: ignore[arg-type]


def allocate(cache: PrefixCache, request_id: str, num_tokens: int, drafts: tuple[int, ...] = ()) -> SequenceStep:
    step = cache.allocate(request_id, num_tokens, drafts=drafts)
    assert step is not None
    return step


def run_step(cache: PrefixCache, request_id: str, num_tokens: int, sampled: int | None = None) -> StepPlan:
    plan = cache.plan([allocate(cache, request_id, num_tokens)])
    cache.issued(plan.steps)
    cache.accept(plan.steps, {} if sampled is None else {request_id: [sampled]})
    return plan


def hit(cache: PrefixCache, tokens: list[int]) -> int:
    cache.add("look", tokens)
    found = cache.match("look").num_tokens
    cache.free("look", finished=False)
    return found


def started(cache: PrefixCache, request_id: str, tokens: list[int], **options: bool | str) -> None:
    cache.add(request_id, tokens, **options)  # type: ignore[arg-type]
    assert isinstance(cache.admit(request_id), Hit)


def waits_for(cache: PrefixCache, request_id: str) -> str | None:
    """Whose prefix keeps a request waiting."""
    found = cache.admit(request_id)
    assert isinstance(found, Wait) and found.reason == "prefix" and cache.waits(request_id)
    return found.on
