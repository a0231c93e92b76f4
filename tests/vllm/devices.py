"""Stand in for vLLM's platforms, as far as they tell a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def device(platform: str, capability: tuple[int, int] | None = None) -> Any:
    """Return an instance of a class that has the name of a vLLM platform."""
    known = capability and SimpleNamespace(major=capability[0], minor=capability[1])
    answers = {
        "is_cpu": platform == "CpuPlatform",
        "is_cuda": platform == "CudaPlatform",
        "get_device_capability": known,
    }
    asked = {question: staticmethod(lambda answer=answer: answer) for question, answer in answers.items()}
    return type(platform, (), asked)()
