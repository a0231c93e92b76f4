"""What is run on the symbolic model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from mambacache.scheduler.drafts import DraftTree

VOCAB = 40


@dataclass
class Job:
    """One request of a mix; steps are counted from the beginning."""

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
    """Jobs, and how they are run."""

    jobs: list[Job]
    budget: int = 200
    max_num_seqs: int = 8
    long_prefill: int = 0
    ahead: int = 0  # steps that are scheduled and issued before the tokens of the oldest are read
    draft_errors: int | None = None  # None: no drafts; else every so many proposed tokens one is wrong
    trees: bool = False  # whether drafts have branches
    fails: frozenset[int] = frozenset()  # steps that fail before they are issued
    late_fails: frozenset[int] = frozenset()  # steps that fail after they were issued, when their tokens are read
    bad: int | None = None  # the job whose every step fails
    resets: frozenset[int] = frozenset()
    cache: dict[str, Any] = field(default_factory=dict)  # of CacheConfig

    def drafts(self, right: list[int], done: int) -> list[int] | DraftTree:
        """Guesses for a request whose next tokens are `right`, as many as it may be given, after so many others."""
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
