"""Mark parameters `full`: `make test` leaves them to `make test-full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

FULL = pytest.mark.full
ONE_OF_EACH_FAMILY = ("qwen3_next", "kimi_linear", "nemotron_h", "jamba", "lfm2")


def parameter(value: Any, quick: bool) -> Any:
    """Return a parameter, for `make test-full` alone unless it is quick. A tuple has the values of several names."""
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=() if quick else FULL)


def full(*values: Any) -> list[Any]:
    """Return parameters for `make test-full` alone."""
    return [parameter(value, False) for value in values]


def some(count: int, values: Collection[Any]) -> list[Any]:
    """Return parameters of which `make test` takes `count`, evenly spread from the first to the last."""
    last = len(values) - 1
    quick = {round(i * last / max(count - 1, 1)) for i in range(count)}
    return [parameter(value, i in quick) for i, value in enumerate(values)]


def by_family(models: Iterable[str]) -> list[Any]:
    """Return names of models, of which `make test` takes one of each family."""
    return [parameter(name, name in ONE_OF_EACH_FAMILY) for name in models]
