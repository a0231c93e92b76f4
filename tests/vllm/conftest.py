"""Tests of the plugin, which need vLLM: `make test-vllm` runs them in an environment of its own."""

from importlib.util import find_spec

# Without vLLM this very folder looks like a package of that name, though one that comes from nowhere.
if (spec := find_spec("vllm")) is None or spec.origin is None:
    collect_ignore_glob = ["test_*.py"]
