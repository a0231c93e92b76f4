"""A tiny trained model that answers out of its states, its task, and what the prefix cache does for it."""

from pathlib import Path

MODEL = Path(__file__).with_name("model")
"""A Qwen3-Next of 1.02 million parameters, two equal experts in its last layer; see benchmarks/recall/train.py."""
