"""Plug into vLLM for the server of test_server.py. Each of its processes loads this file."""

from __future__ import annotations


def register() -> None:
    """Have our scheduler report after every step."""
    from mambacache.vllm import scheduler

    scheduler.REPORT_SECONDS = 0.0
