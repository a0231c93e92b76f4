"""Provide ops that read and write cached states in place. They take the index arrays of a plan."""

from mambacache.plan import FOLD

from .api import (
    conv1d,
    copy_blocks,
    gated_delta_rule,
    gated_rms_norm,
    kda,
    paged_attention,
    place_decodes,
    rms_norm,
    selective_scan,
    ssd,
)
from .compilation import compiling
from .experts import choose_experts, combine_experts, group_by_expert, silu_and_mul
from .indices import DecodeBuffers, StateIndices, pack_arrays
from .logs import conv1d_log, gated_delta_rule_log, kda_log, selective_scan_log, ssd_log
from .ngrams import add_to_history, draft_from_history
from .paths import keep_paths
from .state_pool import StatePool, StateTensor, state_bytes

__all__ = [
    "FOLD",
    "DecodeBuffers",
    "StateIndices",
    "StatePool",
    "StateTensor",
    "add_to_history",
    "choose_experts",
    "combine_experts",
    "compiling",
    "conv1d",
    "conv1d_log",
    "copy_blocks",
    "draft_from_history",
    "gated_delta_rule",
    "gated_delta_rule_log",
    "gated_rms_norm",
    "group_by_expert",
    "kda",
    "kda_log",
    "keep_paths",
    "pack_arrays",
    "paged_attention",
    "place_decodes",
    "rms_norm",
    "selective_scan",
    "selective_scan_log",
    "silu_and_mul",
    "ssd",
    "ssd_log",
    "state_bytes",
]
