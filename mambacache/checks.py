"""Check the arguments of `PrefixCache`; a wrong argument raises ValueError."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from numbers import Integral
from typing import Any

import numpy as np

from mambacache.config import CacheConfig
from mambacache.plan import PLACEHOLDER, SequenceStep

MAX_TOKEN = (1 << 31) - 1


def check_integer(name: str, value: object, least: int, most: int | None = None) -> None:
    """Accept an integer from `least` to `most`."""
    if type(value) is int and value >= least and (most is None or value <= most):
        return
    integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not integer or int(value) < least or (most is not None and int(value) > most):  # type: ignore[call-overload]
        bounds = f"{least} or more" if most is None else f"{least} to {most}" if most > least else f"{least}"
        raise ValueError(f"{name} is {value!r}: give an integer, {bounds}")


def token_array(name: str, token_ids: Any) -> array[int]:
    """Return token ids as int32."""
    if isinstance(token_ids, (str, bytes, bytearray, memoryview)):
        raise ValueError(
            f"{name} is of type {type(token_ids).__name__}: give a sequence of token ids, which are integers"
        )
    if not isinstance(token_ids, list) and hasattr(token_ids, "tolist"):  # numpy and torch
        token_ids = token_ids.tolist()
    try:
        unsigned = array("I", token_ids)  # faster than array("i"), and rejects negative numbers
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name} holds what is no token id ({error}): give integers from 0 to {MAX_TOKEN}") from None
    largest = int(np.frombuffer(unsigned, np.uint32).max(initial=0))
    if largest > MAX_TOKEN:
        raise ValueError(f"{name} holds the token {largest}: give integers from 0 to {MAX_TOKEN}")
    tokens = array("i")
    tokens.frombytes(memoryview(unsigned).cast("B"))
    return tokens


def _as_tuple(name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError:
        raise ValueError(f"{name} is {values!r}: give a sequence") from None


def prompt_array(request_id: str, token_ids: Any, most: int) -> array[int]:
    """Return a prompt of 1 to `most` tokens as int32; 0 for no limit."""
    tokens = token_array(f"the prompt of request {request_id!r}", token_ids)
    if not tokens:
        raise ValueError(f"request {request_id!r} has an empty prompt: give it at least one token")
    if 0 < most < len(tokens):
        raise ValueError(
            f"the prompt of request {request_id!r} has {len(tokens)} tokens and the KV pool holds {most}: shorten it, "
            "or raise num_kv_blocks"
        )
    return tokens


def check_bounds(config: CacheConfig, kv_tokens: int | None, max_tokens: int | None) -> None:
    if config.host_keeps_kv and kv_tokens is None:
        raise ValueError("kv_tokens is missing: say how many tokens the host's KV covers, or set num_kv_blocks")
    for name, value in (("kv_tokens", kv_tokens), ("max_tokens", max_tokens)):
        if value is not None:
            check_integer(name, value, 0)


def check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} is of type {type(value).__name__}: give a str")


def prefix_hashes(hashes: Iterable[bytes]) -> list[bytes]:
    found = list(_as_tuple("hashes", hashes))
    for each in found:
        if type(each) is not bytes:
            raise ValueError(f"hashes holds a {type(each).__name__}: give hashes of type bytes, as in CacheEvent")
    return found


def page_numbers(pages: Iterable[int]) -> list[int]:
    found = list(_as_tuple("pages", pages))
    for each in found:
        check_integer("a page", each, 0)
    return found


def page_ends(pages: Mapping[int, int]) -> dict[int, int]:
    if not isinstance(pages, Mapping):
        raise ValueError(f"pages is {pages!r}: give a dict of tokens by page")
    for end in pages.values():
        check_integer("the end of a page", end, 1)
    return dict(zip(page_numbers(pages), pages.values(), strict=True))


def check_key(key: object, depth: int = 4) -> None:
    """Accept keys with a unique repr: arrays shorten theirs."""
    if type(key) is tuple and depth:
        for part in key:
            check_key(part, depth - 1)
    elif type(key) not in (str, bytes, int):
        raise ValueError(f"a key in extra_keys is of type {type(key).__name__}: give a str, bytes, an int, or a tuple")


def block_keys(extra_keys: Iterable[tuple[int, object]], num_tokens: int, block_size: int) -> dict[int, bytes]:
    """Return a digest of the keys in each block with keys."""
    keys: dict[int, bytes] = {}
    for pair in _as_tuple("extra_keys", extra_keys):
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"extra_keys holds {pair!r}: give pairs (position, key)")
        check_integer("a position in extra_keys", pair[0], 0, num_tokens - 1)
        check_key(pair[1])
        block = pair[0] // block_size
        keys[block] = keys.get(block, b"") + repr((int(pair[0]) % block_size, pair[1])).encode()
    return {block: blake2b(key, digest_size=16).digest() for block, key in keys.items()}


def boundaries(checkpoint_at: Iterable[int], block_size: int) -> tuple[int, ...]:
    """Round positions down to blocks."""
    positions = _as_tuple("checkpoint_at", checkpoint_at)
    for position in positions:
        check_integer("a position in checkpoint_at", position, 0)
    return tuple(int(position) // block_size * block_size for position in positions)


def tree_parents(who: str, drafts: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """Return the parents of drafts, a tree in preorder."""
    if len(parents) and (len(parents) != len(drafts) or PLACEHOLDER in drafts):
        raise ValueError(
            f"{who} has {len(drafts)} drafts and {len(parents)} parents: give each draft of a tree, none of them a "
            "placeholder, its parent's number"
        )
    path = [0]
    for i, parent in enumerate(parents, 1):
        check_integer(f"parent {i} of {who}", parent, 0, i - 1)
        while path and path[-1] != parent:
            path.pop()
        if not path:
            raise ValueError(f"the drafts of {who} are not in preorder: put all descendants of a draft right behind it")
        path.append(i)
    return tuple(map(int, parents))


def accepted_tokens(step: SequenceStep, token_ids: Sequence[int]) -> array[int]:
    """Return tokens that `step` can yield, as int32."""
    count = len(token_ids)
    if not count:
        return array("i")
    if count == 1 and step.samples and type(token_ids[0]) is int and 0 <= token_ids[0] <= MAX_TOKEN:
        return array("i", token_ids)  # fast path for most rows
    tokens = token_array(f"the answer of request {step.request_id!r}", token_ids)
    most = 1 + len(step.drafts) if step.samples else 0
    if len(tokens) > most:
        raise ValueError(f"request {step.request_id!r} comes with {len(tokens)} tokens: its row gives {most}")
    if len(step.followed(tokens[:-1])) < len(tokens):
        raise ValueError(
            f"request {step.request_id!r} comes with tokens {list(tokens)} for the drafts {list(step.drafts)}: give "
            "those that agree and the one after them"
        )
    return tokens
