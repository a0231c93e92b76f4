"""The arrays of a step that need more than its rows: tokens, positions, KV slots, block table. Pure functions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from mambacache.cache.request import Life
from mambacache.plan import PLACEHOLDER, SequenceStep, StepPlan, layout

Rows = Sequence[tuple[SequenceStep, Life]]


def build_plan(rows: Rows, block_size: int, with_kv: bool) -> StepPlan:
    """Orders rows (decode first) and lays out their arrays; `with_kv` where the lives' pages are ours."""
    rows = sorted(rows, key=lambda row: row[0].prefill)  # stable: as given within each kind
    steps = tuple([step for step, _ in rows])
    num_decodes = sum(not step.prefill for step in steps)
    decode, prefill = rows[:num_decodes], rows[num_decodes:]
    arrays = layout(steps, num_decodes)
    width = arrays["decode_dst"].shape[1]
    # Offsets in the flat batch of the decode tokens that are not padding; prefill rows have none.
    slots = np.flatnonzero(np.arange(width) < arrays["decode_len"][:, None])

    data, positions = array("i"), array("i")
    for step, life in decode:
        known, start = life.request.tokens, step.start
        data.append(known[start] if start < len(known) else PLACEHOLDER)
        positions.append(start)
        if step.drafts:
            data.extend(step.drafts)
            positions.extend(range(start + 1, start + step.num_tokens))
    tokens = _spread(data, slots, num_decodes * width)
    for step, life in prefill:
        tokens += life.request.tokens[step.start : step.start + step.num_tokens]
    spans = [np.arange(step.start, step.start + step.num_tokens, dtype=np.int32) for step, _ in prefill]
    arrays |= {"tokens": _int32(tokens), "positions": _join([_spread(positions, slots, num_decodes * width), *spans])}
    copies: list[tuple[int, int]] = []
    if with_kv:
        arrays |= _kv_arrays(rows, num_decodes, block_size, slots, arrays["positions"][slots], num_decodes * width)
        copies = [
            (life.copy_page.block, life.pages[life.shared_pages]) for _, life in rows if life.copy_page is not None
        ]

    ends = arrays["query_start_loc"].tolist()[1:]
    wanted = [i for step, end in zip(steps[num_decodes:], ends, strict=True) for i in _wanted(step, end)]
    arrays["logits_index"] = _int32([*slots.tolist(), *wanted])
    return StepPlan(steps, num_decodes, width, arrays, tuple(copies))


def _int32(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def _join(parts: Iterable[Sequence[int] | np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *parts], dtype=np.int32)


def _spread(values: Sequence[int] | np.ndarray, slots: np.ndarray, count: int, fill: int = 0) -> array[int]:
    """`values` at their slots among `count`, `fill` elsewhere."""
    flat = np.full(count, fill, dtype=np.int32)
    flat[slots] = values
    return array("i", flat.tobytes())


def _wanted(row: SequenceStep, end: int) -> range:
    """Offsets whose logits a prefill row that ends at `end` of the flat batch wants."""
    return range(end - row.num_tokens if row.prompt_logits else end - row.samples, end)


def _kv_arrays(
    rows: Rows, num_decodes: int, size: int, slots: np.ndarray, positions: np.ndarray, padded: int
) -> dict[str, np.ndarray]:
    """`slots` and `positions` are those of the decode tokens, which are `padded` with those that are left out."""
    table = array("i")
    for _, life in rows:
        table += life.pages
    pages = np.frombuffer(table, np.int32) if table else np.zeros(0, np.int32)
    starts = np.cumsum([0, *(len(life.pages) for _, life in rows)], dtype=np.int32)
    first = np.repeat(starts[:num_decodes], [step.num_tokens for step, _ in rows[:num_decodes]])
    decoded = pages[first + positions // size] * size + positions % size
    parts: list[Sequence[int] | np.ndarray] = [_spread(decoded, slots, padded, fill=-1)]
    offsets = np.arange(size, dtype=np.int32)
    for (step, life), page in zip(rows[num_decodes:], starts[num_decodes:].tolist(), strict=False):
        start, end = step.start, step.start + step.num_tokens
        own = pages[page + start // size : page - (-end // size)]
        slot = (own[:, None] * size + offsets).ravel()[start % size : start % size + step.num_tokens]
        slot[: max(life.shared_pages * size - start, 0)] = -1  # the page holds it already
        parts.append(slot)
    return {
        "kv_slot": _join(parts),
        "block_table": pages,
        "block_table_start": starts,
        "kv_len": _int32([step.start + step.num_tokens for step, _ in rows]),
    }
