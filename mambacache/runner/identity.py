"""What states and KV depend on beside tokens: equal for engines that may read each other's files, and for no others."""

from __future__ import annotations

from hashlib import blake2b
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from mambacache import kernels
from mambacache.config import EngineConfig
from mambacache.models.adapt import Model

WORDS = 1 << 20
"""Of 8 bytes, that are digested at a time."""


def identity(model: Model, config: EngineConfig, device: torch.device) -> str:
    """Names a model as it is in memory, its weights by a digest of all of them; the layout of states and pages; the
    code and the device that compute them. It knows no paths: a checkpoint may be moved."""
    settings = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    layers = model.state_layers(getattr(torch, config.state_dtype), config.max_draft_tokens)
    on_cpu = device.type == "cpu"
    device_name = torch.backends.cpu.get_cpu_capability() if on_cpu else torch.cuda.get_device_name(device)
    versions = [(name, version(name)) for name in ("torch", "transformers", "triton") if find_spec(name) is not None]
    layout = config.block_size, layers, model.kv_layers
    return repr((weights_digest(model.module), settings, layout, source_digest(), versions, device_name))


@torch.inference_mode()
def weights_digest(module: torch.nn.Module) -> str:
    """Of all parameters and buffers: names, types, shapes and every byte. It is made where they are, from sums of words
    that are scattered by their value and place, so that a GPU reads them about as quickly as it can."""
    digest = blake2b(digest_size=16)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        digest.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        sums = [_scattered(part).sum() for part in raw.split(8 * WORDS)]
        digest.update(torch.stack(sums).cpu().numpy().tobytes() if sums else b"")
    return digest.hexdigest()


def _scattered(raw: torch.Tensor) -> torch.Tensor:
    """int64, one for each 8 bytes of uint8 [bytes], by the last steps of splitmix64 on their value and place."""
    words = torch.zeros(-(-len(raw) // 8), dtype=torch.int64, device=raw.device)
    words.view(torch.uint8)[: len(raw)] = raw
    words += torch.arange(len(words), device=raw.device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        words ^= words >> shift
        words *= factor
    return words.bitwise_xor_(words >> 31)


def source_digest() -> str:
    """Of this package's code, the kernels' and the version included."""
    digest = blake2b(digest_size=16)
    for root in (Path(__file__).parents[1], Path(kernels.__file__).parent):
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()
