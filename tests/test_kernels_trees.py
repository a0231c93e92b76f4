"""Check rows with drafts that form a tree.

Each token gives the bits that its path alone gives. Once a kept path is moved together, the next step gives the bits of
that path alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from cache_calls import allocate, make, run_step, started
from log_cases import CASES, DEVICE, LOW, NAMES, SOURCES, Case
from mambacache.kernels import (
    StateIndices,
    StatePool,
    StateTensor,
    api,
    gpu,
    keep_paths,
    paged_attention,
    place_decodes,
    reference,
)
from mambacache.plan import PLACEHOLDER, StepPlan
from selection import full
from symbolic import text

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
KERNELS = [gpu] if DEVICE == "cuda" else [reference, gpu]  # on a CPU the GPU's kernels run in Triton's interpreter
SLOTS = 24
Tree = list[int]  # for each token, the token before it; -1 for the first


def name_of(library: ModuleType) -> str:
    return library.__name__.rsplit(".")[-1]


def random_tree(rng: random.Random, tokens: int) -> Tree:
    tree = [-1]
    for token in range(1, tokens):
        tree.append(rng.choice(path_to(tree, token - 1)))
    return tree


def path_to(tree: Tree, token: int) -> list[int]:
    return [*path_to(tree, tree[token]), token] if token >= 0 else []


def masks(tree: Tree) -> list[int]:
    return [sum(1 << each for each in path_to(tree, token)) for token in range(len(tree))]


def flat(rows: Sequence[Sequence[int]]) -> list[int]:
    return [value for row in rows for value in row]


def place_of_path(slot: int, first: int, path: Sequence[int]) -> list[int]:
    """Return the line of `keep_paths` for a path in a tree that begins at entry `first`."""
    sources = [first + token for token in path[1:]]
    return [slot, first + 1, *sources, *[-1] * (7 - len(sources))]


class Run:
    """Run steps of one op over a token log full of NaN, with a state that is never written."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        case.fill(dtype, dtype)
        self.layout = case.log(dtype, dtype)
        self.logs = StatePool([self.layout], SLOTS, DEVICE)
        self.logs.buffer.fill_(255)

    def tokens(self, count: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(count, *shape, generator=generator) for shape in self.case.shapes]
        return [x.to(DEVICE, self.dtype) for x in drawn]

    def step(
        self, rows: Sequence[tuple[int, int, int, int]], given: Sequence[list[Tensor]], trees: Sequence[Tree]
    ) -> list[Tensor]:
        """Return the outputs of rows (src, slot, log_start, log_end), each with its tokens and its tree."""
        width = max(map(len, trees))
        padding = [[(2 << t) - 1 for t in range(len(tree), width)] for tree in trees]
        src, slots, starts, ends = zip(*rows, strict=True)
        arrays = {"decode_src": src, "decode_dst": [0] * len(rows), "log_slot": slots, "log_start": starts}
        arrays |= {"log_end": ends, "decode_len": [*map(len, trees)], "query_start_loc": [len(rows) * width]}
        bits = [masks(tree) + rest for tree, rest in zip(trees, padding, strict=True)]
        arrays["ancestors"] = flat(bits)
        indices = StateIndices.from_arrays({name: np.array(x, np.int32) for name, x in arrays.items()}, DEVICE)
        batch = [x.new_full((len(rows), width, *x.shape[1:]), torch.nan) for x in given[0]]
        for i, tokens in enumerate(given):
            for into, x in zip(batch, tokens, strict=True):
                into[i, : len(x)] = x
        out = torch.full((len(rows) * width, *self.case.width), torch.nan, dtype=self.dtype, device=DEVICE)
        before = self.case.state.clone()
        self.case.run([x.flatten(0, 1) for x in batch], self.case.state, list(self.logs.layers[0]), indices, out=out)
        assert torch.equal(self.case.state.view(torch.uint8), before.view(torch.uint8))
        outputs = out.unflatten(0, (len(rows), width))
        assert not any(outputs[i, len(tree) :].any() for i, tree in enumerate(trees))
        return [outputs[i, : len(tree)] for i, tree in enumerate(trees)]


def chain(count: int) -> Tree:
    return [*range(-1, count - 1)]


