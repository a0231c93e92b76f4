"""Check single steps: the blocks that they read and write, and their arrays."""

from __future__ import annotations

import numpy as np

from cache_calls import allocate, hit, make, run_step, started
from mambacache.plan import StepPlan
from mambacache.report import Hit
from symbolic import text


def table_of(plan: StepPlan) -> np.ndarray:
    """Return the block table of rows that have equally many pages."""
    starts = plan.arrays["block_table_start"]
    assert len(set(np.diff(starts))) == 1
    return plan.arrays["block_table"].reshape(len(starts) - 1, -1)


def test_decode_folds_in_place_and_rotates_after_a_boundary() -> None:
    cache = make()
    started(cache, "a", text(30))
    src, first = run_step(cache, "a", 30, 0).steps[0].dst, 14
    for position in range(30, 100):
        step = run_step(cache, "a", 1, 1).steps[0]
        assert (step.src, step.log_start) == (src, first)
        assert bool(step.dst) == (position % 16 == 15)
        assert not step.dst or (step.dst == src) == (position != 79)  # at 79 the src is cached
        src, first = (step.dst, 0) if step.dst else (src, first)
    assert hit(cache, cache.tokens("a")[:65]) == 64


def test_a_prefill_step_never_writes_its_src() -> None:
    cache = make(num_state_blocks=2)
    started(cache, "a", text(200))
    before = 0
    for _ in range(20):
        step = run_step(cache, "a", 10).steps[0]
        assert step.src == before != step.dst
        before = step.dst


def test_fork_shares_the_state_and_copies_the_last_page_once_for_each_child() -> None:
    cache = make()
    started(cache, "a", text(100))
    run_step(cache, "a", 100, 1)
    assert cache.fork("a", {"b": 2, "c": 3, "d": 4}, max_running=2) == ["b", "c"]
    steps = [allocate(cache, name, 1) for name in "abc"]
    assert len({step.src for step in steps}) == 1
    assert len({step.log_slot for step in steps}) == 3 and not any(step.dst for step in steps)
    assert {step.log_start for step in steps} == {100 % 16}
    plan = cache.plan(steps)
    table = table_of(plan)
    assert plan.kv_copies == ((table[0, 1], table[1, 1]), (table[0, 1], table[2, 1]))
    assert len(set(table[:, 0])) == 1 and len(set(table[:, 1])) == 3
    assert plan.arrays["tokens"].tolist() == [1, 2, 3]
    cache.issued(plan.steps)
    cache.accept(plan.steps, {"a": [1], "b": [1], "c": [1]})
    assert cache.plan([allocate(cache, name, 1) for name in "abc"]).kv_copies == ()
    found = cache.admit("d")
    assert isinstance(found, Hit) and found.num_tokens == 64


def test_a_fork_of_an_answer_that_has_not_run_copies_the_written_page() -> None:
    cache = make()
    started(cache, "a", text(100))
    written = table_of(run_step(cache, "a", 100, 1))[0, 1]
    cache.fork("a", {"b": 2})
    cache.fork("b", {"c": 3})
    plan = cache.plan([allocate(cache, name, 1) for name in "bc"])
    assert [source for source, _ in plan.kv_copies] == [written, written]
    cache.check()


def test_a_page_is_kept_until_it_is_copied() -> None:
    cache = make(num_kv_blocks=3)
    started(cache, "a", text(100))
    page = table_of(run_step(cache, "a", 100, 1))[0, 1]
    cache.fork("a", {"b": 2})
    cache.free("a", finished=True)
    assert cache.stats.kv_blocks["free"] == 0
    plan = cache.plan([allocate(cache, "b", 1)])
    assert [source for source, _ in plan.kv_copies] == [page]
    cache.issued(plan.steps)
    assert cache.stats.kv_blocks["free"] == 1


def test_fork_without_room_for_a_page() -> None:
    cache = make(num_kv_blocks=2)
    started(cache, "a", text(100))
    run_step(cache, "a", 100, 1)
    assert cache.fork("a", {"b": 2}) == []
    cache.free("a", finished=True)
    found = cache.admit("b")
    assert isinstance(found, Hit) and found.num_tokens == 64
    assert allocate(cache, "b", 37).samples


