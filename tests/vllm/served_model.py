"""A plugin of vLLM for the server of test_server.py, loaded in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Lets vLLM serve a Qwen3-Next without experts, which it counts, and has ours report after every step."""
    from vllm.model_executor.models.qwen3_next import QwenNextMixtureOfExperts

    from mambacache.vllm import scheduler

    QwenNextMixtureOfExperts.set_moe_parameters = lambda self: None
    scheduler.REPORT_SECONDS = 0.0
