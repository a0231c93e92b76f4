"""Plant a trace function, so that tests can raise in the middle of other code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def traced(trace: Callable[..., Any] | None) -> Iterator[None]:
    """Run a block under a trace function, as of `sys.settrace`, or under none, and put the former function back."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