@pytest.mark.parametrize("dtype", [torch.float32, *full(LOW)], ids=str)
@pytest.mark.parametrize("library", KERNELS, ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_a_path_of_a_tree_equals_the_path_alone(
    name: str, library: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "backend", lambda x: library)
    rng = random.Random(name)
    run = Run(CASES[name](), dtype)
    block = rng.choice([SOURCES[0], 0])
    start, known = rng.choice([(0, 0), (0, 3), (5, 2), (3, 4)])
    end = start + known
    if known:
        run.step([(block, 1, start, start)], [run.tokens(known, 1)], [chain(known)])
    tree, tokens = random_tree(rng, 7), run.tokens(7, 2)
    while tree == chain(7):
        tree = random_tree(rng, 7)
    leaves = [t for t in range(7) if t not in tree]
    for slot in range(2, 3 + len(leaves)):
        run.logs.slabs[slot] = run.logs.slabs[1]

    rows = [(block, slot, start, end) for slot in range(1, 3 + len(leaves))]
    paths = [path_to(tree, leaf) for leaf in leaves]
    outputs, other = run.step(rows[:2], [tokens, run.tokens(3, 3)], [tree, chain(3)])
    alone = run.step(rows[2:], [[x[path] for x in tokens] for path in paths], [chain(len(path)) for path in paths])
    assert torch.isfinite(outputs).all() and torch.isfinite(other).all()
    for path, found in zip(paths, alone, strict=True):
        assert torch.equal(outputs[path], found)

    # A kept path may end before a leaf. It leaves the bits of a step of its tokens alone.
    kept = rng.randrange(len(paths))
    path = paths[kept][: rng.randint(2, len(paths[kept]))]
    keep_paths(run.logs, torch.tensor([place_of_path(1, end, path)], dtype=torch.int32, device=DEVICE))
    after = [(block, slot, start, end + len(path)) for slot in (1, 3 + kept)]
    given = run.tokens(2, 4)
    found, wanted = run.step(after, [given, given], [chain(2)] * 2)
    assert torch.equal(found, wanted)
    for x, layout in zip(run.logs.layers[0], run.layout, strict=True):
        held = slice(start, end + len(path) + 2) if layout.per_token else slice(None)
        assert torch.equal(x[1, held], x[3 + kept, held])


@pytest.mark.parametrize("library", [KERNELS[0], *full(*KERNELS[1:])], ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_a_non_finite_draft_spoils_only_its_descendants(
    name: str, library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "backend", lambda x: library)
    rng = random.Random(name)
    run = Run(CASES[name](), torch.float32)
    run.step([(0, 1, 3, 3)], [run.tokens(4, 1)], [chain(4)])
    for seed, tree in enumerate([chain(5), [-1, 0, 1, 0], [-1, 0, 0, 0], [-1, 0, 1, 2, 0, 4, 5], random_tree(rng, 7)]):
        tokens, count = run.tokens(len(tree), seed), len(tree)
        run.logs.slabs[2 : 2 + count] = run.logs.slabs[1]
        given = [tokens, *([x.clone() for x in tokens] for _ in range(1, count))]  # one row spoils each draft
        for bad in range(1, count):
            for x in given[bad]:
                x[bad] = rng.choice([torch.nan, torch.inf])
        wanted, *found = run.step([(0, slot, 3, 7) for slot in range(2, 2 + count)], given, [tree] * count)
        for bad in range(1, count):
            others = [token for token in range(count) if bad not in path_to(tree, token)]
            assert torch.equal(found[bad - 1][others], wanted[others]), (tree, bad)


def steps_with_a_tree_and_a_late_row() -> tuple[StepPlan, StepPlan]:
    """Return a step of request b and the next step of both requests.

    The first step has two drafts at position 29. The second step has a tree at 20, and a row at 30, 31 or 32.
    """
    cache = make(max_draft_tokens=7)
    for request, prompt in (("a", 20), ("b", 29)):
        started(cache, request, text(prompt, seed=prompt))
        run_step(cache, request, prompt, sampled=10)
    first = cache.plan([allocate(cache, "b", 1, drafts=(PLACEHOLDER,) * 2)])
    cache.issued(first.steps)
    tree = cache.allocate("a", 1, drafts=(11, 12, 13, 21, 22, 31), parents=(0, 1, 2, 1, 4, 0))
    assert tree is not None
    return first, cache.plan([tree, allocate(cache, "b", 1, drafts=(PLACEHOLDER,) * 7)])


TREE_BESIDE = [-1, 0, 1, 2, 1, 4, 0]


@pytest.mark.parametrize(("start", "fixed"), [*full((30, False), (31, False), (32, False)), (32, True)])
@pytest.mark.parametrize("library", KERNELS, ids=name_of)
@pytest.mark.parametrize("name", NAMES)
def test_a_tree_and_a_late_row_in_a_plan_give_their_recurrences(
    name: str, library: ModuleType, start: int, fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "backend", lambda x: library)
    case, dtype = CASES[name](), torch.float32
    first, second = steps_with_a_tree_and_a_late_row()
    generator = torch.Generator().manual_seed(start)
    before = [0.3 * torch.randn(case.state_shape, generator=generator).to(DEVICE) for _ in "ab"]
    states = torch.full((32, *case.state_shape), torch.nan, device=DEVICE)
    (a, b), logs = second.steps, StatePool([case.log(dtype, dtype)], 32, DEVICE)
    states[a.src], states[first.steps[0].src] = before
    logs.buffer.fill_(255)
    tokens = [[torch.randn(8, *x, generator=generator).to(DEVICE) for x in case.shapes] for _ in range(3)]
    earlier, of_tree, of_late = tokens

    def run(plan: StepPlan, starts: list[int], rows: list[list[Tensor]]) -> tuple[StateIndices, Tensor]:
        count, width = plan.num_decodes, plan.tokens_per_decode
        if fixed:
            indices = StateIndices.decode_buffers(4, width, DEVICE).fill(plan.arrays, count)
        else:
            indices = StateIndices.from_arrays(plan.arrays, DEVICE)
        place_decodes(indices, torch.tensor(starts, device=DEVICE))
        out = torch.full((count * width, *case.width), torch.nan, device=DEVICE)
        batch = [torch.cat([x[:width] for x in each]) for each in zip(*rows, strict=True)]
        case.run(batch, states, list(logs.layers[0]), indices, out=out)
        return indices, out.unflatten(0, (count, width))

    run(first, [29], [earlier])
    indices, (tree_outputs, late_outputs) = run(second, [20, start], [of_tree, of_late])
    length = 8 if start == 32 else 32 - start
    if not fixed:
        positions = [20, 21, 22, 23, 22, 23, 21, 0, *range(start, start + length), *[0] * (8 - length)]
        assert indices.positions.tolist() == positions
    assert (a.start, b.start, int(indices.decode_len[1])) == (20, 30, length)

    def step(state: Tensor, given: list[Tensor], token: int) -> tuple[Tensor, Tensor]:
        return case.step(state, [x[token].double() for x in given])

    after = {-1: before[0].double()}
    for token, parent in enumerate(TREE_BESIDE):
        wanted, after[token] = step(after[parent], of_tree, token)
        torch.testing.assert_close(tree_outputs[token].double(), wanted, atol=2e-5, rtol=2e-5)
    state = before[1].double()
    for token in range(start - 29):
        state = step(state, earlier, token)[1]
    for token in range(length):
        wanted, state = step(state, of_late, token)
        torch.testing.assert_close(late_outputs[token].double(), wanted, atol=2e-5, rtol=2e-5)
    assert not late_outputs[length:].any()


@pytest.mark.parametrize("late", [0, 3])
def test_masks_are_checked_for_the_tokens_that_a_late_row_may_get(late: int) -> None:
    arrays = {"decode_src": [1], "decode_dst": [2], "decode_len": [1], "late_len": [late], "log_slot": [1]}
    arrays |= {"log_start": [0], "log_end": [15], "query_start_loc": [4], "ancestors": [1, 3, 5, 0]}
    given = {name: np.array(x, np.int32) for name, x in arrays.items()}
    if not late:
        assert StateIndices.from_arrays(given, "cpu").depths.tolist() == [0]
        return
    with pytest.raises(ValueError, match="has a dst or a late_len"):
        StateIndices.from_arrays(given, "cpu")
    given["ancestors"] = np.array([1, 0, 0, 0], np.int32)
    with pytest.raises(ValueError, match="token 1 of a row"):
        StateIndices.from_arrays(given, "cpu")


def test_only_the_kept_entries_of_named_slots_are_moved() -> None:
    layout = [StateTensor((16, 3), torch.bfloat16, per_token=True), StateTensor((5,), torch.float32)]
    layout.append(StateTensor((16, 2, 5), torch.float32, per_token=True))
    pool = StatePool([layout], 5, DEVICE)
    pool.buffer.copy_(torch.randint(0, 256, pool.buffer.shape, dtype=torch.uint8))
    wanted = StatePool([layout], 5)
    wanted.buffer.copy_(pool.buffer)
    paths = [place_of_path(4, 2, [0, 2, 3, 6]), place_of_path(2, 8, [0, 1, 7])]
    for slot, first, *places in paths:
        for x in (wanted.layers[0][0], wanted.layers[0][2]):
            old = x.clone()
            for i, place in enumerate(places):
                if place >= 0:
                    x[slot, first + i] = old[slot, place]
    keep_paths(pool, torch.tensor(paths, dtype=torch.int32, device=DEVICE))
    assert torch.equal(pool.buffer.cpu(), wanted.buffer)


@pytest.mark.parametrize(
    ("paths", "message"),
    [(torch.zeros(1, 8, dtype=torch.int32), r"paths"), (torch.zeros(1, 9), "float32"), ("strided", "contiguous")],
)
def test_other_paths_are_refused(paths: Tensor | str, message: str) -> None:
    pool = StatePool([[StateTensor((16, 4), torch.float32, per_token=True)]], 2)
    given = torch.zeros(9, 2, dtype=torch.int32).T if isinstance(paths, str) else paths
    with pytest.raises(ValueError, match=message):
        keep_paths(pool, given)


@pytest.mark.parametrize("library", KERNELS, ids=name_of)
def test_attention_sees_a_path(library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with rows that hold the tokens of a path alone, in pages with NaN in all other entries."""
    monkeypatch.setattr(api, "backend", lambda x: library)
    rng, size, before = random.Random(5), 64, 70
    tree = random_tree(rng, 6)
    paths = [path_to(tree, token) for token in range(6)]
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, heads, 16, device=DEVICE) for heads in (4, 2, 2))
    pages = [torch.full((40, size, 2, 16), torch.nan, device=DEVICE) for _ in "kv"]
    context = torch.randn(2, 2 * size, 2, 16, device=DEVICE)[:, :before]
    tables = [[1 + 2 * i, 2 + 2 * i] for i in range(7)]
    for table in tables:
        for pool, values in zip(pages, context, strict=True):
            pool[table[0]], pool[table[1], : before - size] = values[:size], values[size:]

    def attend(table: Sequence[list[int]], trees: Sequence[Tree], chosen: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, trees))
        arrays: dict[str, list[int]] = {name: [0] * len(trees) for name in ("decode_src", "decode_dst", "log_start")}
        arrays |= {"log_slot": [1] * len(trees), "log_end": [before % 16] * len(trees)}
        arrays |= {"decode_len": [*map(len, trees)], "query_start_loc": [len(trees) * width]}
        bits = [masks(each) + [(2 << t) - 1 for t in range(len(each), width)] for each in trees]
        depths = [[len(path_to(each, t)) - 1 for t in range(len(each))] + [0] * (width - len(each)) for each in trees]
        slots = [
            [pages[1] * size + before - size + t for t in range(len(each))] + [-1] * (width - len(each))
            for pages, each in zip(table, trees, strict=True)
        ]
        arrays |= {"ancestors": flat(bits), "positions": [before + depth for row in depths for depth in row]}
        arrays |= {"kv_slot": flat(slots), "kv_len": [before + len(each) for each in trees]}
        arrays |= {"block_table": flat(table), "block_table_start": [2 * i for i in range(len(trees) + 1)]}
        indices = StateIndices.from_arrays({name: np.array(x, np.int32) for name, x in arrays.items()}, DEVICE)
        index = [[*each, *[0] * (width - len(each))] for each in chosen]
        tokens = torch.tensor(index, device=DEVICE).flatten()
        return paged_attention(q[tokens], k[tokens], v[tokens], *pages, indices).unflatten(0, (len(trees), width))

    (whole,) = attend(tables[:1], [tree], [range(6)])
    alone = attend(tables[1:], [chain(len(path)) for path in paths], paths)
    for token, path in enumerate(paths):
        torch.testing.assert_close(whole[token], alone[token, len(path) - 1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("ancestors", "message"),
    [
        ([1, 3, 0b101, 0b1011], "token 3 of a row"),  # no preorder: it comes after a branch that was left
        ([1, 2, 7, 15], "token 1 of a row"),
        ([1, 3, 7, 0b10111], "token 3 of a row"),
        ([0, 3, 7, 15], "token 0 of a row"),
        ([1, 3, 7], "ancestors has 3 entries"),
    ],
)
def test_masks_of_no_tree_are_refused(ancestors: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        indices_of(ancestors, dst=0)


def test_a_tree_has_no_dst() -> None:
    with pytest.raises(ValueError, match="has a dst"):
        indices_of([1, 3, 5, 9], dst=2)
    assert indices_of([1, 3, 7, 15], dst=2).depths.tolist() == [0x3210]
    assert indices_of([1, 3, 5, 0b1101], dst=0).depths.tolist() == [0x2110]


def indices_of(ancestors: list[int], dst: int) -> StateIndices:
    arrays = {"decode_src": [1], "decode_dst": [dst], "decode_len": [4], "log_slot": [1], "log_start": [0]}
    arrays |= {"log_end": [2], "query_start_loc": [4], "ancestors": ancestors}
    return StateIndices.from_arrays({name: np.array(x, np.int32) for name, x in arrays.items()}, "cpu")
