"""What is run on the symbolic model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    fails: frozenset[int] = frozenset()  # steps that fail
    bad: int | None = None  # the job whose every step fails
    resets: frozenset[int] = frozenset()
    cache: dict[str, Any] = field(default_factory=dict)  # of CacheConfig
