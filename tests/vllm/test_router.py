"""The example's router predicts the hits of two servers by their KV events, and hits more than routing by session."""

from __future__ import annotations

import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from test_server import OPTIONS, free_port, plugin, until_up
from watched import check_end, output_of, started

from mambacache.demo import MODEL
from mambacache.demo.task import demo_document, question_text

ROUTER = Path(__file__).resolve().parents[2] / "examples" / "router.py"
STATES = 40
"""A server has this many states: too few for all documents."""
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "MAMBACACHE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


def post(port: int, path: str, body: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
    """Return the router's prediction, if it answers, and the answer."""
    request = Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=240) as answer:
        text, expected = answer.read(), answer.headers["Expected-Hit"]
    return expected and int(expected), json.loads(text or "{}")


def ask(port: int, prompt: str) -> tuple[int | None, int]:
    """Return the tokens that the router expected to hit, and the tokens hit."""
    body = {"model": "recall", "prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    expected, answer = post(port, "/v1/completions", body)
    details = answer["usage"]["prompt_tokens_details"]
    return expected, details["cached_tokens"] if details else 0


def prompts(count: int, num_documents: int) -> list[str]:
    """Return questions about documents: a third of them shows the document's begin alone."""
    rng = random.Random(num_documents)
    documents = [demo_document(number).text.split()[: rng.randint(300, 900)] for number in range(num_documents)]
    found = []
    for _ in range(count):
        words = rng.choice(documents)
        shown = words[: rng.choice([len(words), len(words), rng.randint(60, len(words))])]
        found.append(f"{' '.join(shown)} {question_text(rng.choice(words[::5]))}")
    return found


def test_two_servers_on_one_host(tmp_path: Path) -> None:
    """Requests come one by one, then 200 at once, to the router and then by session to the same servers."""
    *servers, router = (free_port() for _ in range(3))
    endpoints = [free_port(), free_port()]
    path = plugin(tmp_path)
    with ExitStack() as running:
        processes = []
        for port, endpoint in zip(servers, endpoints, strict=True):
            command = ["-m", "vllm.entrypoints.cli.main", "serve", MODEL, *OPTIONS.split(), "--port", str(port)]
            events = {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{endpoint}"}
            states = {"mambacache": {"num_state_blocks": STATES}}
            command += ["--kv-events-config", json.dumps(events), "--additional-config", json.dumps(states)]
            log = tmp_path / f"log of {port}"
            processes.append(running.enter_context(started(*command, log=log, path=path, **SETTINGS)))
        urls = [
            f"http://127.0.0.1:{port}=tcp://127.0.0.1:{each}" for port, each in zip(servers, endpoints, strict=True)
        ]
        log = tmp_path / "log of the router"
        processes.append(running.enter_context(started(ROUTER, str(router), *urls, log=log)))
        for port, process in zip(servers, processes, strict=False):
            until_up(port, process, tmp_path / f"log of {port}", seconds=480)  # they start side by side
        check_lone_requests(router, log)
        check_requests_at_once(router, servers)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for port, process in zip(servers, processes, strict=False):
            check_end(process, time.monotonic(), tmp_path / f"log of {port}")


def check_lone_requests(router: int, log: Path) -> None:
    time.sleep(1)  # subscriptions take effect
    found = []
    for prompt in prompts(60, num_documents=8):
        found.append(ask(router, prompt))
        time.sleep(0.1)  # events of its last step arrive
    assert all(expected == hit for expected, hit in found), (found, output_of(log))
    assert sum(hit > 0 for _, hit in found) > 20 and len({hit for _, hit in found}) > 5


def check_requests_at_once(router: int, servers: list[int]) -> None:
    """Each of 40 documents is asked about in about five of 200 sessions."""
    hits, asked = [], prompts(200, num_documents=40)
    by_session = [servers[session % 2] for session in range(len(asked))]
    for ports in ([router] * len(asked), by_session):
        for port in servers:
            post(port, "/reset_prefix_cache", {})
        time.sleep(0.5)
        with ThreadPoolExecutor(len(asked)) as pool:
            found = [*pool.map(ask, ports, asked)]
        hits.append(sum(hit for _, hit in found))
    assert hits[0] > hits[1] > 0, hits
