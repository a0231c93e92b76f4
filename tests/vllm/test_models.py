"""Which models are served, and which are left to vLLM."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest
from watched import run

from mambacache.vllm import models
from mambacache.vllm.config import is_cpu

VLLM = Path(find_spec("vllm").origin).parent
MARKS = {"HasInnerState", "IsHybrid"}


def bases() -> dict[str, set[str]]:
    """The bases of all model classes of the installed vLLM, by name; its files are read, since few can be imported."""
    found: dict[str, set[str]] = {}
    for folder in ("model_executor/models", "models"):
        for path in (VLLM / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, set()).update(each.id for each in node.bases if hasattr(each, "id"))
    return found


def registered() -> dict[str, str]:
    """The class of each architecture that vLLM knows."""
    found = {}
    for node in ast.walk(ast.parse((VLLM / "model_executor/models/registry.py").read_text())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(value, ast.Tuple) and isinstance(key, ast.Constant) and len(value.elts) == 2:
                    found[key.value] = value.elts[1].value
    return found


def test_each_architecture_with_recurrent_layers_is_served_or_left_with_a_reason() -> None:
    known = bases()

    def recurrent(name: str, *below: str) -> bool:
        return name in MARKS or any(recurrent(each, name, *below) for each in known.get(name, set()) - {name, *below})

    found = {architecture for architecture, name in registered().items() if recurrent(name)}
    assert len(found) > 30 and not models.ARCHITECTURES.keys() & models.LEFT.keys()
    newer = {"AliceAIForCausalLM", "ClefFlashForJointSchema", "MiniCPMOcrForConditionalGeneration"}  # than 0.32
    assert found <= models.ARCHITECTURES.keys() | models.LEFT.keys()
    assert (models.ARCHITECTURES.keys() | models.LEFT.keys()) - newer <= found


@pytest.mark.skipif(not is_cpu(), reason="of the next vLLM there are files alone")
def test_a_model_that_is_left_to_vllm_is_as_vllm_alone_would_have_it(tmp_path: Path) -> None:
    run("left_run.py", "jamba", tmp_path)
