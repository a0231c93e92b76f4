"""Fails on any torch operation that touches a state pool's memory outside `mambacache.kernels`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = "mambacache.kernels"


class StateWatch(TorchDispatchMode):
    """Watches a pool's storage while it is entered.

    An operation that reads or writes the storage raises AssertionError, unless a function of `mambacache.kernels` is
    on the Python stack. Making views of it is allowed: they read nothing. `kernel_accesses` counts what the ops did, so
    that a test can tell that the watch saw the pool at all.

    Args:
        pool: any tensor in the pool's storage.
    """

    def __init__(self, pool: torch.Tensor) -> None:
        super().__init__()
        self.storage = pool.untyped_storage().data_ptr()
        self.kernel_accesses = 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watched = any(self._in_pool(x) for x in _tensors([*args, *kwargs.values()]))
        result = func(*args, **kwargs)
        # Operations such as `contiguous` are views by their schema, but copy where no view will do.
        if watched and not (func.is_view and all(self._in_pool(x) for x in _tensors([result]))):
            assert _called_from(KERNELS), f"{func} touches the state pool outside {KERNELS}"
            self.kernel_accesses += 1
        return result

    def _in_pool(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() == self.storage


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _called_from(package: str) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False
