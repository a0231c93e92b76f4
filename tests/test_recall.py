"""The trained model answers rightly from the cached states, and the demo shows it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mambacache import LLM, SamplingParams
from mambacache.demo import MODEL
from mambacache.demo.task import (
    ANSWER_TOKENS,
    DEMO_SEED,
    Document,
    answer_text,
    demo_document,
    demo_questions,
    question_text,
)
from watched_cache import state_blocks

Tampering = Callable[[LLM, int, int], None]


def state_block(llm: LLM, document: Document) -> int:
    """Return the block that holds the state at a document's last boundary."""
    tokens = llm.tokenizer.encode(f"{document.text} {question_text('Ada')}")
    llm.cache.add("probe", tokens)
    hit = llm.cache.admit("probe")
    assert hit is not None and hit.num_tokens == document.boundary
    block = state_blocks(llm.cache, "probe")[-1]
    llm.cache.free("probe", finished=False)
    return block


def leave(llm: LLM, block: int, other: int) -> None:
    pass


def swap(llm: LLM, block: int, other: int) -> None:
    slabs = llm.runner.states.buffer.view(-1, llm.runner.states.block_bytes)
    slabs[[block, other]] = slabs[[other, block]]


def zero(llm: LLM, block: int, other: int) -> None:
    llm.runner.states.buffer.view(-1, llm.runner.states.block_bytes)[block] = 0


@pytest.mark.parametrize(("tamper", "least", "most"), [(leave, 19, 20), (swap, 0, 5), (zero, 0, 5)])
def test_answers_come_from_the_cached_state(tamper: Tampering, least: int, most: int) -> None:
    """With another document's state, or none, in place of the cached state, and the same KV, the answers are wrong."""
    llm = LLM(MODEL, device="cpu", max_model_len=8192, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    documents = [demo_document(DEMO_SEED), demo_document(DEMO_SEED + 1)]
    llm.generate([document.text for document in documents], params, use_tqdm=False)
    tamper(llm, *(state_block(llm, document) for document in documents))

    document = documents[0]
    right = 0
    for name, place in demo_questions(document, DEMO_SEED):
        output = llm.generate(f"{document.text} {question_text(name)}", params, use_tqdm=False)[0]
        assert output.cache is not None and output.cache.hit == document.boundary
        right += output.outputs[0].text == answer_text(place)
    assert least <= right <= most


@pytest.mark.full
def test_demo(tmp_path: Path) -> None:
    program = "import sys; from mambacache.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", program, "demo", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    figures = re.fullmatch(r"(\d+) of 20 right; cache on ([\d.]+) s, off ([\d.]+) s: ([\d.]+) times as fast", last)
    assert figures is not None, last
    right, on, off, ratio = map(float, figures.groups())
    assert right >= 19 and ratio == pytest.approx(off / on, abs=0.2) and ratio > 2
    assert done.stdout.count(" right  lost: ") + done.stdout.count(" WRONG  lost: ") == 40
