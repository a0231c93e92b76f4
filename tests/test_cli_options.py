"""Flags: one for every field, with its text, and what their values become; prompts."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from mambacache.cli.options import add_fields, field_texts, given_fields
from mambacache.cli.parser import parse
from mambacache.cli.prompts import read
from mambacache.config import CacheConfig, EngineConfig, SamplingParams
from mambacache.units import parse_bytes
from mambacache.vllm.settings import Settings


@dataclass
class Planted:
    """Fields of every kind.

    Args:
        rate: so many, 5 % of
            them all.
        left, right: one of a pair.
        bias: by token.

    Raises:
        ValueError: never.
    """

    rate: float = 0.5
    left: int | None = None
    right: bool = True
    bias: Mapping[int, float] | None = None


@pytest.mark.parametrize("config", [CacheConfig, EngineConfig, SamplingParams, Settings])
def test_every_field_has_a_text(config: type) -> None:
    texts = field_texts(config)
    assert [option.name for option in fields(config)] == list(texts)
    assert all(len(text) > 10 and "  " not in text for text in texts.values())


def test_texts() -> None:
    pair = "one of a pair."
    assert field_texts(Planted) == {
        "rate": "so many, 5 % of them all.",
        "left": pair,
        "right": pair,
        "bias": "by token.",
    }


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize("config", [EngineConfig, SamplingParams])
def test_every_field_has_a_flag(config: type, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """But the model, which comes first."""
    with pytest.raises(SystemExit) as ended:
        parse([command, "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for name, text in field_texts(config).items():
        if name != "model":
            prefix = "engine-" if (config, name) == (EngineConfig, "seed") else ""
            assert f"--{prefix}{name.replace('_', '-')}" in shown
            assert text.removesuffix(".") in shown or "-" in text  # help breaks lines at hyphens


@pytest.mark.parametrize(
    ("flags", "config", "given"),
    [
        ("", SamplingParams, {}),
        ("--temperature 0.5 --max-tokens none --seed 3", SamplingParams, {"temperature": 0.5, "max_tokens": None}),
        ("--stop a --stop b --stop-token-ids 7", SamplingParams, {"stop": ["a", "b"], "stop_token_ids": [7]}),
        ("--ignore-eos --no-read-cache", SamplingParams, {"ignore_eos": True, "read_cache": False}),
        ("--kv-cache-bytes 1.5GiB --engine-seed 4", EngineConfig, {"kv_cache_bytes": 3 << 29, "seed": 4}),
        ("--no-enable-prefix-caching --dtype half", EngineConfig, {"enable_prefix_caching": False, "dtype": "half"}),
    ],
)
def test_values(flags: str, config: type, given: dict[str, Any]) -> None:
    found = given_fields(parse(["generate", "model", *flags.split()]), config)
    assert found == given | ({"seed": 3} if "--seed 3" in flags else {})


def test_values_of_other_kinds() -> None:
    """Where no other kind is known, JSON."""
    parser = argparse.ArgumentParser()
    add_fields(parser, Planted, {"rate": 0.7})
    args = parser.parse_args(["--bias", '{"5": 1.5}', "--rate", "0.1", "--left", "none", "--no-right"])
    assert given_fields(args, Planted) == {"rate": 0.1, "left": None, "right": False, "bias": {"5": 1.5}}
    assert "5 % of them all (default: 0.7)" in " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    ("arguments", "prompts"),
    [("m a b", ["a", "b"]), ("m a --n 2 b c", ["a", "b", "c"]), ("--n 2 m -", ["-"]), ("m --n 2 -", ["-"])],
)
def test_prompts_stand_before_and_after_flags(arguments: str, prompts: list[str]) -> None:
    assert parse(["generate", *arguments.split()]).prompt == prompts


@pytest.mark.parametrize(
    ("words", "prompts"),
    [
        (["- buy milk"], ["- buy milk"]),
        (["-5 + 3 =", "-5", "-.5"], ["-5 + 3 =", "-5", "-.5"]),
        (["--", "-foo"], ["-foo"]),
        (["a", "--", "--seed", "--", "x"], ["a", "--seed", "--", "x"]),
    ],
)
def test_prompts_that_begin_as_flags_do(words: list[str], prompts: list[str]) -> None:
    for before in ([], ["--max-tokens", "5"]):
        args = parse(["generate", "m", *before, *words])
        assert (args.prompt, hasattr(args, "seed")) == (prompts, False)


@pytest.mark.parametrize("place", ["prompts.jsonl", "-"])
def test_byte_order_mark(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the mark, which some editors write before a UTF-8 text, is left out. JSON lines are still read as
    JSON."""
    for text, prompt in (('{"prompt": "x"}', "x"), ("x", "x")):
        (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + text.encode())
        monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + text))
        asked = read([place], None, {}) if place == "-" else read([], str(tmp_path / place), {})
        assert [each.prompt for each in asked] == [prompt]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the following arguments are required: COMMAND: see mambacache --help"),
        ("grow", "invalid choice: 'grow'"),
        ("generate", "the following arguments are required: MODEL"),
        ("generate m --max-tokens two", "argument --max-tokens: 'two' is no integer: see mambacache generate --help"),
        ("generate m --temperature hot", "argument --temperature: 'hot' is no number"),
        ("generate m --kv-cache-bytes 5apples", "argument --kv-cache-bytes: '5apples' is no amount of memory: give"),
        ("generate m --prompt x", "unknown arguments --prompt x"),
        ("generate m --stream --jsonl", "not allowed with argument"),
        ("generate m --seed 1 -x", "unknown arguments -x"),
        ("plan m x", "unknown arguments x"),
        ("plan m -- x", "unknown arguments x"),
        ("demo --dev cpu", "unknown arguments --dev cpu"),
    ],
)
def test_arguments_of_no_use(arguments: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse(arguments.split())
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "count"),
    [(12, 12), ("12", 12), ("1.5KiB", 1536), ("500 MB", 500_000_000), ("2g", 2 * 10**9), ("1Ti", 1 << 40)],
)
def test_bytes(text: object, count: int) -> None:
    assert parse_bytes(text) == count
