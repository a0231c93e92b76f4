"""Predict the hits of a prefix cache without hashes: token prefixes in dicts, fed by the cache's events."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

TOKEN_BYTES = 4

Prefix = tuple[str, bytes]  # salt, int32 tokens


def common_prefix(a: bytes, b: bytes) -> int:
    """Count the leading int32 tokens that two strings share."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES] else (low, middle - 1)
    return low


@dataclass
class CacheModel:
    """Hold the cached prefixes in `states` and `kv`, each with its exact flag.

    `seen` holds all prefixes that were computed to be stored, and `computed` the tokens that each request has computed.
    """

    block_size: int
    strict: bool
    attention: bool
    states: dict[Prefix, bool] = field(default_factory=dict)
    kv: dict[Prefix, bool] = field(default_factory=dict)
    seen: set[Prefix] = field(default_factory=set)
    computed: dict[str, Prefix] = field(default_factory=dict)
    without_kv: set[Prefix] = field(default_factory=set)  # prefixes that lost their KV block since the last check

    def match(self, prompt: Prefix, host_tokens: int | None = None) -> tuple[int, int, int]:
        """Return hit, coverage and junction of a prompt, in tokens; the host's KV covers `host_tokens`."""
        salt, tokens = prompt
        count = len(tokens) // TOKEN_BYTES
        grid = range(self.block_size, count + 1, self.block_size)
        boundaries = [(position, (salt, tokens[: position * TOKEN_BYTES])) for position in grid]
        coverage = 0
        for position, prefix in boundaries:
            covered = self._has(self.kv, prefix) if host_tokens is None else position <= host_tokens
            if self.attention and not covered:
                break
            coverage = position
        reachable = [(p, prefix) for p, prefix in boundaries if p < count]
        hit = max((p for p, prefix in reachable if p <= coverage and self._has(self.states, prefix)), default=0)
        met = [p for p, prefix in reachable if (self.attention and p <= coverage) or prefix in self.seen]
        junction = max(met, default=0)
        return hit, coverage, junction if junction > hit else 0

    def exact(self, prompt: Prefix, position: int) -> bool:
        """Return whether the state at a cached position, and all KV before it, are exact."""
        salt, tokens = prompt
        prefixes = [(salt, tokens[: p * TOKEN_BYTES]) for p in range(self.block_size, position + 1, self.block_size)]
        return not position or (self.states[prefixes[-1]] and all(self.kv.get(prefix, True) for prefix in prefixes))

    def ceiling(self, prompt: Prefix, hit: int) -> int:
        """Return the longest prefix shared with anything computed so far; at least one token is left to compute."""
        salt, tokens = prompt
        shared = [common_prefix(tokens, done) for other, done in self.computed.values() if other == salt]
        return max(hit, min(len(tokens) // TOKEN_BYTES - 1, max(shared, default=0)))

    def computes(self, request_id: str, done: Prefix) -> None:
        """Note that a request has computed these tokens."""
        if len(done[1]) > len(self.computed.get(request_id, ("", b""))[1]):
            self.computed[request_id] = done

    def remove(self, kind: str, prefix: Prefix) -> None:
        """Note that a state or a KV block is no longer cached."""
        del (self.states if kind == "state" else self.kv)[prefix]
        if kind == "kv":
            self.without_kv.add(prefix)

    def check(self, num_states: int, num_kv: int, elsewhere: Set[Prefix] = frozenset()) -> None:
        """Check after all events that no state outlives the KV block that ends at it, and that no event is missing.

        Args:
            num_states, num_kv: numbers of blocks that the cache holds.
            elsewhere: prefixes that keep their last KV block elsewhere.
        """
        orphans = self.states.keys() & self.without_kv - self.kv.keys() - elsewhere
        assert not orphans, "a state outlives the KV of its block"
        assert (len(self.states), len(self.kv)) == (num_states, num_kv), "events are missing"
        self.without_kv &= elsewhere

    def clear(self) -> None:
        self.seen.clear()
        self.computed.clear()

    def _has(self, held: dict[Prefix, bool], prefix: Prefix) -> bool:
        return prefix in held and (held[prefix] or not self.strict)
