"""Prints docs/options.md: `python docs/make_options.py > docs/options.md`."""

from dataclasses import MISSING, Field, fields
from typing import Any

from mambacache import CacheConfig, EngineConfig, SamplingParams
from mambacache.cli.options import field_texts

HEAD = """# Options

Made of the docstrings by docs/make_options.py. On the command line the model comes first, and each other option of the
first two tables is a flag, `--top-k` for `top_k`; the engine's seed is `--engine-seed`. `generate` and `chat` are
greedy unless told otherwise, and give 64 tokens or as many as fit. `plan` takes the first table and `--memory`; with
`--state-bytes`, `--tensor-parallel-size` or `--quantization fp8` it plans for vLLM with the plugin. `LLM` also accepts
some options of vLLM, such as `swap_space`; they have no effect, and a warning names each.
"""
PARTS = {
    "LLM": (EngineConfig, "`LLM(model, **options)`. None stands for a default."),
    "SamplingParams": (SamplingParams, "Of one request. None stands for a default."),
    "CacheConfig": (CacheConfig, "Of a `PrefixCache` in an engine of your own."),
}


def default_of(option: Field[Any]) -> str:
    if option.default is MISSING:
        return "" if option.default_factory is MISSING else f"`{option.default_factory()!r}`"
    return f"`{option.default!r}`"


def page() -> str:
    parts = [HEAD]
    for name, (config, said) in PARTS.items():
        texts = field_texts(config)
        rows = [
            f"| `{each.name}` | {default_of(each)} | {texts[each.name].replace('|', '/')} |" for each in fields(config)
        ]
        parts.append("\n".join([f"## {name}\n\n{said}\n\n| option | default | meaning |\n|---|---|---|", *rows, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
