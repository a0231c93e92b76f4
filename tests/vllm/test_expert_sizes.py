"""The sizes of warm-up steps: they use every variant of vLLM's kernel of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import vllm.model_executor.layers.fused_moe as fused_moe
from vllm.model_executor.layers.fused_moe.fused_moe import get_default_config

from mambacache.vllm.warm_up import expert_sizes

ROOM = 8192
USUAL = 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096
FURTHER = 5120, 9216, 13312, 17408, 25600, 33792, 41984, 50176, 58368
"""Tokens with tiles of their own in vLLM's tables; a step takes the nearest."""
SHAPES = [(8, 2), (16, 1), (60, 4), (64, 8), (128, 6), (256, 8), (512, 10)]


def variant(tokens: int, experts: int, top_k: int, tiles: dict[str, Any]) -> tuple[object, ...]:
    """Return the arguments of `fused_moe_kernel` that choose its variant."""
    pairs, block = tokens * top_k, tiles["BLOCK_SIZE_M"]
    unsorted = 4 * pairs <= experts
    padded = pairs * block if pairs < experts else pairs + experts * (block - 1)
    if unsorted or tokens < block:
        padded = min(padded, pairs * block)
    return (*tiles.values(), unsorted, pairs == 1, pairs % 16 == 0, padded % 16 == 0)


@pytest.mark.parametrize(("dtype", "blocks"), [(None, None), ("fp8_w8a8", None), ("fp8_w8a8", [128, 128])])
@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
def test_sizes_use_every_variant_without_a_table(experts: int, top_k: int, dtype: str | None, blocks: Any) -> None:
    def of(tokens: int) -> tuple[object, ...]:
        return variant(tokens, experts, top_k, get_default_config(tokens, experts, 512, 2048, top_k, dtype, blocks))

    sizes = list(expert_sizes(experts, top_k, ROOM))
    assert {of(size) for size in sizes} == {of(tokens) for tokens in range(1, ROOM + 1)}
    assert len(sizes) < 100


@pytest.mark.parametrize(("experts", "top_k"), SHAPES)
@pytest.mark.parametrize("keys", [USUAL, USUAL + FURTHER])
def test_sizes_use_every_variant_of_a_table(keys: tuple[int, ...], experts: int, top_k: int) -> None:
    def of(tokens: int) -> tuple[object, ...]:
        nearest = min(keys, key=lambda key: abs(key - tokens))
        return variant(tokens, experts, top_k, {"BLOCK_SIZE_M": 64, "key": nearest})

    sizes = expert_sizes(experts, top_k, ROOM)
    assert {of(size) for size in sizes} == {of(tokens) for tokens in range(1, ROOM + 1)}


def test_most_tables_have_these_keys() -> None:
    paths = [*Path(fused_moe.__file__).parent.glob("configs/E=*NVIDIA*.json")]
    found = [tuple(int(key) for key in json.loads(path.read_text()) if key.isdigit()) for path in paths]
    assert sum(keys in (USUAL, USUAL + FURTHER) for keys in found) > 0.9 * len(found)


@pytest.mark.parametrize("room", [1, 7, 100])
def test_no_size_exceeds_the_room(room: int) -> None:
    assert max(expert_sizes(64, 8, room)) == room
