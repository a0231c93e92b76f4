"""Parse amounts of memory."""

from __future__ import annotations

import re
from numbers import Integral

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def is_bytes(name: str) -> bool:
    return "bytes" in name.split("_")


def parse_bytes(value: object) -> int:
    """Return the bytes of an integer or of a text such as "20GiB"."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", str(value).lower(), re.ASCII)
    if match is None:
        raise ValueError(f'{value!r} is no amount of memory: give bytes, or such as "20GiB"')
    return int(float(match[1]) * UNITS[match[2] or ""])
