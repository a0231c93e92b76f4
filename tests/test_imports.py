"""Check the modules that an import loads, and that imports go one way."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mambacache

ROOT = Path(__file__).resolve().parents[1]
MAX_EQUAL_LINES = 12

# The other parts that each part of the package may import. A module belongs to the longest matching prefix here.
LAYERS: dict[str, set[str]] = {
    "plan": set(),
    "warm_up": {"plan"},
    "report": set(),
    "checks": {"plan", "config"},
    "units": set(),
    "field_types": {"units"},
    "config": {"plan", "field_types"},
    "cache": {"plan", "config", "report", "checks"},
    "scheduler": {"plan", "config", "report", "cache.prefix_cache"},
    "kernels": {"plan"},
    "models": {"plan", "config", "kernels"},
    "runner": {"plan", "config", "warm_up", "kernels", "models"},
    "engine": set(),
    "engine.outputs": {"report"},
    "engine.text": set(),
    "engine.interrupts": set(),
    "engine.options": {"config"},
    "engine.checkpoint": {"config"},
    "engine.prompts": {"config", "field_types", "engine.text"},
    "engine.answers": {"plan", "config", "scheduler", "runner", "engine.outputs", "engine.text"},
    "engine.step_loop": {"plan", "scheduler", "runner", "engine.answers", "engine.interrupts", "engine.outputs"},
    "engine.parts": {"config", "warm_up", "cache", "scheduler", "kernels", "models", "runner", "engine"},
    "engine.async_llm": {"config", "engine", "report", "scheduler"},
    "engine.llm": {"plan", "config", "report", "cache", "scheduler", "kernels", "models", "runner", "engine"},
    "demo": {"config", "report", "engine", "demo"},
    "demo.task": set(),
    "cli": {"config", "models", "runner", "engine", "demo", "units", "vllm.sizing"},
    "vllm": {
        "cache.prefix_cache",
        "config",
        "plan",
        "warm_up",
        "report",
        "units",
        "kernels",
        "runner.directory",
        "runner.disk_tier",
        "runner.host_tier",
        "runner.host_memory",
        "runner.identity",
    },
}
# The distributions that these parts may import.
DISTRIBUTIONS: dict[str, set[str]] = {
    "plan": {"numpy"},
    "report": set(),
    "checks": {"numpy"},
    "config": {"numpy"},
    "units": set(),
    "cli": set(),
    "cache": {"numpy"},
    "scheduler": {"numpy"},
    "kernels": {"numpy", "torch", "triton"},
    "engine": set(),
    "engine.outputs": set(),
    "engine.text": set(),
    "engine.options": set(),
    "engine.prompts": {"numpy", "torch"},
    "demo": {"tqdm"},
    "demo.task": {"numpy"},
    "vllm": {"numpy", "prometheus_client", "torch", "tqdm", "vllm"},
}


def package_modules() -> dict[str, Path]:
    """Return the path of every module below `mambacache` by its import name; a package stands for its `__init__`."""
    modules = {}
    for folder, prefix in ((ROOT / "mambacache", ["mambacache"]), (ROOT / "kernels", ["mambacache", "kernels"])):
        for path in folder.rglob("*.py"):
            parts = [*prefix, *path.relative_to(folder).with_suffix("").parts]
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del modules["mambacache"]
    return modules


MODULES = package_modules()


def imported_modules(name: str) -> Iterator[str]:
    """Yield the absolute name of every module that a module of the package imports, inside functions too."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, node.module] if node.module else base)
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source


def part_of(name: str) -> str:
    inner = name.partition(".")[2]
    return max((part for part in LAYERS if f"{inner}.".startswith(f"{part}.")), key=len)


def is_allowed(importer: str, imported: str) -> bool:
    part = part_of(importer)
    top, _, inner = imported.partition(".")
    if top != "mambacache":
        return part not in DISTRIBUTIONS or top in DISTRIBUTIONS[part] or top in sys.stdlib_module_names
    if not inner:  # the public names stand above everything but the command line
        return part == "cli"
    return part_of(imported) == part or any(f"{inner}.".startswith(f"{allowed}.") for allowed in LAYERS[part])


