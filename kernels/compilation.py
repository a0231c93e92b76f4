"""Compile kernels ahead."""

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
    return _compiling.get()


@contextmanager
def compiling(threads: Executor) -> Iterator[None]:
    """Compile ops' kernels for a GPU in `threads`, without launches; the ops return zeros.

    All have compiled when the block ends. Other Triton kernels run as usual.
    """
    from triton import AsyncCompileMode

    with AsyncCompileMode(threads):
        before = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(before)


class Zeros:
    """Clear results that were never computed."""

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
