"""Identify everything that states depend on."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from mambacache import kernels

WORDS = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Words of 8 bytes in a piece, which fits a CPU's caches and keeps a GPU busy."""


def identity(weights: str, settings: object, layout: object, packages: Iterable[str], device: torch.device) -> str:
    """Describe what states depend on, with the versions of torch, Triton and `packages`; leave paths out.

    Args:
        weights: `weights_digest` of the model.
    """
    on_cpu = device.type == "cpu"
    device_name = torch.backends.cpu.get_cpu_capability() if on_cpu else torch.cuda.get_device_name(device)
    versions = [(name, version(name)) for name in ("torch", "triton", *packages) if find_spec(name) is not None]
    return repr((weights, settings, layout, source_digest(), versions, device_name))


@torch.inference_mode()
def weights_digest(module: torch.nn.Module) -> str:
    digest = blake2b(digest_size=16)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(_sums(tensor.detach().contiguous().reshape(-1).view(torch.uint8)).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(raw: torch.Tensor) -> torch.Tensor:
    """Sum each piece's hashed words: uint8 [bytes] to int64 [pieces]."""
    size = min(WORDS[raw.device.type], -(-len(raw) // 8))
    places = torch.arange(size, device=raw.device) * -0x61C8864680B583EB
    buffer, shifted = torch.zeros_like(places), torch.empty_like(places)
    sums = []
    for piece in raw.split(8 * size) if size else ():
        count = -(-len(piece) // 8)
        words, other = buffer[:count], shifted[:count]
        words[-1] = 0  # the piece may end inside the last word
        words.view(torch.uint8)[: len(piece)] = piece
        words += places[:count]
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            words ^= torch.bitwise_right_shift(words, shift, out=other)
            words *= factor
        words ^= torch.bitwise_right_shift(words, 31, out=other)
        sums.append(words.sum())
    return torch.stack(sums) if sums else places


def source_digest() -> str:
    digest = blake2b(digest_size=16)
    for root in (Path(__file__).parents[1], Path(kernels.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
