"""Make flags for the fields of a dataclass."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Any

from mambacache.config import EngineConfig, SamplingParams
from mambacache.units import is_bytes, parse_bytes

NONE: Mapping[str, Any] = MappingProxyType({})
SAMPLING = {option.name for option in fields(SamplingParams)}


def field_texts(config: type) -> dict[str, str]:
    """Return the text of each field under `Args`; names before a colon share it."""
    lines = inspect.cleandoc(config.__doc__ or "").splitlines()
    texts: dict[str, str] = {}
    names: list[str] = []
    body = lines[lines.index("Args:") + 1 :]
    margin = len(body[0]) - len(body[0].lstrip())
    for line in body:
        text = line.strip()
        if not text:
            break
        if line[margin] != " ":
            before, _, text = text.partition(": ")
            names = before.split(", ")
        texts |= {name: f"{texts[name]} {text}" if name in texts else text for name in names}
    return texts


def add_fields(parser: argparse.ArgumentParser, config: type, defaults: Mapping[str, Any] = NONE) -> None:
    """Add a flag for each field but `model`; absent flags set no attribute."""
    texts, group = field_texts(config), parser.add_argument_group(f"options of {config.__name__}")
    for option in fields(config):
        if option.name == "model":
            continue
        default = defaults.get(option.name, None if option.default is MISSING else option.default)
        how: dict[str, Any] = {"dest": _destination(config, option.name), "default": argparse.SUPPRESS}
        shown = "none" if default in (None, (), "") else default
        how["help"] = f"{texts[option.name].removesuffix('.')} (default: {shown})".replace("%", "%%")
        flag = f"--{how['dest'].replace('_', '-')}"
        if _kind(option) == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **how)
        elif _kind(option).startswith("Sequence["):
            group.add_argument(flag, action="append", type=_reader(option), metavar="ITEM", **how)
        else:
            group.add_argument(flag, type=_reader(option), metavar=_metavar(option), **how)


def given_fields(args: argparse.Namespace, config: type) -> dict[str, Any]:
    names = [option.name for option in fields(config) if hasattr(args, _destination(config, option.name))]
    return {name: getattr(args, _destination(config, name)) for name in names if name != "model"}


def _destination(config: type, name: str) -> str:
    return f"engine_{name}" if config is EngineConfig and name in SAMPLING else name


def _kind(option: Field[Any]) -> str:
    return str(option.type).removesuffix(" | None")


def _metavar(option: Field[Any]) -> str:
    names = {"int": "N", "float": "X", "str": "NAME", "str | Path": "NAME"}
    return "BYTES" if is_bytes(option.name) else names.get(_kind(option), "JSON")


def _reader(option: Field[Any]) -> Callable[[str], Any]:
    """Return a parser of texts; `none` means None."""
    kind = _kind(option).removeprefix("Sequence[").removesuffix("]")
    if kind in ("str", "str | Path"):
        return str
    readers: dict[str, Callable[[str], Any]] = {"int": _integer, "float": _number}
    read = size if is_bytes(option.name) else readers.get(kind, _json)
    return lambda text: None if text.lower() == "none" else read(text)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON") from error
