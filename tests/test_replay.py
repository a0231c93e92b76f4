"""Check that traces are read unchanged, and that simulators hit as their policies do on real and obvious traces."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mambacache import CacheConfig, PrefixCache
from selection import some

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from replay_trace import MODELS, OURS, Replay, Row, Run, budget_of, measure, split, write  # noqa: E402
from simulators import POLICIES  # noqa: E402
from simulators.parts import GIB, Budget, Shape  # noqa: E402
from trace_tokens import Request, requests  # noqa: E402

CONVERSATION = BENCHMARKS / "traces" / "mooncake_conversation.jsonl.gz"
# Percent of the ceiling that each policy hits at Qwen3-Next's shape, for GiB of states + GiB of KV. The simulators here
# did not produce these numbers.
BUDGETS = ("5+20", "20+40", "40+80", "80+80")
FOUND = {
    "vllm": (2.0, 10.9, 34.1, 43.9),
    "sglang": (11.1, 14.8, 25.0, 41.1),
    "marconi": (12.2, 19.5, 40.4, None),
    "lru": (None, 18.4, 40.0, None),
    "lru-joint": (None, 21.6, 44.9, None),
    "clairvoyant": (62, 86, None, None),
}
CASES = [
    (policy, budget, share)
    for policy, shares in FOUND.items()
    for budget, share in zip(BUDGETS, shares, strict=True)
    if share is not None
]
TINY = Shape(state_bytes=64, kv_bytes=1, recurrent_layers=1, attention_layers=1, heads_width=1, active_params=100)
ROOMY = Budget(1 << 20, 1 << 20)
LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [3, 4]}
PROMPT, ANSWER = 247, 10  # a turn feeds 256 tokens: a policy that keeps an answer's end can keep this end


@pytest.fixture(scope="module")
def conversation() -> list[Request]:
    return list(requests(CONVERSATION))


def test_ceiling(conversation: list[Request]) -> None:
    prompts, ceiling = (sum(counts) for counts in zip(*((len(r.prompt), r.ceiling) for r in conversation), strict=True))
    assert (len(conversation), prompts, ceiling) == (12_031, 144_793_823, 56_341_404)
    assert round(ceiling / prompts, 5) == 0.38911


@pytest.mark.parametrize(("policy", "budget", "share"), some(3, CASES))
def test_share_of_a_real_trace(policy: str, budget: str, share: float, conversation: list[Request]) -> None:
    state, kv = (int(gib) * GIB for gib in budget.split("+"))
    simulator = POLICIES[policy](MODELS["qwen3-next"], Budget(state, kv), conversation)
    hit = sum(simulator.request(request.prompt, request.answer) for request in conversation)
    assert 100 * hit / sum(request.ceiling for request in conversation) == pytest.approx(share, abs=2)


# --- traces with obvious hits ---


def text(name: int, length: int) -> np.ndarray:
    """Return tokens that no other name has."""
    return np.arange(length, dtype=np.int32) + name * 10_000


def trace(*pairs: tuple[np.ndarray, np.ndarray]) -> list[Request]:
    whole = [np.concatenate(pair).tolist() for pair in pairs]
    made = []
    for number, (prompt, answer) in enumerate(pairs):
        ceiling = max((common(prompt.tolist(), other) for other in whole[:number]), default=0)
        made.append(Request(prompt, answer, min(ceiling, len(prompt) - 1), False))
    return made


def common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def chat(name: int, turns: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return turns of a chat; each prompt is 64 tokens longer, the answer before included."""
    tokens, pairs = text(name, 4096), []
    for turn in range(turns):
        end = PROMPT + 64 * turn
        pairs.append((tokens[:end], tokens[end : end + ANSWER]))
    return pairs


def hits(policy: str, made: list[Request], budget: Budget = ROOMY) -> list[int]:
    simulator = POLICIES[policy](TINY, budget, made)
    return [simulator.request(request.prompt, request.answer) for request in made]


