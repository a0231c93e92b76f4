"""What is said of an error: one sentence with its cause, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

HUB = "give a directory, or set HF_HUB_OFFLINE=1 with a cached model"
NO_MEMORY = ("allocate memory", "out of memory")
"""What torch says of it, in words of its own for each device."""


def sentence(error: BaseException) -> str:
    """One sentence of an error that a user can cause."""
    causes = list(_causes(error))
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed: pip install mambacache"
    if any(type(cause).__name__ == "LocalEntryNotFoundError" for cause in causes):  # of huggingface_hub
        return _hub(causes[-1])
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        said = str(error).partition(". ")[0] or "no more can be had"
        return f"there is not enough memory ({said}): `mambacache plan` says what a model takes"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"cannot use {error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).split()) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from, and so on to the first."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _hub(first: BaseException) -> str:
    if type(first).__name__ == "LocalEntryNotFoundError":  # nothing failed before it
        return "the model is not cached, and HF_HUB_OFFLINE keeps it from being fetched: give a directory"
    cause = (isinstance(first, OSError) and first.strerror) or str(first) or type(first).__name__
    return f"cannot reach the Hub ({cause.lower()}): {HUB}"
