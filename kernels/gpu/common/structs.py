"""Give kernels structs."""

from __future__ import annotations

from typing import Any, TypeVar, dataclass_transform

import triton
import triton.language as tl
from triton.language.core import _aggregate, base_value

Struct = TypeVar("Struct")
INTERPRETED = triton.knobs.runtime.interpret  # constants stay plain


@dataclass_transform()
def aggregate(cls: type[Struct]) -> type[Struct]:
    """Return a struct with the annotated fields: tensors, constants, None or structs.

    The interpreter runs no methods.
    """
    fields = tuple(cls.__annotations__)

    def __init__(self: Any, *values: Any) -> None:
        for field, value in zip(fields, values, strict=True):
            setattr(self, field, value if INTERPRETED or isinstance(value, base_value) else tl.constexpr(value))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__
    cls.__annotations__ = dict.fromkeys(fields, object)  # Triton 3.6 needs types, not their names
    struct: type[Struct] = _aggregate(cls)
    return struct
