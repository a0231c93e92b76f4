"""Give kernels structs in place of long parameter lists."""

from __future__ import annotations

from typing import Any, dataclass_transform

import triton
import triton.language as tl
from triton.language.core import _aggregate, base_value

INTERPRETED = triton.knobs.runtime.interpret  # constants stay plain values there


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """Return a struct with the annotated fields, which take positional arguments in order.

    Annotations are for readers: a field may hold a tensor, a constant, None or another struct. Structs have no methods,
    which the interpreter does not run.
    """
    fields = tuple(cls.__annotations__)

    def __init__(self: Any, *values: Any) -> None:
        for field, value in zip(fields, values, strict=True):
            setattr(self, field, value if INTERPRETED or isinstance(value, base_value) else tl.constexpr(value))

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    cls.__annotations__ = dict.fromkeys(fields, object)  # Triton 3.6 needs types, not their names
    return _aggregate(cls)
