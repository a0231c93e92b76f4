"""Check the states that are kept when blocks are few: those that will save most, and no spare states."""

from __future__ import annotations

from array import array
from collections import deque

import pytest

from mambacache.cache import states
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.retention import AGES, SPARE, Kind, Policy, Record, Wish
from mambacache.config import CacheConfig, SamplingParams
from mambacache.plan import StepPlan
from mambacache.scheduler.request import Request
from mambacache.scheduler.scheduler import Scheduler
from symbolic import answer, text
from symbolic_driver import Driver, Job, Mix, run


def cached(d: Driver) -> list[int]:
    """Return the positions of the cached states."""
    return sorted(len(tokens) // 4 for _, tokens in d.cache.model.states)


def finds(d: Driver, prompt: list[int]) -> int:
    """Return the hit of a prompt."""
    d.cache.add("look", prompt)
    hit = d.cache.match("look").num_tokens
    d.cache.free("look", finished=False)
    return hit


def resume(d: Driver, *jobs: Job) -> None:
    """Run more jobs, one after the other."""
    for job in jobs:
        d.mix.jobs.append(job)
        d.submit(len(d.mix.jobs) - 1)
        while not d.scheduler.idle:
            d.step()
    d.check()


def test_wishes_between_two_positions() -> None:
    retention = Policy(64, 128, 10)
    wishes = {64: Wish.TAIL, 256: Wish.MARKED, 320: Wish.JUNCTION}
    assert retention.wishes((), frozenset(), 0, (1, 64)) == {0: Wish.TAIL}
    assert retention.wishes((), frozenset(), 0, (65, 128)) == {64: Wish.TAIL}
    found = retention.between(wishes, 64, 512)
    assert sorted(found) == [(Wish.JUNCTION, 320), (Wish.MARKED, 256), (Wish.INTERVAL, 128), (Wish.INTERVAL, 384)]
    assert retention.wish(wishes, 256) is Wish.MARKED
    assert retention.wish(wishes, 128) is Wish.INTERVAL
    assert retention.wish(wishes, 192) is None
    promised, tail, junction, marked, interval, none = [retention.kind(wish) for wish in (*Wish, None)]
    assert promised is junction is marked is Kind.BRANCH and tail is Kind.TURN and interval is none is None


def test_only_the_last_boundary_of_an_answer_is_kept() -> None:
    d = run([Job(text(100), 400)], max_num_seqs=1)
    assert cached(d) == [64, 448]


def test_a_prompt_that_ends_on_a_boundary_keeps_its_last_state_too() -> None:
    d = run([Job(text(128), 100)], max_num_seqs=1)
    assert cached(d) == [64, 128, 192]


def test_a_decode_state_in_use_is_not_given_up() -> None:
    prompt = text(30)
    said = answer(prompt, 200, attention=True)
    d = Driver(Mix([Job(prompt, 200), Job(prompt + said[:40], 2)], cache={"num_state_blocks": 16, "num_kv_blocks": 16}))
    d.submit(0)
    while finds(d, prompt + said[:40]) < 64:
        d.step()
    d.submit(1)
    while not d.scheduler.idle:
        d.step()
    d.check()
    assert d.hit(1) == 64
    assert cached(d) == [64, 192]


@pytest.mark.parametrize("ahead", [False, True])
def test_long_answers_do_not_evict_shared_prefixes(ahead: bool) -> None:
    """Let 256 answers cross boundaries beside 20 prefixes, with two blocks to spare."""
    cache = PrefixCache(CacheConfig(num_state_blocks=256 + 20 + 2, num_kv_blocks=4000))
    scheduler = Scheduler(cache, max_num_batched_tokens=8192, max_num_seqs=256)
    prefixes = [text(100, seed) for seed in range(20)]

    plans: deque[StepPlan] = deque()

    def step() -> StepPlan | None:
        plan = scheduler.schedule()
        if plan is not None:
            scheduler.issued(plan)
            plans.append(plan)
        if plan is None or len(plans) > ahead:
            read = plans.popleft()
            scheduler.update(read, [[len(row.request_id)] * row.samples for row in read.steps])
        return plan

    for i, prefix in enumerate(prefixes):
        scheduler.add(Request(f"prefix {i}", prefix, SamplingParams(max_tokens=1)))
    while not scheduler.idle:
        step()
    for i in range(256):
        scheduler.add(Request(f"answer {i}", [30 + i % 8, *text(i % 50, i)], SamplingParams(max_tokens=1000)))
    for _ in range(200):
        plan = step()
    assert plan is not None and plan.num_decodes == 256
    assert cache.stats.preemptions == 0
    for prefix in prefixes:
        cache.add("look", prefix)
        assert cache.match("look").num_tokens == 64
        cache.free("look", finished=False)


def test_an_interval_of_a_block_on_a_long_prompt_leaves_other_tails() -> None:
    prompts = [text(100, seed) for seed in range(20)]
    d = run([*(Job(prompt, 1) for prompt in prompts), Job(text(3000, 30), 1)], max_num_seqs=1, num_state_blocks=24,
            checkpoint_interval=64, budget=1000)  # fmt: skip
    assert [finds(d, prompt) for prompt in prompts] == [64] * 20
    assert finds(d, text(3000, 30)) == 2944


def chain_of(d: Driver, prompt: list[int]) -> list[bytes]:
    return list(d.cache._admission.chain(array("i", prompt), "", {}))


def record_of(d: Driver, prompt: list[int], depth: int) -> Record:
    """Return the record of a cached state, by the state's depth in blocks."""
    block_hash = chain_of(d, prompt)[depth]
    assert d.cache.states.lookup(block_hash) is not None
    return d.cache._admission.chains.reuse.records[block_hash]


def marked_everywhere(length: int, seed: int, salt: str = "") -> Job:
    return Job(text(length, seed), 1, marks=tuple(range(0, length, 64)), salt=salt)


@pytest.mark.parametrize("budget", [200, 1000, 8192])
@pytest.mark.parametrize("num_state_blocks", [16, 24, 100])
def test_a_prompt_with_marks_everywhere_leaves_other_prefixes(num_state_blocks: int, budget: int) -> None:
    prompts = [text(450, seed) for seed in range(10)]
    d = run([Job(prompt, 1) for prompt in prompts], max_num_seqs=1, num_state_blocks=num_state_blocks,
            num_kv_blocks=400, budget=budget)  # fmt: skip
    resume(d, *(Job([*prompt, 1], 1) for prompt in prompts))
    resume(d, marked_everywhere(4500, 20))
    assert [finds(d, prompt) for prompt in prompts] == [448] * 10
    assert finds(d, text(4500, 20)) == 4480


@pytest.mark.parametrize("salts", [["a"] * 12, ["a", "b", "c"] * 4])
def test_the_marks_of_a_salt_hold_a_quarter_of_the_states(salts: list[str]) -> None:
    d = run([marked_everywhere(1200, seed, salt) for seed, salt in enumerate(salts)], max_num_seqs=1,
            num_state_blocks=48, num_kv_blocks=1000)  # fmt: skip
    marks = d.cache._admission.states.marks
    assert {salt: len(held) for salt, held in marks._salts.items()} == dict.fromkeys(salts, 12)
    pool, records = d.cache.states, d.cache._admission.chains.reuse.records
    for block, block_hash in enumerate(pool.hashes):
        if block_hash is not None and pool.group[block] != SPARE:  # a mark, or a tail that was a mark
            depth = d.cache._admission.pool.prefix[block][1]
            assert any(marks.has(salt, block_hash) for salt in salts) or depth == records[block_hash].turn.tail


@pytest.mark.parametrize("position", [64, 128, 320])
def test_a_mark_is_a_branch_wherever_it_stands(position: int) -> None:
    """Mark a position before the tail, at the branch from another prompt, and at the tail."""
    prompt = [*text(150, 1), *text(200, 2)]
    d = run([Job(text(200, 1), 1)], num_state_blocks=20)
    resume(d, Job(prompt, 1, marks=(position,)))
    assert record_of(d, prompt, position // 64).kind is Kind.BRANCH


def test_a_mark_takes_a_state_that_is_cached_already() -> None:
    """The second prompt marks the tail of the first, and the third prompt continues the second."""
    first, said = text(150), [answer(text(150), 70, attention=True)]
    second = [*first, *said[0], 1, 2]
    jobs = [Job(first, 70), Job(second, 5, marks=(128,)), Job([*second, *text(40)], 5)]
    d = run(jobs, max_num_seqs=1, num_state_blocks=20)
    assert record_of(d, first, 2).kind is Kind.BRANCH and d.cache._admission.states.marks.has("", chain_of(d, first)[2])


def test_a_hit_gives_a_state_the_class_of_states_that_were_used() -> None:
    d = run([Job(text(150), 1), Job([*text(150), *text(200, 1)], 1)], max_num_seqs=1, num_state_blocks=20)
    assert d.hit(1) == 128
    record, block = record_of(d, text(150), 2), d.cache.states.lookup(chain_of(d, text(150))[2])
    assert block is not None and record.uses == 1 and d.cache.states.group[block] // 2 - 1 == record.place


def test_without_a_fresh_block_an_unrequested_state_is_overwritten() -> None:
    d = run([Job(text(30), 130)], num_state_blocks=2, max_num_seqs=1)
    assert cached(d) == [128]
    other = Job(text(100, 1), 1)
    d = Driver(Mix([other, Job(text(30), 130)], max_num_seqs=1, cache={"num_state_blocks": 2, "num_kv_blocks": 9}))
    d.submit(0)
    while not d.scheduler.idle:
        d.step()
    d.submit(1)
    while not d.scheduler.idle:
        d.step()
    d.check()
    assert cached(d) == [64] and finds(d, other.prompt) == 64  # the tail of `other` stays
    assert d.cache.stats.preemptions == 0


def test_a_tail_is_classed_by_whether_its_answer_has_a_state() -> None:
    d = run([Job(text(100), 130), Job(text(100, 1), 5)], max_num_seqs=1)
    chat = [*text(100), *answer(text(100), 130, attention=True)]
    assert cached(d) == [64, 64, 192]
    assert record_of(d, chat, 1).kind is Kind.TAIL and record_of(d, chat, 3).kind is Kind.TURN
    assert record_of(d, text(100, 1), 1).kind is Kind.TURN


def test_under_strict_reuse_the_end_of_an_answer_has_no_value() -> None:
    d = run([Job(text(100), 130)], max_num_seqs=1, strict_reuse=True)
    chat, pool = [*text(100), *answer(text(100), 130, attention=True)], d.cache.states
    assert cached(d) == [64, 192] and record_of(d, chat, 1).kind is Kind.TURN
    assert [pool.group[pool.lookup(chain_of(d, chat)[depth]) or 0] != SPARE for depth in (1, 3)] == [True, False]


def test_where_a_step_ends_a_state_competes_if_it_saves_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "LONG", 128)
    d = run([Job(text(400), 1)], max_num_seqs=1, num_state_blocks=20, budget=64)
    pool, chain = d.cache.states, chain_of(d, text(400))
    assert cached(d) == [64, 128, 192, 256, 320, 384]
    assert [pool.group[pool.lookup(h) or 0] != SPARE for h in chain[1:7]] == [False, True, False, True, False, True]
    assert [record_of(d, text(400), depth).kind for depth in (2, 4, 6)] == [Kind.STEP, Kind.STEP, Kind.TURN]


def test_the_state_above_an_evicted_state_takes_its_value_until_it_is_hit() -> None:
    d = run([Job(text(100), 1), Job([*text(100), *text(200, 1)], 1)], max_num_seqs=1, num_state_blocks=20)
    reuse, pool, long = d.cache._admission.chains.reuse, d.cache.states, [*text(100), *text(200, 1)]
    above, evicted = (pool.lookup(block_hash) for block_hash in (chain_of(d, long)[1], chain_of(d, long)[4]))
    assert above is not None and evicted is not None
    reuse.values[record_of(d, long, 4).place], place = [1.0] * AGES, record_of(d, long, 4).place
    pool._evict(evicted)
    assert pool.group[above] // 2 - 1 == place != record_of(d, long, 1).place
    resume(d, Job(text(90), 1))
    assert pool.group[above] // 2 - 1 == record_of(d, long, 1).place


@pytest.mark.parametrize("ahead", [False, True])
def test_two_answers_in_two_blocks_give_up_their_boundaries(ahead: bool) -> None:
    d = run([Job(text(50, seed), 100) for seed in range(2)], num_state_blocks=2, ahead=ahead)
    assert cached(d) == [] and d.cache.stats.preemptions == 0


@pytest.mark.parametrize("learned", [False, True])
def test_the_end_of_an_answer_evicts_a_tail_where_chains_go_on(learned: bool) -> None:
    cache = {"num_state_blocks": 2, "num_kv_blocks": 9}
    d = Driver(Mix([Job(text(100, 1), 1), Job(text(30), 130)], max_num_seqs=1, cache=cache))
    for _ in range(20 * learned):
        d.cache._admission.chains._branches.note(0)
    for job in (0, 1):
        d.submit(job)
        while not d.scheduler.idle:
            d.step()
    d.check()
    assert finds(d, text(100, 1)) == 64 * (not learned)


def test_a_requested_state_may_evict_a_tail() -> None:
    cache = {"num_state_blocks": 2, "num_kv_blocks": 9}
    d = Driver(Mix([Job(text(100, 1), 1), Job(text(30), 130, marks=(64,))], max_num_seqs=1, cache=cache))
    d.submit(0)
    d.submit(1)
    while not d.scheduler.idle:
        d.step()
    d.check()
    assert cached(d) == [64] and finds(d, text(100, 1)) == 0


def test_within_the_checkpoint_budget_only_requested_states_evict_tails() -> None:
    tails = [Job(text(100, seed), 1) for seed in (1, 2)]
    d = run([*tails, Job(text(20, 3), 200)], max_num_seqs=1, max_checkpoints=2)
    assert [finds(d, job.prompt) for job in tails] == [64, 64]
    resume(d, Job(text(100, 4), 1))
    assert [finds(d, job.prompt) for job in tails] == [0, 64]


def test_a_hit_refreshes_only_the_checkpoint_it_consumed() -> None:
    jobs = [Job(text(200), 1, marks=(64, 128)), Job(text(100, 1), 1)]
    d = run(jobs, max_num_seqs=1, num_state_blocks=8, budget=8192)
    before = [record_of(d, text(200), depth) for depth in (1, 2, 3)]
    resume(d, Job(text(150), 1))
    assert d.hit(2) == 128
    after = [record_of(d, text(200), depth) for depth in (1, 2, 3)]
    assert after[0] is before[0] and after[2] is before[2]
    assert (after[1].used, after[1].uses) == (before[1].used + 4, 1)


def test_of_equally_old_states_those_that_save_least_are_evicted_first() -> None:
    d = run([Job(text(500), 1, marks=(64, 192))], max_num_seqs=1, num_state_blocks=12, budget=8192)
    for left in ([64, 192, 448], [192, 448], [448], []):
        depths = enumerate(chain_of(d, text(500)))
        assert [64 * depth for depth, block_hash in depths if d.cache.states.lookup(block_hash)] == left
        d.cache.states.evict()


def test_kv_is_evicted_from_its_end_with_its_states() -> None:
    d = run([Job(text(300), 1, marks=(64, 128))], max_num_seqs=1, num_kv_blocks=6, budget=8192)
    assert cached(d) == [64, 128, 256]
    resume(d, Job(text(200, 1), 1))  # takes four blocks, two of them free
    assert finds(d, text(300)) == 128
    assert d.cache.stats.kv_evicted == 2 and d.cache.stats.states_evicted == 1


@pytest.mark.parametrize("finished", [True, False])
def test_the_last_state_of_an_answer_is_kept_for_the_next_turn_once_it_finished(finished: bool) -> None:
    d = run([Job(text(30), 50, aborts=None if finished else 45)], max_num_seqs=1)
    assert cached(d) == [64]
    block = next(block for block, block_hash in enumerate(d.cache.states.hashes) if block_hash is not None)
    assert (d.cache.states.group[block] != SPARE) == finished


def test_a_chat_outlives_the_cold_states_of_others() -> None:
    first = text(30)
    turn = first + answer(first, 50, attention=True) + [1]
    d = run([Job(first, 50)], max_num_seqs=1, num_state_blocks=4)
    resume(d, *(Job(text(20, seed), 100) for seed in range(1, 3)))
    assert finds(d, turn) == 64
