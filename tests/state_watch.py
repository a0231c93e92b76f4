"""Fails on any torch operation that touches a state pool's memory outside `mambacache.kernels`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

KERNELS = "mambacache.kernels"


class StateWatch(TorchDispatchMode):
    """Watches the storage of pools while it is entered.

    An operation that reads or writes a storage raises AssertionError, unless a function of `mambacache.kernels` is on
    the Python stack. Making views of it is allowed: they read nothing. `kernel_accesses` counts what the ops did, so
    that a test can tell that the watch saw the pool at all; `offences` keeps what was raised, which an engine takes for
    the failure of a step.

    Args:
        pools: tensors, any one in each pool's storage.
    """

    def __init__(self, *pools: torch.Tensor) -> None:
        super().__init__()
        self.kernel_accesses = 0
        self.offences: list[str] = []
        self._storages: set[int] = set()
        for pool in pools:
            self.add(pool)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled while it watches: that torch guards each of its calls would take longer than they do."""
        return False

    def add(self, pool: torch.Tensor) -> None:
        """Watches one more pool."""
        self._storages.add(pool.untyped_storage().data_ptr())

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        watched = self._touches(args) or self._touches(kwargs.values())
        result = func(*args, **kwargs)
        # Operations such as `contiguous` are views by their schema, but copy where no view will do.
        views = result if isinstance(result, (list, tuple)) else [result]
        if watched and not (func.is_view and all(map(self._in_pool, views))):
            if not _called_from(KERNELS):
                self.offences.append(f"{func} touches the state pool outside {KERNELS}")
                raise AssertionError(self.offences[-1])
            self.kernel_accesses += 1
        return result

    def _touches(self, values: Iterable[Any]) -> bool:
        for value in values:
            if isinstance(value, torch.Tensor):
                if self._in_pool(value):
                    return True
            elif isinstance(value, (list, tuple)) and self._touches(value):
                return True
        return False

    def _in_pool(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() in self._storages


def _called_from(package: str) -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == package or name.startswith(f"{package}."):
            return True
        frame = frame.f_back
    return False
