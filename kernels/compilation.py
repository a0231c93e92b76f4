"""Kernels that compile before they are needed, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from torch import Tensor

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def is_compiling() -> bool:
    """Return whether this thread is in a block of `compiling`."""
    return _compiling.get()


@contextmanager
def compiling(threads: Executor) -> Iterator[None]:
    """Have ops on a GPU compile their kernels in `threads`, and launch none.

    All kernels have compiled when the block ends. Within it, ops that return tensors return zeros, and all others do
    nothing. Other Triton kernels that are launched in the block compile and run as ever.
    """
    from triton import AsyncCompileMode

    with AsyncCompileMode(threads):
        before = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(before)


class Zeros:
    """The ops of a module, whose results become zeros: nothing has computed them."""

    def __init__(self, ops: ModuleType) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._ops, name)

        def zeros(*args: Any, **named: Any) -> Any:
            result = op(*args, **named)
            for each in result if isinstance(result, tuple) else (result,):
                if isinstance(each, Tensor):
                    each.zero_()
            return result

        return zeros
