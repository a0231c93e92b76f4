"""Check that the wheel works away from the checkout, and that the type check sees into `mambacache.kernels`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGE_FILES = ("pyproject.toml", "Makefile", "README.md", "LICENSE", "mambacache", "kernels")
MAKE_VARIABLES = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")
NOT_INSTALLED = "mambacache: {} is not installed: pip install mambacache\n"
PREFIX_CACHE = """
from mambacache import CacheConfig, PrefixCache

cache = PrefixCache(CacheConfig(num_state_blocks=8, has_attention=False))
for name in ("first", "again"):
    cache.add(name, list(range(150)))
    print(cache.admit(name))
    step = cache.allocate(name, cache.next_tokens(name, budget=200))
    plan = cache.plan([step])
    cache.issued(plan.steps)
    cache.accept(plan.steps, {name: [7]})
    cache.free(name, finished=True)
    cache.check()
print(cache.stats)
"""
MISTAKE = """
from mambacache.kernels import conv1d

conv1d("not a tensor")
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with its errors in its output, out of reach of a `make` that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in MAKE_VARIABLES}
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Copy the files that a wheel is built from."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in PACKAGE_FILES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copy / name)
    return copy


@pytest.mark.full
def test_wheel_works_away_from_the_checkout(source: Path, tmp_path: Path) -> None:
    """Try the wheel alone, with numpy, and with all its dependencies."""
    pip = (sys.executable, "-m", "pip")
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ".", cwd=source)
    assert built.returncode == 0, built.stdout
    (wheel,) = tmp_path.glob("mambacache-*.whl")
    content = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("mambacache/")}
    package = {path.relative_to(source) for path in (source / "mambacache").rglob("*.*") if path.is_file()}
    kernels = {
        "mambacache" / path.relative_to(source)
        for path in (source / "kernels").rglob("*.*")
        if path.is_file() and path.suffix != ".md"
    }
    assert content == {path.as_posix() for path in package | kernels}

    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    installed = run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout
    (site_packages,) = environment.glob("lib/python*/site-packages")
    command = environment / "bin" / "mambacache"
    alone = run(command, "generate", "nothing", "x", cwd=tmp_path)
    assert alone.returncode == 1 and alone.stdout == NOT_INSTALLED.format("numpy"), alone.stdout

    for path in Path(np.__file__).parents[1].glob("numpy*"):
        (site_packages / path.name).symlink_to(path)
    cached = run(python, "-c", PREFIX_CACHE, cwd=tmp_path)
    assert cached.returncode == 0, cached.stdout
    assert cached.stdout.splitlines()[0].startswith("Hit(num_tokens=0,")
    assert cached.stdout.splitlines()[1].startswith("Hit(num_tokens=128,")
    for words in (("generate", "nothing", "x"), ("chat", "nothing"), ("plan", "nothing")):
        without = run(command, *words, cwd=tmp_path)
        assert without.returncode == 1 and without.stdout == NOT_INSTALLED.format("torch"), without.stdout
    imported = run(python, "-c", "from mambacache import LLM", cwd=tmp_path)
    assert imported.stdout.splitlines()[-1] == (
        "ImportError: LLM needs torch, which is not installed: pip install mambacache"
    )

    # The dependencies come from the running environment. A .pth file adds a folder to the path, without the .pth files
    # in it. So an editable install of the checkout stays out of sight.
    (site_packages / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    code = "import mambacache, mambacache.kernels.reference as r; print(mambacache.__file__, r.__file__, sep='\\n')"
    imported = run(python, "-c", code, cwd=tmp_path)
    assert imported.returncode == 0, imported.stdout
    assert all(Path(line).is_relative_to(site_packages) for line in imported.stdout.splitlines())

    prompt = "Ada went to Paris . Max went to Oslo . Ada went to Rome . where is Max ?"
    model = site_packages / "mambacache" / "demo" / "model"
    generated = run(command, "generate", model, prompt, "--max-tokens", "2", cwd=tmp_path)
    assert generated.returncode == 0, generated.stdout
    assert "Oslo ." in generated.stdout.replace(prompt, "")
    shown = run(command, "demo", "--device", "cpu", cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout
    assert "20 of 20 right" in shown.stdout


SOUND = {"filelock": "3.20.1", "tqdm": "4.66.3", "jinja2": "3.1.6"}
"""The first versions without known holes: races on links, code run from arguments, ways out of the sandbox."""


def test_no_dependency_may_have_a_known_hole() -> None:
    needed = [
        Requirement(each) for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    ]
    versions = {each.name: each.specifier for each in needed}
    for name, sound in SOUND.items():
        release = [int(part) for part in sound.split(".")]
        assert versions[name].contains(sound)
        assert not versions[name].contains(".".join(map(str, [*release[:-1], release[-1] - 1])))


@pytest.mark.full
def test_type_check_finds_a_mistake_in_a_call_into_the_kernels(source: Path) -> None:
    pytest.importorskip("mypy")
    if shutil.which("make") is None:
        pytest.skip("needs make")
    (source / "mambacache" / "runner" / "planted.py").write_text(MISTAKE)
    planted = run("make", f"PY={sys.executable}", "--old-file=.venv/.ready", "types", cwd=source)
    assert planted.returncode != 0
    errors = [line for line in planted.stdout.splitlines() if "error:" in line]
    assert errors and all("runner/planted.py" in line for line in errors), planted.stdout
    assert any('Argument 1 to "conv1d" has incompatible type "str"' in line for line in errors), planted.stdout
