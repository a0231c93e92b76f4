"""Launches that cost their host little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def _pointers(arguments: Sequence[Any]) -> list[Any]:
    """With addresses in place of tensors, about which Triton would ask the driver one by one."""
    return [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]


class Launcher:
    """Calls a kernel, and remembers which of its compiled variants serves which arguments.

    Triton works that out anew in every call, which takes longer than the launch itself.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.variants: dict[tuple[object, ...], Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: Sequence[Tensor | None],
        arguments: Sequence[object],
        constants: Mapping[str, object],
        **options: int,
    ) -> None:
        """The kernel takes `tensors`, then `arguments`, then `constants`; `options` are the compiler's.

        Tensors choose a variant by their dtype and by whether they start at a multiple of 16 bytes; the first one has a
        device. No argument may choose one: index arrays are int32 and aligned, numbers are not specialised.
        """
        first = tensors[0]
        assert first is not None
        pointers = _pointers(tensors)
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        aligned = [pointer is None or pointer % 16 == 0 for pointer in pointers]
        key = (first.device.index, *dtypes, *aligned, *constants.values(), *options.values())
        variant = self.variants.get(key)
        if variant is not None:
            variant[grid](*pointers, *_pointers(arguments), *constants.values())
            return
        assert [*constants] == self.kernel.arg_names[len(tensors) + len(arguments) :]
        variant = self.kernel[grid](*tensors, *arguments, **constants, **options)
        self.variants[key] = variant  # None in the interpreter
