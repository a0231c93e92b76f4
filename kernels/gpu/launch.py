"""Launches that cost their host little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class Launcher:
    """Calls a kernel, and remembers which of its compiled variants serves which arguments.

    Triton works that out anew in every call, which takes longer than the launch itself. It gets addresses in place of
    tensors, about which it would ask the driver one by one.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.variants: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        arguments: Sequence[Tensor | int | float],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """The kernel takes `tensors`, then `arguments`, then `constants`; `options` are the compiler's.

        All programs are on axis 0 of the grid: the other two end at 65,535, and a batch may have more rows and chunks.
        Tensors choose a variant by their dtype and by whether they start at a multiple of 16 bytes; the first one has a
        device. No argument may choose one: index arrays are int32 and aligned, numbers are not specialised.
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
        if variant is not None:
            rest = [x if isinstance(x, (int, float)) else x.data_ptr() for x in arguments]
            variant[grid](*pointers, *rest, *values)
            return
        assert [*constants] == self.kernel.arg_names[len(tensors) + len(arguments) :]
        variant = self.kernel[grid](*tensors, *arguments, **constants, **options)
        self.variants[key] = variant  # None in the interpreter
