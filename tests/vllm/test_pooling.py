"""Models that pool in vLLM have the vectors of transformers' uncached forward, and hits computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from watched import run


@pytest.mark.parametrize("name", ["embedding", "jamba", "lfm2_colbert", "colqwen3_5"])
def test_a_model_that_pools_gives_the_vectors_and_hits_that_it_should(name: str, tmp_path: Path) -> None:
    run("pooling_run.py", name, tmp_path)
