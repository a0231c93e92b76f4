"""Run a tiny trained model with and without the prefix cache."""

from pathlib import Path

MODEL = Path(__file__).with_name("model")
"""A Qwen3-Next of 1.02 million parameters, see benchmarks/recall/train.py."""
