"""Check the hits of prompts and their reports: chats, junctions and shared prefixes."""

from __future__ import annotations

import pytest

from mambacache.report import Loss
from symbolic import answer, text
from symbolic_driver import Driver, Job, Mix, run

BUDGETS = [1, 7, 64, 200, 8192]
KINDS = [pytest.param({}, id="attention"), pytest.param({"has_attention": False, "num_kv_blocks": 0}, id="recurrent")]


def whole(tokens: int, size: int = 64) -> int:
    return tokens // size * size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("length", [1, 64, 65, 128, 300])
def test_an_identical_prompt_hits_all_but_its_last_token_rounded_down(length: int, budget: int, kind: dict) -> None:
    d = run([Job(text(length)), Job(text(length))], budget=budget, max_num_seqs=1, **kind)
    assert [d.hit(0), d.hit(1)] == [0, whole(length - 1)]
    assert d.cache.hits[1][1].exact is (budget >= 64 or length <= 64)


@pytest.mark.parametrize("length", [129, 300])
def test_blocks_of_128_tokens(length: int) -> None:
    d = run([Job(text(length)), Job(text(length))], budget=100, max_num_seqs=1, block_size=128)
    assert d.hit(1) == whole(length - 1, 128)


@pytest.mark.parametrize("budget", BUDGETS)
def test_strict_reuse_hits_only_blocks_computed_in_whole_chunks(budget: int) -> None:
    d = run([Job(text(300)), Job(text(300))], budget=budget, max_num_seqs=1, strict_reuse=True)
    assert d.hit(1) == (0 if budget < 64 else 256)
    report = d.requests[1, 0].report
    assert report is not None
    only_near = {Loss.ONLY_NEAR: 256} if budget < 64 else {}
    assert report.losses == {Loss.GRANULARITY: 43} | only_near


def test_strict_reuse_keeps_the_prompts_of_chats() -> None:
    """No next turn hits the end of an answer, so that its prompt's state stays."""
    jobs = []
    for chat in range(20):
        first = text(100, chat)
        jobs += [Job(first, 130), Job(first + answer(first, 130, attention=True) + text(50), 1)]
    last = text(100, 99)
    follower = Job(last + answer(last, 130, attention=True) + text(50), 1)
    jobs += [Job(last, 130), *(Job(text(100, seed), 130) for seed in (50, 51)), follower]
    d = run(jobs, max_num_seqs=1, num_state_blocks=7, strict_reuse=True)
    assert [hit.num_tokens for _, hit in d.cache.hits] == [0, 64] * 20 + [0, 0, 0, 64]


@pytest.mark.parametrize("budget", [200, 8192])
def test_the_exact_flag_through_decode_prefill_and_prefill(budget: int) -> None:
    first = text(100)
    second = first + answer(first, 40, attention=True) + text(100, 1)
    jobs = [Job(first, 40), Job(second), Job(second), Job(second, read=False), Job(second)]
    d = run(jobs, max_num_seqs=1, budget=budget)
    hits = [(hit.num_tokens, hit.exact) for _, hit in d.cache.hits]
    assert hits == [(0, True), (128, False), (192, False), (0, True), (192, True)]


def test_a_state_after_near_kv_is_near() -> None:
    # The decoded half of block 1 is near. The second prompt stores a state after it, and the third prompt hits it.
    first = text(100)
    said = answer(first, 100, attention=True)
    followers = [Job(first + said[:60] + text(40, seed), arrives=arrives) for seed, arrives in ((8, 150), (9, 200))]
    d = run([Job(first, 100), *followers], max_num_seqs=1)
    assert [(hit.num_tokens, hit.junction, hit.exact) for _, hit in d.cache.hits] == [
        (0, 0, True), (64, 128, True), (128, 0, False),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [256, 300])
def test_the_third_prompt_hits_all_whole_blocks_of_a_shared_prefix(length: int, kind: dict) -> None:
    shared = text(length)
    jobs = [Job(shared + text(90, seed), arrives=20 * seed) for seed in (1, 2, 3)]
    d = run(jobs, budget=8192, **kind)
    assert [d.hit(i) for i in range(3)] == [0, 0, 256]
    assert d.cache.hits[1][1].junction == 256
    report = d.requests[1, 0].report
    assert report is not None
    assert report.losses == {Loss.NO_STATE: 256} | ({Loss.GRANULARITY: length % 64} if length % 64 else {})


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [None, 1, 3, 100])
@pytest.mark.parametrize(("n", "m"), [(30, 34), (30, 35), (30, 36), (64, 1), (64, 65), (100, 29), (100, 200)])
def test_the_next_turn_of_a_chat_resumes_at_the_last_boundary(n: int, m: int, drafts: int | None, ahead: bool) -> None:
    prompt = text(n)
    turn = prompt + answer(prompt, m, attention=True) + text(20, 5)
    d = run(
        [Job(prompt, m), Job(turn)], max_num_seqs=1, ahead=ahead, draft_errors=drafts,
        max_draft_tokens=0 if drafts is None else 7,
    )  # fmt: skip
    assert d.hit(1) == whole(n + m - 1)


