"""Check the files behind a host tier, one transfer at a time: writes, reads, and the requests that wait."""

from __future__ import annotations

import pytest

from cache_calls import hit, run_step
from mambacache.cache.prefix_cache import PrefixCache
from mambacache.cache.retention import NEEDED, SPARE
from mambacache.config import CacheConfig
from mambacache.plan import Transfer
from mambacache.report import Wait
from symbolic import text
from symbolic_files import SymbolicFiles
from test_cache_tier import LENGTH, ROOM, answer, finish
from watched_cache import Watched, under_way

LARGE = {**ROOM, "num_state_blocks": 140, "num_kv_blocks": 140}


def on(files: SymbolicFiles, **room: int) -> PrefixCache:
    return Watched(CacheConfig(**{**LARGE, **room}), files)  # type: ignore[no-any-return]


def end_all(cache: PrefixCache, flush: bool = False, failed: bool = False) -> list[Transfer]:
    """End transfers until none is due. Written blocks are in files, unless `failed`."""
    ended: list[Transfer] = []
    while found := cache.transfers(flush=flush):
        for transfer in found:
            keep(cache, transfer, failed and bool(transfer.files))
            ended.append(transfer)
    return ended


def keep(cache: PrefixCache, transfer: Transfer, failed: bool = False) -> None:
    files = cache._admission._files
    assert isinstance(files, SymbolicFiles)
    for file in transfer.files if not transfer.to_host and not failed else ():
        files.kept[file.kind, file.block_hash] = file.exact, file.born, []
        files.writers[file.kind, file.block_hash] = file.writer
    cache.transferred(transfer, failed=failed)


def stored(count: int = 2) -> SymbolicFiles:
    """Return the files of a closed process that answered `count` prompts."""
    files = SymbolicFiles()
    cache = on(files, state_bytes=100, page_bytes=10)
    for seed in range(count):
        answer(cache, str(seed), seed)
    assert not files.kept and cache.stats.bytes_to_disk == 0
    end_all(cache, flush=True)
    assert len(files.kept) == 4 * count and cache.stats.bytes_to_disk == 130 * count  # a state and 3 pages each
    assert end_all(cache, flush=True) == [], "the files are there already"
    files.restarted()
    return files


def reading(cache: PrefixCache, name: str, seed: int = 0) -> Transfer:
    """Return the read that a request waits for."""
    cache.add(name, text(LENGTH, seed))
    assert cache.admit(name) == Wait("loading", name, 192) and cache.waits(name)
    return next(transfer for transfer in cache.transfers() if transfer.files)


def test_a_read_is_followed_by_a_load() -> None:
    cache = on(stored(), state_bytes=100, page_bytes=10)
    read = reading(cache, "a")
    assert read.to_host and not (read.states or read.pages)
    assert [file.kind for file in read.files] == ["state", "kv", "kv", "kv"]
    cache.transferred(read)
    assert not cache.waits("a") and cache.admit("a") == Wait("loading", "a", 192)
    load = next(transfer for transfer in cache.transfers() if not transfer.to_host)
    assert sorted(slot for _, slot in load.pages) == sorted(file.slot for file in read.files[1:])
    cache.transferred(load)
    assert finish(cache, "a") == 192
    stats = cache.stats
    assert (stats.disk_hit_tokens, stats.host_hit_tokens, stats.bytes_from_disk, stats.bytes_from_host) == (
        192, 0, 130, 130,
    )  # fmt: skip
    assert end_all(cache) == [], "nothing is written again"


def test_a_failing_read_is_a_miss_and_not_tried_again() -> None:
    cache = on(stored())
    cache.transferred(reading(cache, "a"), failed=True)
    assert finish(cache, "a") == 0 and cache.stats.failed_transfers == 1


def test_a_state_that_was_read_has_a_value_and_needs_its_kv() -> None:
    """The slots had other owners before, and transfers were under way at a rebuild."""
    cache = on(stored(), num_host_states=1, num_host_pages=3)
    torn = reading(cache, "torn")
    cache._admission.torn = True
    cache.transferred(torn)
    for seed in (0, 1):
        cache.transferred(reading(cache, str(seed), seed))
        tier, chain = cache._admission.tier, cache._admission.requests[str(seed)].chain
        slot = tier.states.lookup(chain[3])
        assert slot and tier.states.prefix[slot] == (chain, 3) and tier.states.group[slot] > SPARE
        assert {tier.pages.lookup(each) for each in chain[1:4]} == {1, 2, 3} and tier.pages.group[1:] == [NEEDED] * 3
        cache.free(str(seed), finished=False)


def test_blocks_on_the_host_are_written_to_files_once() -> None:
    files = SymbolicFiles()
    cache = on(files, num_state_blocks=6, num_kv_blocks=12)
    for seed in range(6):
        answer(cache, str(seed), seed)
        end_all(cache)
    assert len(files.kept) >= 4 * 3
    written = [t for t in end_all(cache) if t.files and not t.to_host]
    assert written == []


@pytest.mark.parametrize("end", ["finished", "aborted", "kv evicted"])
def test_a_restart_hits_all_that_was_cached_before(end: str) -> None:
    """Include unrequested states: after an abort, at intervals, and after the host evicted the KV."""
    files = SymbolicFiles()
    cache = on(files, checkpoint_interval=64)
    admission, before = cache._admission, dict[int, int]()
    for seed in range(3):
        cache.add(str(seed), text(LENGTH, seed))
        cache.admit(str(seed))
        run_step(cache, str(seed), LENGTH, 7)
        for _ in range(100):
            run_step(cache, str(seed), 1, 7)
        cache.free(str(seed), finished=end == "finished")
    groups = [admission.pool.group[block] for block, held in enumerate(admission.pool.hashes) if held is not None]
    assert SPARE in groups and max(groups) > SPARE
    if end == "kv evicted":
        cache.kv_evicted([each for each in admission.pool.hashes if each is not None])
    for seed in range(3):
        before[seed] = hit(cache, [*text(LENGTH, seed), *[7] * 101])
    assert set(before.values()) == {256}
    end_all(cache, flush=True)
    committed = {each for each in admission.pool.hashes if each is not None}
    assert committed == {block_hash for kind, block_hash in files.kept if kind == "state"}
    files.restarted()
    again = on(files)
    for seed in range(3):
        again.add(str(seed), [*text(LENGTH, seed), *[7] * 101])
        assert again.admit(str(seed)) == Wait("loading", str(seed), before[seed])