def run_python(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("mambacache", {"numpy", "torch", "transformers"}),
        ("mambacache.plan", {"torch", "triton", "transformers"}),
        ("mambacache.config", {"torch", "triton", "transformers"}),
        ("mambacache.cache", {"torch", "triton", "transformers"}),
        ("mambacache.cache.prefix_cache", {"torch", "triton", "transformers"}),
        ("mambacache.scheduler", {"torch", "triton", "transformers"}),
        ("mambacache.scheduler.scheduler", {"torch", "triton", "transformers"}),
        ("mambacache.kernels", {"transformers"}),
    ],
)
def test_import_loads_no_more_than_it_needs(module: str, unwanted: set[str], tmp_path: Path) -> None:
    loaded = run_python(f"import sys, {module}; print(*sys.modules)", tmp_path).split()
    assert module in loaded
    assert not unwanted & set(loaded)


def test_prefix_cache_by_its_public_name_loads_no_torch(tmp_path: Path) -> None:
    loaded = run_python("import sys; from mambacache import PrefixCache, StepPlan; print(*sys.modules)", tmp_path)
    assert not {"torch", "triton", "transformers"} & set(loaded.split())


def test_import_is_quick(tmp_path: Path) -> None:
    code = "from time import perf_counter as now; start = now(); import mambacache; print(now() - start)"
    assert min(float(run_python(code, tmp_path)) for _ in range(5)) < 0.05


def test_transformers_does_not_mistake_the_folder_kernels_for_another_package() -> None:
    code = "import kernels, transformers.utils as u; print(kernels.__file__, u.is_kernels_available())"
    assert run_python(code, ROOT).split() == [str(ROOT / "kernels" / "__init__.py"), "False"]


def test_public_names_resolve() -> None:
    for name in mambacache.__all__:
        assert getattr(mambacache, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = mambacache.Nothing


def test_every_part_of_the_package_has_a_layer() -> None:
    assert {part_of(name) for name in MODULES} == set(LAYERS)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_follow_the_layers(name: str) -> None:
    assert [imported for imported in imported_modules(name) if not is_allowed(name, imported)] == []


def test_no_import_cycle() -> None:
    graph = {name: {imported for imported in imported_modules(name) if imported in MODULES} for name in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("mambacache.cache.states", "mambacache.scheduler.request"),
        ("mambacache.cache.prefix_cache", "torch"),
        ("mambacache.scheduler.scheduler", "mambacache.cache.pool"),
        ("mambacache.scheduler.scheduler", "mambacache.cache"),
        ("mambacache.scheduler.scheduler", "mambacache.runner.sampler"),
        ("mambacache.kernels.indices", "mambacache.config"),
        ("mambacache.kernels.indices", "transformers.utils"),
        ("mambacache.models.attention", "mambacache.runner.device_batch"),
        ("mambacache.runner.model_runner", "mambacache.cache.ledger"),
        ("mambacache.engine.llm", "mambacache.cli"),
        ("mambacache.engine.llm", "mambacache"),
        ("mambacache.engine", "mambacache.engine.llm"),
        ("mambacache.engine.answers", "mambacache.engine.llm"),
        ("mambacache.engine.text", "mambacache.engine.outputs"),
        ("mambacache.engine.text", "transformers"),
        ("mambacache.engine.outputs", "mambacache.scheduler.request"),
        ("mambacache.plan", "mambacache.config"),
        ("mambacache.vllm.scheduler", "mambacache.cache.pool"),
        ("mambacache.vllm.worker", "mambacache.runner.model_runner"),
        ("mambacache.engine.llm", "mambacache.vllm.config"),
        ("mambacache.engine.llm", "mambacache.demo.run"),
        ("mambacache.demo.task", "mambacache.demo.run"),
        ("mambacache.demo.run", "mambacache.cli"),
        ("mambacache.cli.chat", "torch"),
    ],
)
def test_layers_forbid_imports(importer: str, imported: str) -> None:
    assert not is_allowed(importer, imported)


def test_test_files_share_no_more_than_a_dozen_lines() -> None:
    """Tests are parametrised over families, not copied for each."""
    texts = {}
    for path in sorted((ROOT / "tests").glob("*.py")):
        lines = [line.strip() for line in path.read_text().splitlines()]
        texts[path.name] = [line for line in lines if line and not line.startswith(("import ", "from "))]
    runs: dict[tuple[str, ...], str] = {}
    for name, lines in texts.items():
        for start in range(len(lines) - MAX_EQUAL_LINES):
            run = tuple(lines[start : start + MAX_EQUAL_LINES + 1])
            assert runs.setdefault(run, name) == name, f"{name} and {runs[run]} share these lines: {run}"
