"""Launches that cost their host little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
from torch import Tensor

from ...compilation import is_compiling
from ...indices import StateIndices


class Pointers(NamedTuple):
    """Index arrays in the order in which a kernel takes them, and their addresses."""

    tensors: tuple[Tensor, ...] = ()
    addresses: tuple[int, ...] = ()


NO_POINTERS = Pointers()


def index_pointers(indices: StateIndices, names: tuple[str, ...]) -> Pointers:
    """The index arrays of these names. Every layer of a step takes the same: their addresses are asked for once."""
    known: Pointers | None = indices.pointers.get(names)
    if known is None:
        tensors = tuple(getattr(indices, name) for name in names)
        known = indices.pointers[names] = Pointers(tensors, tuple(x.data_ptr() for x in tensors))
    return known


class Launcher:
    """Calls a kernel, and remembers which of its compiled variants serves which arguments.

    Triton works that out anew in every call, which takes longer than the launch itself. It gets addresses in place of
    tensors, about which it would ask the driver one by one.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        if not triton.knobs.runtime.interpret:
            # Triton 3.6 leaves out of a kernel's key on disk the constants of functions without one yet. Made in the
            # order of imports, keys are the same in every process, which then finds what another one has compiled.
            hash(kernel)
        self.variants: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        indices: Pointers,
        numbers: Sequence[int | float],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """The kernel takes `tensors`, `indices`, `numbers` and `constants` in turn; `options` are the compiler's.

        All programs are on axis 0 of the grid: the other two end at 65,535, and a batch may have more rows and chunks.
        Tensors choose a variant by their dtype and by whether they start at a multiple of 16 bytes; the first one has a
        device. Nothing else may choose one: index arrays are int32 and aligned, numbers are not specialised.

        Within `compiling` a variant compiles in a thread, and nothing is launched.
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
        arguments = *tensors, *indices.tensors, *numbers
        assert [*constants] == self.kernel.arg_names[len(arguments) :]
        if is_compiling():
            self.kernel.warmup(*arguments, grid=grid, **constants, **options)
            return
        variant = self.kernel[grid](*arguments, **constants, **options)
        self.variants[key] = variant  # None in the interpreter