def test_a_prompt_hits_only_its_own_salt() -> None:
    d = run([Job(text(200), salt=salt) for salt in ("a", "b", "a")], max_num_seqs=1)
    assert [d.hit(i) for i in range(3)] == [0, 0, 192]
    reports = [d.requests[i, 0].report for i in range(3)]
    assert [r.ceiling for r in reports if r is not None] == [0, 0, 199]


def test_marked_positions_are_stored_rounded_down() -> None:
    prompt = text(400)
    jobs = [
        Job(prompt, marks=(0, 63, 150, 400)),
        Job(prompt[:140] + text(9, 1), arrives=20),
        Job(prompt[:200], arrives=40),
    ]
    d = run(jobs, budget=8192)
    assert [d.hit(i) for i in range(3)] == [0, 128, 128]


def test_a_mark_in_the_answer_is_stored() -> None:
    d = run([Job(text(30), 200, marks=(128,))], max_num_seqs=1)
    assert sorted(len(tokens) // 4 for _, tokens in d.cache.model.states) == [128, 192]


def test_an_interval_stores_states_inside_a_step_and_in_the_answer() -> None:
    d = run([Job(text(300), 200)], max_num_seqs=1, budget=8192, checkpoint_interval=128)
    assert sorted(len(tokens) // 4 for _, tokens in d.cache.model.states) == [128, 256, 384, 448]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("budget", [64, 200, 8192])
@pytest.mark.parametrize("together", [False, True])
def test_with_the_cache_off_nothing_is_hit_or_stored(budget: int, together: bool, ahead: bool) -> None:
    prompt = text(300)
    d = run([Job(prompt, read=False, store=False)] * 3, budget=budget, ahead=ahead, max_num_seqs=3 if together else 1)
    assert [d.hit(i) for i in range(3)] == [0, 0, 0]
    assert d.cache.stats.states_stored == 0 and not d.cache.model.kv
    report = d.requests[2, 0].report
    assert report is not None
    assert report.losses == ({Loss.NOT_ASKED: report.ceiling} if report.ceiling else {})
    assert report.ceiling == 299 or together


def test_store_false_stores_nothing_and_read_false_hits_nothing() -> None:
    prompt = text(300)
    d = run([Job(prompt, store=False), Job(prompt, read=False), Job(prompt)], max_num_seqs=1)
    assert [d.hit(i) for i in range(3)] == [0, 0, 256]


def test_a_checkpoint_budget_of_0_stores_nothing() -> None:
    d = run([Job(text(300), 100), Job(text(300))], max_num_seqs=1, max_checkpoints=0)
    assert d.hit(1) == 0 and d.cache.stats.states_stored == 0


def test_the_checkpoint_budget_bounds_the_committed_states() -> None:
    jobs = [Job(text(300, seed), 80, marks=(64, 128)) for seed in range(8)]
    d = Driver(Mix(jobs, budget=500, cache={"num_state_blocks": 64, "num_kv_blocks": 256, "max_checkpoints": 3}))
    for index in range(8):
        d.submit(index)
    most = 0
    while not d.scheduler.idle:
        d.step()
        most = max(most, d.cache.stats.state_blocks["committed"])
    assert most == 3


def test_the_report_counts_once_and_in_total() -> None:
    jobs = [Job(text(70) + text(20, seed), 150) for seed in range(1, 6)]
    d = run(jobs, num_state_blocks=7, num_kv_blocks=8, max_num_seqs=4)
    stats = d.cache.stats
    reports = [r.report for r in d.requests.values() if r.report is not None]
    assert stats.requests == len(reports) == 5
    assert stats.preemptions > 0
    assert stats.prompt_tokens == 5 * 90
    assert stats.hit_tokens == sum(report.hit for report in reports)
    assert stats.ceiling_tokens == sum(report.ceiling for report in reports)
    assert sum(stats.losses.values()) == stats.ceiling_tokens - stats.hit_tokens
