"""Ask questions about a document, with and without the prefix cache."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

from mambacache.config import SamplingParams
from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS, BLOCK_TOKENS, DEMO_SEED, demo_document, demo_questions, question_text
from mambacache.engine.llm import LLM
from mambacache.report import RequestReport

SINGLE_QUESTIONS, TURNS = 10, 10
LEAST_RIGHT = 19
TURN_TOKENS = 6


@dataclass(frozen=True)
class Asked:
    answer: str
    right: bool
    report: RequestReport
    time_to_first_token: float


def ask_all(llm: LLM, bar: tqdm[None]) -> list[Asked]:
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    document = demo_document(DEMO_SEED)
    questions = demo_questions(document, DEMO_SEED)
    asked = []
    conversation = document.text
    for number, (name, place) in enumerate(questions):
        prompt = f"{conversation} {question_text(name)}"
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        assert output.cache is not None and output.time_to_first_token is not None
        answer = output.outputs[0].text
        if number >= SINGLE_QUESTIONS:
            conversation = f"{prompt} {answer}"
        asked.append(Asked(answer, answer == f"{place} .", output.cache, output.time_to_first_token))
        bar.update()
    return asked


def expected_hits() -> list[int]:
    length = demo_document(DEMO_SEED).num_tokens

    def floor(tokens: int) -> int:
        return tokens // BLOCK_TOKENS * BLOCK_TOKENS

    later_turns = [floor(length + TURN_TOKENS * turn - 1) for turn in range(1, TURNS)]
    return [0] + [floor(length)] * SINGLE_QUESTIONS + later_turns


def timed(device: str, caching: bool) -> tuple[list[Asked], float]:
    llm = LLM(MODEL, device=device, max_model_len=8192, enable_prefix_caching=caching)
    with tqdm(total=SINGLE_QUESTIONS + TURNS, desc=f"cache {'on' if caching else 'off'}", leave=False) as bar:
        start = time.perf_counter()
        asked = ask_all(llm, bar)
        return asked, time.perf_counter() - start


def line(number: int, asked: Asked) -> str:
    report = asked.report
    lost = ", ".join(f"{tokens} {reason}" for reason, tokens in report.losses.items()) or "none"
    return (
        f"{number:>2}  prompt {report.prompt:>5}  hit {report.hit:>5}  ceiling {report.ceiling:>5}  "
        f"first token {asked.time_to_first_token * 1e3:>7.1f} ms  {asked.answer:<14}"
        f"{'right' if asked.right else 'WRONG'}  lost: {lost}"
    )


def run(device: str = "auto") -> int:
    """Return 0 if answers are equal without the cache, at least 19 right, and hits as expected; else 1."""
    cached, cached_seconds = timed(device, caching=True)
    cold, cold_seconds = timed(device, caching=False)
    for title, rows in (("cache on", cached), ("cache off", cold)):
        print(title)
        print(*(line(number + 1, row) for number, row in enumerate(rows)), sep="\n")
    right = sum(row.right for row in cached)
    problems = []
    if [row.answer for row in cached] != [row.answer for row in cold]:
        problems.append("the answers differ with the cache on and off")
    if right < LEAST_RIGHT:
        problems.append(f"only {right} of {len(cached)} answers are right")
    if [row.report.hit for row in cached] != expected_hits():
        problems.append(f"the hits are not {expected_hits()}")
    print(
        f"{right} of {len(cached)} right; cache on {cached_seconds:.2f} s, off {cold_seconds:.2f} s: "
        f"{cold_seconds / cached_seconds:.1f} times as fast"
    )
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0
