"""Check the record of computed prefixes, the source of ceilings."""

from __future__ import annotations

import random
import tracemalloc
from array import array
from collections.abc import Sequence
from itertools import takewhile

import pytest

from cache_calls import make, run_step, started
from mambacache.cache.ledger import Branch, TokenRecord, common_tokens

ROOT = b"root"


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def as_bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.choice([1, 256, 1 << 24]) for _ in range(count)]


def test_common_tokens() -> None:
    rng = random.Random(0)
    for _ in range(500):
        a, b = (array("i", (rng.randrange(2) << 20 for _ in range(rng.randrange(40)))) for _ in range(2))
        cut = rng.randrange(20)
        b[:cut] = a[:cut]
        assert common_tokens(a.tobytes(), b.tobytes()) == shared(a, b)


def test_the_record_finds_the_longest_prefix_of_growing_sequences() -> None:
    rng = random.Random(0)
    record = TokenRecord(1 << 20)
    done: list[tuple[list[int], Branch | None]] = []
    for _ in range(600):
        if done and rng.random() < 0.4:  # a sequence goes on at its end, if its branch still ends there
            at = rng.randrange(len(done))
            before, branch = done[at]
            known = branch if branch is not None and branch.end == len(before) else None
            more = random_tokens(rng, rng.randrange(1, 6))
            given = as_bytes(more if known is not None else before + more)
            done[at] = before + more, record.add(ROOT, given, known)
        else:
            tokens = random_tokens(rng, rng.randrange(1, 14))
            done.append((tokens, record.add(ROOT, as_bytes(tokens), None)))
        tokens = random_tokens(rng, rng.randrange(1, 14))
        assert record.longest(ROOT, as_bytes(tokens)) == max(shared(other, tokens) for other, _ in done)
        assert record.longest(b"another", as_bytes(tokens)) == 0
    distinct = {tuple(tokens[: i + 1]) for tokens, _ in done for i in range(len(tokens))}
    assert record.num_tokens == len(distinct)


def test_the_least_recently_used_sequence_is_cut_from_its_end() -> None:
    record = TokenRecord(20)
    first = record.add(ROOT, as_bytes([1] * 12), None)
    record.add(ROOT, as_bytes([2] * 12), None)
    assert record.longest(ROOT, as_bytes([2] * 12)) == 12
    assert record.longest(ROOT, as_bytes([1] * 12)) == 8 == first.end
    record.add(ROOT, as_bytes([3] * 19), None)
    assert [record.longest(ROOT, as_bytes([i] * 19)) for i in (1, 2, 3)] == [0, 1, 19]
    assert first.end == -1
    record.add(ROOT, as_bytes([4] * 30), None)
    assert record.longest(ROOT, as_bytes([4] * 30)) == 20 == record.num_tokens


def test_a_shared_prefix_is_kept_longer_than_its_branches() -> None:
    record = TokenRecord(30)
    stem = [9] * 10
    for i in range(8):
        record.add(ROOT, as_bytes(stem + [i] * 5), None)
    assert record.longest(ROOT, as_bytes(stem)) == 10
    assert [record.longest(ROOT, as_bytes(stem + [i] * 5)) for i in (0, 6, 7)] == [10, 15, 15]


def test_the_ceiling_of_a_prompt_computed_three_prompts_ago() -> None:
    """A hundred prompts of 1,000 tokens fit the record, out of a thousand distinct prompts."""
    cache = make(record_tokens=100_000, num_kv_blocks=40, num_state_blocks=8)
    prompts = [[i, *range(999)] for i in range(1000)]
    for i, prompt in enumerate(prompts):
        started(cache, str(i), prompt)
        run_step(cache, str(i), 1000, 1)
        cache.free(str(i), finished=True)
        if i >= 3 and i % 50 == 0:
            cache.add("look", prompts[i - 3])
            hit = cache.match("look")
            assert hit.num_tokens + sum(hit.losses.values()) == 999
            cache.free("look", finished=False)


@pytest.mark.parametrize("pieces", [1, 10])
def test_memory_of_a_recorded_token(pieces: int) -> None:
    rng = random.Random(0)
    prompts = [as_bytes([i, *(rng.randrange(1 << 17) for _ in range(999))]) for i in range(300)]
    size = 4000 // pieces
    tracemalloc.start()
    record = TokenRecord(1 << 24)
    for prompt in prompts:
        branch = None
        for start in range(0, 4000, size):
            branch = record.add(ROOT, prompt[start : start + size], branch)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.num_tokens == 300_000
    assert 4 * record.num_tokens <= taken <= 5 * record.num_tokens + 400 * len(prompts)
