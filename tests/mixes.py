"""Draw a tenth of the random mixes in `make test`, and all in `make test-full`."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

PART = float(os.environ.get("MAMBACACHE_MIXES", "0.1"))
"""The part of the random mixes that a test draws."""


def mixes(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test with hypothesis draw this number of examples, times PART."""
    chosen = settings(
        max_examples=max(round(count * PART), 1),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: pytest.mark.mixes(chosen(test))


def seeds(count: int) -> range:
    """Return the seeds of a test marked `mixes`: this number, times PART."""
    return range(max(round(count * PART), 1))