def test_allocate_gives_none_and_changes_nothing_without_room() -> None:
    cache = make(num_kv_blocks=3, num_state_blocks=3, num_log_slots=2, max_draft_tokens=3)
    started(cache, "a", text(60))
    run_step(cache, "a", 60, 1)
    started(cache, "b", text(60, 1))
    run_step(cache, "b", 60, 1)
    before = cache.stats.kv_blocks, cache.stats.state_blocks
    allocated = allocate(cache, "a", 1, (1, 1, 1))
    assert cache.allocate("b", 1, drafts=[1, 1, 1]) is None  # no block for the state after the drafts
    assert cache.stats.kv_blocks == before[0]
    cache.drop(allocated)
    assert (cache.stats.kv_blocks, cache.stats.state_blocks) == before
    for i in range(4):
        run_step(cache, "a", 1, i)
        run_step(cache, "b", 1, i)
    run_step(cache, "a", 1, 9)
    assert cache.allocate("b", 1) is None  # no page
    cache.preempt("a")
    allocate(cache, "b", 1)


def test_the_arrays_of_a_mixed_batch() -> None:
    cache = make(max_draft_tokens=2)
    for name, length in (("a", 20), ("b", 30)):
        started(cache, name, text(length, ord(name)))
        run_step(cache, name, length, 1)
    started(cache, "c", text(250, 3), checkpoint_at=(64,))  # type: ignore[arg-type]
    run_step(cache, "c", 100)
    steps = [allocate(cache, "c", 150), allocate(cache, "b", 1), allocate(cache, "a", 1, (7, 8))]
    plan = cache.plan(steps)
    arrays = plan.arrays
    steps = [next(step for step in plan.steps if step.request_id == name) for name in "cba"]
    assert [step.request_id for step in plan.steps] == ["b", "a", "c"]
    assert (plan.num_decodes, plan.tokens_per_decode) == (2, 3)
    c, b, a = steps
    expected = {
        "decode_src": [b.src, a.src], "decode_dst": [0, 0], "log_slot": [b.log_slot, a.log_slot],
        "log_start": [14, 4], "log_end": [14, 4], "decode_len": [1, 3], "late_len": [0, 0],
        "query_start_loc": [6, 156], "context_len": [100], "src": [c.src],
        "chunk_seq": [0, 0, 0], "chunk_start": [6, 34, 98], "seq_chunk_start": [0, 3],
        "chunk_dst": [0, c.checkpoints[192], c.dst],
        "tokens": [1, 0, 0, 1, 7, 8, *text(250, 3)[100:]], "positions": [30, 0, 0, 20, 21, 22, *range(100, 250)],
        "kv_len": [31, 23, 250], "block_table_start": [0, 1, 2, 6], "logits_index": [0, 3, 4, 5, 155],
    }  # fmt: skip
    assert {name: arrays[name].tolist() for name in expected} == expected
    table = arrays["block_table"]
    assert arrays["block_table_start"].tolist() == [0, 1, 2, 6] and len(table) == 6
    slots = [table[0] * 64 + 30, -1, -1, *(table[1] * 64 + np.arange(20, 23))]
    slots += [table[2 + p // 64] * 64 + p % 64 for p in range(100, 250)]
    assert arrays["kv_slot"].tolist() == slots
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.int32)}
    assert set(arrays) == {*expected, "block_table", "block_table_start", "kv_slot"}


def test_pages_that_others_wrote_are_not_written_again() -> None:
    cache = make()
    shared = text(200)
    started(cache, "a", shared + text(60, 1))
    run_step(cache, "a", 260, 1)
    cache.free("a", finished=True)
    started(cache, "b", shared + text(60, 2))
    plan = cache.plan([allocate(cache, "b", 260)])
    slots = plan.arrays["kv_slot"]
    assert (slots[:192] == -1).all() and (slots[192:] > 0).all()
    assert (plan.arrays["block_table"] > 0).all()


def test_all_logits_of_a_prompt_on_request() -> None:
    cache = make()
    started(cache, "a", text(100), read=False)
    step = allocate(cache, "a", 60)._replace(prompt_logits=True)
    assert cache.plan([step]).arrays["logits_index"].tolist() == [*range(60)]


def test_a_request_waits_until_a_log_slot_is_free() -> None:
    cache = make(num_log_slots=1)
    for name, seed in (("a", 0), ("b", 1)):
        started(cache, name, text(20, seed))
        run_step(cache, name, 20, 1)
    held = run_step(cache, "a", 1, 1).steps[0].log_slot
    before = cache.stats.kv_blocks, cache.stats.state_blocks
    assert cache.allocate("b", 1) is None and (cache.stats.kv_blocks, cache.stats.state_blocks) == before
    assert cache.stats.log_slots == {"free": 0, "held": 1}
    cache.preempt("a")
    assert cache.stats.log_slots == {"free": 1, "held": 0}
    assert allocate(cache, "b", 1).log_slot == held == 1
    cache.check()
