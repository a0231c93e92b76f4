"""Check rows with drafts: boundaries at every offset of a step, and the src of the next step."""

from __future__ import annotations

import pytest

from cache_calls import allocate, hit, make, run_step, started
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.config import CacheConfig
from mambacache.plan import PLACEHOLDER
from mambacache.report import Hit
from symbolic import answer, text
from symbolic_driver import Driver, Job, Mix, run


def drive(job: Job, wrong_every: int, drafts: int, state_blocks: int = 64) -> Driver:
    cache = {"num_state_blocks": state_blocks, "num_kv_blocks": 64, "max_draft_tokens": drafts}
    d = Driver(Mix([job], draft_errors=wrong_every, cache=cache))
    d.submit(0)
    d.step()
    return d


def cached(d: Driver) -> list[int]:
    return sorted(len(tokens) // 4 for _, tokens in d.cache.model.states)


@pytest.mark.parametrize("tokens", range(2, 9))
def test_a_boundary_at_every_offset_is_committed_once_accepted(tokens: int) -> None:
    for offset in range(tokens):
        d = drive(Job(text(63 - offset), 40), 1000, tokens - 1)
        d.step()
        assert cached(d) == [64], f"offset {offset}"
        while not d.scheduler.idle:
            d.step()
        d.check()
        d.mix.jobs.append(Job([*text(63 - offset), *answer(text(63 - offset), 40, attention=True), 1, 2]))
        d.submit(1)
        while not d.scheduler.idle:
            d.step()
        d.check()
        assert d.hit(1) == 64


@pytest.mark.parametrize("tokens", range(2, 9))
def test_a_boundary_after_a_rejected_draft_is_not_committed(tokens: int) -> None:
    for offset in range(tokens):
        d = drive(Job(text(63 - offset), 40), 1, tokens - 1)
        d.step()
        assert cached(d) == ([64] if offset == 0 else []), f"offset {offset}"
        while not d.scheduler.idle:
            d.step()
        d.check()
        assert cached(d) == [64]


@pytest.mark.parametrize("prompt", range(9, 17))
@pytest.mark.parametrize("accepted", range(8))
def test_the_next_step_reads_the_state_and_the_accepted_log_entries(prompt: int, accepted: int) -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=2, num_kv_blocks=4, max_draft_tokens=7))
    cache.add("a", text(prompt))
    assert isinstance(cache.admit("a"), Hit)
    first = cache.allocate("a", prompt)
    assert first is not None
    plan = cache.plan([first])
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [30]})
    verify = cache.allocate("a", 1, drafts=range(7))
    assert verify is not None and verify.drafts == tuple(range(min(7, 15 - prompt % 16)))
    assert (verify.src, verify.log_start) == (first.dst, prompt % 16)
    assert bool(verify.dst) == ((prompt + verify.num_tokens) % 16 == 0)
    assert verify.dst != verify.src or not verify.drafts
    plan = cache.plan([verify])
    cache.issued(plan.steps)
    taken = list(verify.drafts[:accepted])
    cache.accept(plan.steps, {"a": [*taken, 31]})
    after = cache.allocate("a", 1)
    assert after is not None and after.start == prompt + 1 + len(taken)
    folded = verify.dst and len(taken) == len(verify.drafts)
    assert (after.src, after.log_start) == ((verify.dst, 0) if folded else (first.dst, prompt % 16))
    assert after.log_slot == verify.log_slot


def test_a_state_past_the_accepted_tokens_is_never_reached() -> None:
    """The state was computed from a rejected draft, and its boundary was reached (vllm#43559, vllm#53912)."""
    cache = make(num_state_blocks=2, max_draft_tokens=7)
    started(cache, "a", text(60))
    run_step(cache, "a", 60, 30)
    plan = cache.plan([allocate(cache, "a", 1, (31, 32, 33))])
    assert plan.steps[0].dst != plan.steps[0].src and plan.steps[0].num_tokens == 4
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [31, 32, 5]})  # the last draft was wrong
    tokens = [*text(60), 30, 31, 32]
    assert hit(cache, [*tokens, 33, 1]) == hit(cache, [*tokens, 5, 1]) == 0
    assert cache.stats.state_blocks == {"free": 1, "writing": 1, "committed": 0, "evictable": 0}
    run_step(cache, "a", 1, 6)  # the right fourth token ends the block now, and overwrites the log entry
    assert (hit(cache, [*tokens, 33, 1]), hit(cache, [*tokens, 5, 1])) == (0, 64)
    cache.check()


