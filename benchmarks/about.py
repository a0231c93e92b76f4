"""Describe the environment of a benchmark."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def about(*packages: str) -> dict[str, Any]:
    """Return the GPU, the versions of `packages`, and the commit; GPU and commit are None if absent."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in packages},
        "commit": head.stdout.strip() or None,
    }
