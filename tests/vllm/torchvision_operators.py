"""Make torchvision importable beside a torch for CPUs: vLLM's classes with images import it for text alone too.

Released torchvision is built for CUDA. Its library does not load beside this torch, and its import then misses two
operators. After this module every later import of torchvision in this process declares them.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class DeclareOperators(MetaPathFinder):
    """Find no module, and declare the operators before the module that needs them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision._meta_registrations" and not sys.modules["torchvision.extension"]._has_ops():
            import torch

            for operator, schema in SCHEMAS.items():
                torch.library.define(f"torchvision::{operator}", schema)


sys.meta_path.insert(0, DeclareOperators())
