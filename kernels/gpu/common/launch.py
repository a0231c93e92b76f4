"""Launch kernels cheaply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ...compilation import is_compiling
from ...device import is_hopper
from ...indices import StateIndices


class Pointers(NamedTuple):
    tensors: tuple[Tensor, ...] = ()
    addresses: tuple[int, ...] = ()


NO_POINTERS = Pointers()


def index_pointers(indices: StateIndices, names: tuple[str, ...]) -> Pointers:
    """Return shared index arrays."""
    known: Pointers | None = indices.pointers.get(names)
    if known is None:
        tensors = tuple(getattr(indices, name) for name in names)
        known = indices.pointers[names] = Pointers(tensors, tuple(x.data_ptr() for x in tensors))
    return known


class Launcher:
    """Remember a kernel's compiled variants."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        if not triton.knobs.runtime.interpret:
            # Triton 3.6: keys on disk depend on the order of hashing, so hash on import.
            hash(kernel)
        self.variants: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        indices: Pointers,
        numbers: Sequence[int | float],
        constants: Mapping[str, object],
        **options: int | str | None,
    ) -> None:
        """Launch with `tensors`, `indices`, `numbers` and `constants` in turn; `options` go to the compiler.

        All programs are on axis 0: other axes end at 65,535. Dtypes and 16-byte alignment of `tensors` choose the
        variant; the first gives the device. Index arrays are int32 and aligned, and numbers unspecialised.

        All GPUs but Hopper share code for Ampere: Blackwell's own, by Triton 3.6, races.
        """
        first = tensors[0]
        assert first is not None
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        aligned = [pointer is None or pointer % 16 == 0 for pointer in pointers]
        values = constants.values()
        key = (first.get_device(), *dtypes, *aligned, *values, *options.values())
        grid = (programs, 1, 1)
        variant = self.variants.get(key)
        if variant is not None and not is_compiling():
            variant[grid](*pointers, *indices.addresses, *numbers, *values)
            return
        options.setdefault("enable_fp_fusion", True)  # Triton 3.10 changes the default
        if not is_hopper(first.get_device()):
            options["arch"] = "sm80"
        arguments = *tensors, *indices.tensors, *numbers
        assert [*constants] == self.kernel.arg_names[len(arguments) :]
        if is_compiling():
            self.kernel.warmup(*arguments, grid=grid, **constants, **options)
            return
        variant = self.kernel[grid](*arguments, **constants, **options)
        self.variants[key] = variant  # None in the interpreter
