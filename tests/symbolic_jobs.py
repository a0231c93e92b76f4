"""Describe the requests that run on the symbolic model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from mambacache.scheduler.drafts import DraftTree

VOCAB = 40


@dataclass
class Job:
    """Describe one request of a mix; `arrives` and `aborts` are step numbers."""

    prompt: list[int]
    max_tokens: int = 4
    arrives: int = 0
    aborts: int | None = None
    stop: tuple[int, ...] = ()
    salt: str = ""
    n: int = 1
    marks: tuple[int, ...] = ()
    read: bool = True
    store: bool = True


@dataclass
class Mix:
    """Hold jobs and the settings that they run with."""

    jobs: list[Job]
    budget: int = 200
    max_num_seqs: int = 8
    long_prefill: int = 0
    ahead: int = 0  # steps in flight while the next step is scheduled
    draft_errors: int | None = None  # None: no drafts; n: about one draft in n is wrong
    trees: bool = False  # whether drafts have branches
    fails: frozenset[int] = frozenset()  # steps that fail before they are issued
    late_fails: frozenset[int] = frozenset()  # issued steps that fail when their tokens are read
    bad: int | None = None  # the job that fails every step it is in
    resets: frozenset[int] = frozenset()
    cache: dict[str, Any] = field(default_factory=dict)  # fields of `CacheConfig`

    def drafts(self, right: list[int], done: int) -> list[int] | DraftTree:
        """Return drafts for a request; `right` are its next tokens, after `done` tokens of its answer."""
        every = self.draft_errors
        assert every is not None
        if not self.trees:
            return [token if (done + i) % every else (token + 1) % VOCAB for i, token in enumerate(right)]
        rng, tokens, parents, path = random.Random(str(right)), list[int](), list[int](), [0]
        while len(tokens) < len(right):
            if len(path) <= len(right) and rng.randrange(every + 1):
                parents.append(path[-1])
                tokens.append(right[len(path) - 1])
                path.append(len(tokens))
            else:
                parents.append(rng.randint(0, len(tokens)))
                tokens.append(rng.randrange(VOCAB))
        return DraftTree(tokens, parents)
