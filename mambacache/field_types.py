"""Check the fields of settings against their annotations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from mambacache.units import is_bytes, parse_bytes

# Types, conversion, and name in errors.
KINDS: dict[str, tuple[tuple[type, ...], Callable[[Any], Any], str]] = {
    "bool": ((bool,), bool, "True or False"),
    "int": ((Integral,), int, "an integer"),
    "float": ((Real,), float, "a number"),
    "str": ((str,), str, "a string"),
    "bytes": ((Integral, str), parse_bytes, 'bytes, or to a size such as "20GiB"'),
    "str | Path": ((str, Path), lambda value: value, "a string or a path"),
}


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def hold_to_annotations(config: Any) -> None:
    """Convert each field to its annotated type, or raise ValueError; None becomes the default."""
    for option in fields(config):
        value = getattr(config, option.name)
        if value is None and option.default is not MISSING:
            value = option.default
        else:
            kind = "bytes" if is_bytes(option.name) else str(option.type).removesuffix(" | None")
            value = _typed(option.name, kind, value)
        object.__setattr__(config, option.name, value)


def _typed(name: str, kind: str, value: Any) -> Any:
    if kind.startswith("Sequence["):
        try:
            items = tuple(value) if not isinstance(value, str | bytes | Mapping) else None
        except TypeError:
            items = None
        if items is None:
            raise ValueError(f"{name} is {value!r}: set it to a list")
        return tuple(_typed(f"an item of {name}", kind[len("Sequence[") : -1], item) for item in items)
    if kind.startswith("Mapping["):
        require(isinstance(value, Mapping), f"{name} is {value!r}: set it to a dictionary")
        of_keys, of_values = kind[len("Mapping[") : -1].split(", ")
        return {
            _typed(f"a key of {name}", of_keys, key): _typed(f"a value of {name}", of_values, item)
            for key, item in value.items()
        }
    if kind.startswith("tuple["):
        kinds = kind[len("tuple[") : -1].split(", ")
        require(
            isinstance(value, Sequence) and len(value) == len(kinds),
            f"{name} is {value!r}: set it to {len(kinds)} items",
        )
        return tuple(_typed(f"an item of {name}", of_item, item) for of_item, item in zip(kinds, value, strict=True))
    types, convert, what = KINDS[kind]
    require(
        isinstance(value, types) and isinstance(value, bool) == (kind == "bool"),
        f"{name} is {value!r}: set it to {what}",
    )
    try:
        return convert(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r}: set it to {what}") from None
    except OverflowError as error:
        raise ValueError(f"{name} is beyond the largest float: set it nearer to 0") from error
