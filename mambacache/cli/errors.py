"""Describe errors in a sentence."""

from __future__ import annotations

NO_MEMORY = ("allocate memory", "out of memory")
"""Words of torch, by device."""


def sentence(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install mambacache"
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        said = str(error).partition(". ")[0] or "no more can be had"
        return f"there is not enough memory ({said}): `mambacache plan` says what a model takes"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"cannot use {error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__
