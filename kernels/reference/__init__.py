"""Every op in plain torch and any float dtype: the CPU backend, and the oracle of the GPU kernels."""

from .conv1d import conv1d
from .gated_delta_rule import gated_delta_rule
from .gated_rms_norm import gated_rms_norm
from .paged_attention import paged_attention

__all__ = ["conv1d", "gated_delta_rule", "gated_rms_norm", "paged_attention"]