def test_spare_states_are_flushed_last() -> None:
    cache = on(SymbolicFiles(), checkpoint_interval=64)
    for seed in range(3):
        answer(cache, str(seed), seed)
    admission, order = cache._admission, list[bytes]()
    asked = {h for b, h in enumerate(admission.pool.hashes) if h is not None and admission.pool.group[b] > SPARE}
    for transfer in end_all(cache, flush=True):
        order += [file.block_hash for file in transfer.files if file.kind == "state"]
    assert len(order) == 9 and set(order[:3]) == asked


def test_a_second_flush_writes_the_blocks_that_came_after_the_first() -> None:
    files = SymbolicFiles()
    cache = on(files)
    for seed in range(3):
        answer(cache, str(seed), seed)
        end_all(cache, flush=True)
        assert len(files.kept) == 4 * (seed + 1)


def test_flushing_ends_where_nothing_can_be_written() -> None:
    cache = on(SymbolicFiles())
    for seed in range(4):
        answer(cache, str(seed), seed)
    assert len(end_all(cache, flush=True, failed=True)) == 2, "to the host, and to files"


def test_files_of_blocks_that_a_bad_request_wrote_are_dropped() -> None:
    files = SymbolicFiles()
    cache = on(files)
    cache.add("a", text(LENGTH, 0))
    cache.admit("a")
    under_way(cache, "accepted", LENGTH)
    end_all(cache, flush=True)
    assert len(files.kept) == 4
    cache.free("a", finished=False, wrong_from=64)
    assert [kind for kind, _ in files.kept] == ["kv"], "the page of the first block is sound"


def test_a_bad_request_drops_no_file_that_another_process_wrote() -> None:
    files = stored(1)
    cache = on(files)
    cache.transferred(reading(cache, "a"))
    assert cache.admit("a") == Wait("loading", "a", 192)
    cache.transferred(next(t for t in cache.transfers() if not t.to_host))
    cache.admit("a")
    before = dict(files.kept)
    suspects = cache.suspects("a")
    cache.free("a", finished=False, wrong_from=0)
    assert files.kept == before and len(suspects) == 3
    cache.invalidate([block.block_hash for block in suspects])
    assert not files.kept and cache.stats.host_states["committed"] == cache.stats.host_pages["committed"] == 0


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("freed", [False, True])
@pytest.mark.parametrize("finite", [False, True])
def test_a_step_that_fails_after_it_was_issued_drops_its_files(finite: bool, freed: bool, torn: bool) -> None:
    """A rebuild of torn records drops all blocks, but no file."""
    files = SymbolicFiles()
    cache = on(files)
    cache.add("a", text(LENGTH, 0))
    cache.admit("a")
    steps = under_way(cache, "issued", LENGTH)
    end_all(cache, flush=True)
    assert files.kept
    if freed:
        cache.free("a", finished=False)
    cache._admission.torn = torn
    if finite:
        cache.cancel(steps)
    else:
        cache.accept(steps, {} if freed else {"a": [1]}, not_finite=["a"])
    assert not files.kept


@pytest.mark.parametrize("torn", [False, True])
def test_blocks_are_flushed_after_a_reset_and_after_a_rebuild(torn: bool) -> None:
    """A write was under way, and its end says nothing of later writes."""
    files = SymbolicFiles()
    cache = on(files)
    answer(cache, "a", 0)
    [to_host] = cache.transfers(flush=True)
    cache.transferred(to_host)
    [write] = cache.transfers(flush=True)
    assert write.files
    if torn:
        cache._admission.torn = True
    else:
        cache.reset()
    cache.transferred(write, failed=not torn)
    answer(cache, "b", 1)
    end_all(cache)
    end_all(cache, flush=True)
    assert len(files.kept) == 4


def test_a_reset_drops_files_and_begins_another_key() -> None:
    files = stored()
    cache = on(files)
    cache.reset()
    assert files.key == 1 and not files.kept and answer(cache, "a", 0) == 0


def test_a_read_that_a_reset_overtakes_is_dropped() -> None:
    cache = on(stored())
    read = reading(cache, "a")
    cache.reset()
    assert not cache.waits("a")
    cache.transferred(read)
    assert finish(cache, "a") == 0 and cache.stats.host_states["committed"] == 0


def test_another_salt_or_read_false_loads_nothing() -> None:
    cache = on(stored())
    assert answer(cache, "a", 0, salt="another") == answer(cache, "b", 0, read=False) == 0
    assert cache.stats.loads == 0


def test_no_room_on_the_host_is_a_miss() -> None:
    cache = on(stored(), num_host_states=1, num_host_pages=2)
    assert answer(cache, "a", 0) == 0


def test_a_read_that_is_not_worth_its_bytes_is_not_started() -> None:
    worth = {"state_bytes": 1000, "page_bytes": 100, "host_bytes_per_token": 1 << 20}
    assert answer(on(stored(), **worth, disk_bytes_per_token=6), "a", 0) == 0  # 1,300 bytes for 192 tokens
    assert reading(on(stored(), **worth, disk_bytes_per_token=7), "a")