A, B, C = chat(1, 3), chat(2, 2), chat(3, 1)
SAME = (text(4, 257), text(5, ANSWER))
ON_A_BOUNDARY = (text(4, 256), text(5, ANSWER))
DOCUMENT = [(np.concatenate([text(6, 192), text(7 + i, 65)]), text(17 + i, ANSWER)) for i in range(3)]
TRACES = {
    "nothing shared": trace(A[0], B[0], C[0]),
    "next turn": trace(A[0], A[1]),
    "the same prompt": trace(SAME, SAME, SAME),
    "the same prompt, a whole number of blocks": trace(ON_A_BOUNDARY, ON_A_BOUNDARY, ON_A_BOUNDARY),
    "one document": trace(*DOCUMENT),
    "a chat between others": trace(A[0], B[0], A[1], C[0], A[2], B[1]),
}
RIGHT = {
    "nothing shared": [(tuple(POLICIES), [0, 0, 0])],
    "next turn": [
        (("vllm", "lru", "lru-joint"), [0, 192]),  # the state at the prompt's last boundary
        (("sglang", "marconi", "clairvoyant"), [0, 256]),  # the state at the end of the answer
    ],
    "the same prompt": [
        (("vllm", "sglang", "lru", "lru-joint", "clairvoyant"), [0, 256, 256]),
        (("marconi",), [0, 0, 256]),  # keeps prompts where they branch
    ],
    "the same prompt, a whole number of blocks": [
        (("vllm", "lru", "lru-joint", "clairvoyant"), [0, 192, 192]),
        (("sglang",), [0, 0, 192]),  # the state lies a token too far
        (("marconi",), [0, 0, 255]),
    ],
    "one document": [
        (("vllm", "sglang", "marconi", "lru", "lru-joint"), [0, 0, 192]),  # the second prompt shows the branch
        (("clairvoyant",), [0, 192, 192]),
    ],
}
ANSWERS = [(name, policy, right) for name, found in RIGHT.items() for policies, right in found for policy in policies]


@pytest.mark.parametrize(("name", "policy", "right"), ANSWERS)
def test_hits_with_room_for_all_requests(name: str, policy: str, right: list[int]) -> None:
    assert hits(policy, TRACES[name]) == right


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chat_is_lost_behind_another_without_room_for_both(policy: str) -> None:
    room_for_one = Budget(4 * 64, 300)
    lost = hits(policy, trace(A[0], B[0], A[1]), room_for_one)
    assert lost == ([0, 0, 256] if policy == "clairvoyant" else [0, 0, 0])


@pytest.mark.parametrize("policy", POLICIES)
def test_the_chat_used_last_is_evicted_last(policy: str) -> None:
    room_for_two = Budget((6 if policy == "sglang" else 3) * 64, 740)
    found = hits(policy, TRACES["a chat between others"], room_for_two)
    assert found[:2] == [0, 0] and 192 <= found[2] <= found[4]
    assert found[5] == (256 if policy == "clairvoyant" else 0)


