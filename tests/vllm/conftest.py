"""Run the plugin's tests, which need vLLM: `make test-vllm` runs them in an environment of its own."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torchvision_operators  # noqa: F401

# Without vLLM this very folder looks like a package of that name, with no origin.
if (spec := find_spec("vllm")) is None or spec.origin is None:
    collect_ignore_glob = ["test_*.py"]
else:  # processes that vLLM starts import `sitecustomize` from this folder
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).resolve().parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a temporary folder for the files that a scheduler leaves to other processes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
