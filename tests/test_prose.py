"""Comments, docstrings and pages are plain English: few sentences have a habit that makes text hard to read."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("mambacache", "kernels", "docs", "tests", "benchmarks", "README.md", "ARCHITECTURE.md")

# Each habit with the most percent of sentences that may have it. A group may always have a single such sentence.
HABITS: dict[str, tuple[str, float]] = {
    "a clause in place of a noun": (
        r"(?:^|[,;:(] ?|\b(?:of|for|in|to|by|with|from|than|after|before|is|are) )(?:what|whatever|whoever|whom) \w+"
        r"|^(?:What|Who|Whatever|Whoever) [^?]*$",
        2,
    ),
    "a preposition before the subject": (r"^(?:Of|From|With|Among) (?:what|whom|those|that|the ones|all)\b", 1),
    "a number without its name": (r"\bso (?:many|much|few) (?!as\b|that\b)", 1),
    "a relative clause by preposition": (r"\b(?:of|to|by|from|after|in|on|with) (?:which|whom)\b|\bwhose\b", 2),
    "a pronoun in place of a noun": (r"\bones\b|\b(?:the|this|that|each|another|the other) one\b(?! \w)", 1),
    "a demonstrative in place of a noun": (r"\b(?:that|those) of\b|^(?:That|Those) ", 0.5),
    "more than 30 words": (r"^(?:\S+\s+){30}\S", 8),
}
MOST_WORDS = {"mambacache": 1.0, "kernels": 0.9}  # of comments and docstrings for each line of code


def texts(path: Path) -> Iterator[str]:
    """Yield the paragraphs of a page, or the docstrings and comments of a module."""
    source = path.read_text()
    if path.suffix == ".md":
        source = re.sub(r"^```.*?^```", "\n", source, flags=re.S | re.M)
        source = re.sub(r"^\s*(?:\||<).*$", "\n", source, flags=re.M)
        yield from re.split(r"\n\s*\n|^- |^\d+\. ", source, flags=re.M)
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text
    last, comment = 0, ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text, line = token.string.lstrip("# "), token.start[0]
            if line == last + 1:
                comment += f" {text}"
            else:
                yield comment
                comment = text
            last = line
    yield comment


def sentences(path: Path) -> list[str]:
    """Return the sentences of more than two words."""
    parts = [each for text in texts(path) for each in re.split(r"(?<=[.:;?!])\s+(?=[A-Z`\"(])", " ".join(text.split()))]
    return [each for each in parts if len(each.split()) > 2]


def files_of(group: str) -> list[Path]:
    path = ROOT / group
    return [path] if path.is_file() else sorted([*path.rglob("*.py"), *path.rglob("*.md")])


@pytest.mark.parametrize("group", GROUPS)
def test_few_sentences_are_hard_to_read(group: str) -> None:
    found = [(path, sentence) for path in files_of(group) for sentence in sentences(path)]
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for path, sentence in found:
        for habit, (pattern, _) in HABITS.items():
            if re.search(pattern, sentence):
                counts[habit] += 1
                examples[habit] = f"{path.relative_to(ROOT)}: {sentence}"
    most = {habit: max(percent * len(found) / 100, 1) for habit, (_, percent) in HABITS.items()}
    assert found and {habit: (counts[habit], examples[habit]) for habit in counts if counts[habit] > most[habit]} == {}


@pytest.mark.parametrize("group", MOST_WORDS)
def test_code_carries_few_words(group: str) -> None:
    modules = [path for path in files_of(group) if path.suffix == ".py"]
    words = sum(len(sentence.split()) for path in modules for sentence in sentences(path))
    lines = [line.strip() for path in modules for line in path.read_text().splitlines()]
    code = sum(bool(line) and not line.startswith("#") for line in lines)
    assert words <= MOST_WORDS[group] * code