@pytest.mark.parametrize("name", [name for name in TRACES if name != "the same prompt, a whole number of blocks"])
@pytest.mark.parametrize("total", [256, 512, 768, 1024, 1536, 1 << 16])
def test_no_policy_hits_more_than_clairvoyant(name: str, total: int) -> None:
    budget = Budget(total // 3, total - total // 3)
    bound = sum(hits("clairvoyant", TRACES[name], budget))
    assert all(sum(hits(policy, TRACES[name], budget)) <= bound for policy in POLICIES)


# --- the replay of the real cache ---

CHATS = trace(*(turn for turns in zip(*(chat(name, 3) for name in range(1, 9)), strict=True) for turn in turns))


@pytest.mark.parametrize("running", [1, 3, 8])
def test_the_real_cache_hits_next_turns_however_many_run(running: int) -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=200, num_kv_blocks=400))
    replay = Replay(cache, running)
    replay.replay(iter(CHATS))
    cache.check()
    assert replay.hit_tokens == cache.stats.hit_tokens == 8 * (256 + 320 // 64 * 64)
    assert cache.stats.requests == len(CHATS) and not cache.request_ids


def test_own_blocks_of_a_preempted_request_are_no_hit() -> None:
    cache = PrefixCache(CacheConfig(num_state_blocks=64, num_kv_blocks=16))
    replay = Replay(cache, 3)
    replay.replay(iter(trace(*((text(name, 330), text(name + 50, 200)) for name in range(6)))))
    assert cache.stats.preemptions > 0 and replay.hit_tokens == 0


def test_blocks_on_the_host_are_hit() -> None:
    """Eight chats by turns are too much for the device alone."""
    hits = []
    for slots in ({}, {"num_host_states": 100, "num_host_pages": 400}):
        cache = PrefixCache(CacheConfig(num_state_blocks=8, num_kv_blocks=24, **slots))
        replay = Replay(cache, 1)
        replay.replay(iter(CHATS))
        cache.check()
        hits.append(replay.hit_tokens)
    assert hits[1] == 8 * (256 + 320 // 64 * 64) > hits[0]


def test_budgets() -> None:
    shape = MODELS["qwen3-next"]
    assert budget_of("20+40", shape, []) == Budget(20 * GIB, 40 * GIB)
    assert budget_of("20+40+200", shape, []) == budget_of("20+40", shape, [])
    both = budget_of("60", shape, [])
    assert both == split(60 * GIB, shape) and abs(both.total - 60 * GIB) <= 1
    assert both.kv / shape.kv_bytes / (both.state / shape.state_bytes) == pytest.approx(7000, rel=1e-3)
    (request,) = made = trace(A[0])
    everything = budget_of("unbounded", shape, made)
    assert everything.kv >= (len(request.prompt) + len(request.answer)) * shape.kv_bytes
    assert everything.state >= 2 * shape.state_bytes


@pytest.mark.parametrize("policy", [OURS, *POLICIES])
def test_a_result_row_holds_the_measurement(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n" * 3)
    row = measure(Run(path, "qwen3-next", policy, "60", 1, True, None))
    assert (row.trace, row.policy, row.state_gib, row.kv_gib) == ("twice", policy, 60, 0)
    assert 0 <= row.share <= 1 and (row.share > 0) == (policy != "vllm")  # vLLM's blocks are longer than the prompt
    assert (row.host_ms is not None) == (row.states_stored is not None) == (policy == OURS)
    if row.losses is not None:
        assert row.share + sum(row.losses.values()) == pytest.approx(1)


def test_a_result_row_tells_host_memory_from_device_memory(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n" * 3)
    row = measure(Run(path, "qwen3-next", OURS, "2+4+20", 1, False, None))
    assert (row.state_gib, row.kv_gib, row.host_gib) == (2, 4, 20)


def test_a_result_row_replaces_the_row_of_the_same_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    first, other = Row("t", "m", OURS, 1, 20, 40, 0, 0.25), Row("t", "m", OURS, 32, 20, 40, 0, 0.5)
    write(path, [first, other])
    write(path, [replace(first, share=0.75)])
    assert [row["share"] for row in json.loads(path.read_text())["rows"]] == [0.75, 0.5]


# --- files ---


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name"),
        ("[1]", "it is not a JSON object"),
        (json.dumps({"input_length": 600, "hash_ids": [3, 4]}), "output_length is None: give an integer, 1 or more"),
        (json.dumps({**LINE, "input_length": 0}), "input_length is 0: give an integer, 1 or more"),
        (json.dumps({**LINE, "output_length": 2.5}), "output_length is 2.5: give an integer, 1 or more"),
        (json.dumps({**LINE, "hash_ids": [3, "x"]}), "give a list of integers from 0 to 2097151"),
        (json.dumps({**LINE, "hash_ids": [3, 1 << 21]}), "give a list of integers from 0 to 2097151"),
        (json.dumps({**LINE, "hash_ids": [3]}), "600 tokens have 1 hash_ids: give one for each 512 tokens"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{line}\n")
    with pytest.raises(ValueError) as caught:
        list(requests(path))
    assert str(caught.value).startswith(f"line 2 of {path} is not a request: ")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budgets", "5+x"], "'5+x' is not a budget: give 20+40 (GiB of states and KV), 20+40+200, 60 or unbounded"),
        (["--budgets", "5+20+40"], "only mambacache has host memory, the third number of a budget: add --policies"),
        (["--running", "0"], "'0' is not a positive integer: give an integer, 1 or more"),
        (["--running", "2"], "simulators run one request after the other: add --policies mambacache, or leave out"),
        ([], "shares a prefix with an earlier request: give another trace"),
    ],
)
def test_a_run_without_a_replay_is_refused_in_a_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    path = tmp_path / "once.jsonl"
    path.write_text(json.dumps(LINE))
    command = [sys.executable, str(BENCHMARKS / "replay_trace.py"), str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and said in done.stderr.splitlines()[-1], done.stderr


def test_compressed_or_not_a_trace_is_the_same(tmp_path: Path) -> None:
    plain, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    lines = "".join(json.dumps({**LINE, "hash_ids": [3, last]}) + "\n" for last in (4, 5))
    plain.write_text(lines)
    packed.write_bytes(gzip.compress(lines.encode()))
    first, second = ([(r.prompt.tolist(), r.ceiling) for r in requests(path)] for path in (plain, packed))
    assert first == second and [ceiling for _, ceiling in first] == [0, 512]
