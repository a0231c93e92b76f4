"""Tests of the plugin, which need vLLM: `make test-vllm` runs them in an environment of its own."""

from importlib.util import find_spec

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