def test_no_hash_names_a_state_before_its_drafts_are_accepted() -> None:
    """No lookup finds it while its row is planned or its drafts are not accepted (vllm#56525)."""
    cache = make(max_draft_tokens=7)
    started(cache, "a", text(60))
    run_step(cache, "a", 60, 30)
    tokens = [*text(60), 30, 31, 32, 33]
    row = allocate(cache, "a", 1, (31, 32, 33))
    assert hit(cache, [*tokens, 1]) == 0
    plan = cache.plan([row])
    assert hit(cache, [*tokens, 1]) == 0
    cache.issued(plan.steps)
    assert hit(cache, [*tokens, 1]) == 0
    cache.accept(plan.steps, {"a": [31, 32, 33, 34]})
    assert hit(cache, [*tokens, 1]) == 64
    cache.free("a", finished=False)  # a request that ends on the boundary leaves its state
    assert hit(cache, [*tokens, 1]) == 64


@pytest.mark.parametrize("wrong_every", [1, 3, 1000])
def test_two_states_are_enough_for_drafts(wrong_every: int) -> None:
    jobs = [Job(text(40 + 11 * seed, seed), 90) for seed in range(4)]
    d = run(jobs, num_state_blocks=2, max_draft_tokens=7, draft_errors=wrong_every, budget=64)
    assert all(len(request.output) == 90 for request in d.requests.values())


def test_drafts_are_cut_where_a_fold_finds_no_block() -> None:
    jobs = [Job(text(50, seed), 60) for seed in range(3)]
    d = run(jobs, num_state_blocks=3, max_draft_tokens=7, draft_errors=1000, budget=64)
    assert d.cache.stats.preemptions == 0
    assert max(len(request.output) for request in d.requests.values()) == 60


def test_drafts_never_exceed_max_tokens_or_the_budget() -> None:
    d = Driver(Mix([Job(text(10), 4)], budget=3, draft_errors=1000, cache={
        "num_state_blocks": 20, "num_kv_blocks": 1, "max_draft_tokens": 7,
    }))  # fmt: skip
    d.submit(0)
    sizes = []
    while not d.scheduler.idle:
        d.step()
        sizes.append(d.tokens_computed)
    assert [b - a for a, b in zip([0, *sizes], sizes, strict=False)] == [3, 3, 3, 1, 3]


def test_a_stop_token_inside_the_drafts_ends_the_answer_there() -> None:
    prompt = text(57)
    said = answer(prompt, 40, attention=True)
    stop = next(token for i, token in enumerate(said) if i > 2 and token not in said[:i])
    d = run([Job(prompt, 40, stop=(stop,))], max_draft_tokens=7, draft_errors=1000)
    assert d.requests[0, 0].output == said[: said.index(stop) + 1]
    assert d.tokens_computed > len(prompt) + len(d.requests[0, 0].output) - 1


def test_a_state_that_ends_with_the_stop_token_is_committed_and_reached() -> None:
    # The stop token, an accepted draft, fills the block: its state and its KV serve the next turn.
    prompt = text(60, 3)
    said = answer(prompt, 4, attention=True)
    assert said[3] not in said[:3]
    d = run(
        [Job(prompt, 40, stop=(said[3],)), Job(prompt + said + [1, 2, 3])],
        max_num_seqs=1, max_draft_tokens=7, draft_errors=1000,
    )  # fmt: skip
    assert d.requests[0, 0].output == said
    assert d.hit(1) == 64


@pytest.mark.parametrize("given", range(1, 5))
def test_returned_tokens_tell_how_many_device_drafts_were_right(given: int) -> None:
    """The device drafts three tokens. The returned tokens tell the cache how many drafts were right."""
    cache = PrefixCache(CacheConfig(num_state_blocks=8, has_attention=False, max_draft_tokens=3))
    cache.add("r", range(60))
    cache.admit("r")
    for tokens, drafts, gives in ((60, (), [1]), (1, (PLACEHOLDER,) * 3, [*range(2, 2 + given)])):
        step = cache.allocate("r", tokens, drafts=drafts)
        assert step is not None and step.drafts == drafts
        steps = cache.plan([step]).steps
        cache.issued(steps)
        cache.accept(steps, {"r": gives})
        cache.check()
    assert cache.progress("r").computed == 60 + given
    assert list(cache.tokens("r"))[60:] == [1, *range(2, 2 + given)]
    after = cache.allocate("r", 1)
    assert after is not None and after.start == 60 + given and (after.src == step.dst) == (given == 4)
