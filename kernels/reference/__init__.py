"""Implement every op in plain torch, the oracle of the GPU kernels.

`operand_dtype` rounds operands of prefill products, as tensor cores do.
"""

from .conv1d import conv1d
from .copy_blocks import copy_blocks
from .experts import choose_experts, combine_experts, group_by_expert, silu_and_mul
from .gated_delta_rule import gated_delta_rule
from .gated_rms_norm import gated_rms_norm
from .kda import kda
from .keep_paths import keep_paths
from .ngrams import add_to_history, draft_from_history
from .paged_attention import paged_attention
from .place_decodes import place_decodes
from .rms_norm import rms_norm
from .selective_scan import selective_scan
from .ssd import ssd

__all__ = [
    "add_to_history",
    "choose_experts",
    "combine_experts",
    "conv1d",
    "copy_blocks",
    "draft_from_history",
    "gated_delta_rule",
    "gated_rms_norm",
    "group_by_expert",
    "kda",
    "keep_paths",
    "paged_attention",
    "place_decodes",
    "rms_norm",
    "selective_scan",
    "silu_and_mul",
    "ssd",
]
