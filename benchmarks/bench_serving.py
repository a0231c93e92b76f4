"""Time `vllm serve` with and without mambacache's plugin on a part of a trace.

    python benchmarks/bench_serving.py MODEL TRACE [--json OUT.json] [--requests 480] [--rate 4] [--window] [OPTIONS]

Unknown options go to `vllm serve`. With `--stalls` a row lists engine steps of more than 100 ms, with their
compilations and garbage collections; on several GPUs it misses the workers' compilations. `--caches FOLDER` keeps
compiled kernels of each engine. An empty folder times a first start; a second start is then timed too.

The trace is in Mooncake's format. Whole sessions are drawn from it, to keep its reuse, and sent in their order as a
Poisson process. With `--window` the trace's first requests are sent, as `replay_trace.py --requests` replays them: a
chat's next turn begins with the answer before it. Weights are dummies, so that texts have no meaning.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np
from about import about
from aiohttp import ClientSession, ClientTimeout, TCPConnector
from tqdm import tqdm
from trace_tokens import FIRST_ANSWER_TOKEN, ID_TOKENS, requests

SESSION_IDS = 2  # all requests share the first id; the second identifies a session
VOCABULARY = 250
LETTER = 40  # a letter in tokenizers of bytes, a short text in larger tokenizers


@dataclass
class Row:
    """Holds the results of one engine, in seconds and tokens."""

    engine: str
    ready: float  # from the start of the server to its first response
    ready_again: float | None  # with the kernels that the first start compiled
    first_token_median: float
    first_token_p99: float
    token_median: float  # between later tokens
    hit_tokens: int  # in vLLM's cache and in a connector's
    prompt_tokens: int
    ceiling_tokens: int | None  # of prompts' longest prefixes in earlier requests; known of a window
    stalls: list[dict[str, Any]] | None  # long steps, see benchmarks/stalls/sitecustomize.py


class Times(NamedTuple):
    """Holds the times of sending, of the first piece of the answer, and of its end."""

    sent: float
    first: float
    ended: float


@dataclass
class Request:
    prompt: list[int]
    answer: int  # tokens
    ceiling: int | None = None


def sessions(trace: Path, count: int, longest: int) -> list[Request]:
    """Return at most `count` requests of whole sessions, each with at most `longest` tokens in all."""
    groups = defaultdict(list)
    with gzip.open(trace, "rt") if trace.suffix == ".gz" else trace.open() as lines:
        for request in map(json.loads, lines):
            groups[tuple(request["hash_ids"][:SESSION_IDS])].append(request)
    fitting = [
        group
        for group in groups.values()
        if all(each["input_length"] + each["output_length"] <= longest for each in group)
    ]
    random.Random(0).shuffle(fitting)
    drawn: list[dict[str, Any]] = []
    for group in fitting:
        if len(drawn) + len(group) <= count:
            drawn += group
    drawn.sort(key=lambda request: request["timestamp"])
    return [Request(tokens(each["hash_ids"], each["input_length"]), each["output_length"]) for each in drawn]


def tokens(ids: Sequence[int], count: int) -> list[int]:
    """Return a prompt; each id of the trace stands for different tokens."""
    return [token for i in ids for token in random.Random(i).choices(range(VOCABULARY), k=ID_TOKENS)][:count]


def window(trace: Path, count: int) -> list[Request]:
    """Return the first requests of a trace. Tokens of answers are LETTER, as servers answer."""
    found = []
    for request in islice(requests(trace), count):
        ids, places = np.unique(request.prompt // ID_TOKENS, return_inverse=True)
        of_ids = np.array([tokens([i], ID_TOKENS) for i in ids.tolist()])
        prompt = of_ids[places, request.prompt % ID_TOKENS]
        prompt[request.prompt >= FIRST_ANSWER_TOKEN] = LETTER
        found.append(Request(prompt.tolist(), len(request.answer), request.ceiling))
    return found


async def send(client: ClientSession, prompt: list[int], answer: int) -> Times:
    """Send a request, and return its times.

    Pieces are not parsed, since a client would be slower than the server. Answers repeat one letter: random tokens
    would give endless broken characters, and the server would wait for vLLM's detokeniser.
    """
    body = {"model": "served", "prompt": prompt, "max_tokens": answer, "temperature": 0, "stream": True}
    body["allowed_token_ids"] = [LETTER]
    sent = time.perf_counter()
    async with client.post("/v1/completions", json=body | {"ignore_eos": True}) as stream:
        stream.raise_for_status()
        await stream.content.readany()
        first = time.perf_counter()
        while await stream.content.readany():
            pass
        return Times(sent, first, time.perf_counter())


async def warm_up(client: ClientSession) -> None:
    rng = random.Random(1)
    await asyncio.gather(*[send(client, rng.choices(range(VOCABULARY), k=3000), 16) for _ in range(8)])
    await send(client, rng.choices(range(VOCABULARY), k=3000), 16)


async def replay(client: ClientSession, sent: list[Request], rate: float) -> list[Times]:
    rng = random.Random(2)
    running, start, due = [], time.perf_counter(), 0.0
    for request in tqdm(sent):
        due += rng.expovariate(rate)
        await asyncio.sleep(max(start + due - time.perf_counter(), 0))
        running.append(asyncio.create_task(send(client, request.prompt, request.answer)))
    return list(await asyncio.gather(*running))


async def drive(port: int, sent: list[Request], rate: float, stalls: Path | None) -> tuple[list[Times], int, int]:
    """Return the times of each request, vLLM's looked-up prompt tokens, and its hit tokens."""
    own = TCPConnector(limit=0, force_close=True)  # a server closes an idle connection while the next request is sent
    async with ClientSession(f"http://127.0.0.1:{port}", connector=own, timeout=ClientTimeout(total=600)) as client:
        await warm_up(client)
        if stalls is not None:
            stalls.write_text("")
        before = counters(port)
        times = await replay(client, sent, rate)
    queries, hits = (b - a for a, b in zip(before, counters(port), strict=True))
    return times, queries, hits


def counters(port: int) -> tuple[int, int]:
    """Return vLLM's counters of looked-up prompt tokens, and of tokens hit in its cache and in a connector's."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    queries, hits = (
        sum(float(each) for each in re.findall(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.M))
        for name in ("prefix_cache_queries", "(?:external_)?prefix_cache_hits")
    )
    return int(queries), int(hits)


def serve(
    arguments: argparse.Namespace, engine: str, port: int, log: IO[bytes], stalls: Path | None
) -> tuple[subprocess.Popen[bytes], float]:
    """Start a server, wait until it responds, and return it with the seconds that this took."""
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", arguments.model]
    command += ["--load-format", "dummy", "--served-model-name", "served", "--port", str(port), "--host", "127.0.0.1"]
    environment = os.environ | {"MAMBACACHE": "1" if engine == "plugin" else "0"}
    if stalls is not None:
        paths = [str(Path(__file__).resolve().parent / "stalls"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"MAMBACACHE_STALLS": str(stalls), "PYTHONPATH": os.pathsep.join(paths)}
    if arguments.caches is not None:
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
            environment[name] = str(arguments.caches.resolve() / engine / name)
    began = time.perf_counter()
    process = subprocess.Popen([*command, *arguments.options], env=environment, stdout=log, stderr=subprocess.STDOUT)
    while True:
        if process.poll() is not None:
            sys.exit(f"the server ended: see {log.name}")
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return process, time.perf_counter() - began
        except URLError:
            time.sleep(0.5)


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    process.wait(60)


def measure(arguments: argparse.Namespace, engine: str, sent: list[Request]) -> Row:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile(prefix=f"{engine}-", suffix=".log", delete=False) as log:
        stalls = Path(log.name).with_suffix(".stalls") if arguments.stalls else None
        process, ready = serve(arguments, engine, port, log, stalls)
        try:
            times, queries, hits = asyncio.run(drive(port, sent, arguments.rate, stalls))
        finally:
            stop(process)
        ready_again = None
        if arguments.caches is not None:
            process, ready_again = serve(arguments, engine, port, log, stalls=None)
            stop(process)
    first = sorted(each.first - each.sent for each in times)
    between = [
        (each.ended - each.first) / (request.answer - 1)
        for each, request in zip(times, sent, strict=True)
        if request.answer > 1
    ]
    p99 = first[min(int(0.99 * len(first)), len(first) - 1)]
    found = [json.loads(line) for line in stalls.read_text().splitlines()] if stalls is not None else None
    median, token = statistics.median(first), statistics.median(between)
    ceiling = sum(each.ceiling or 0 for each in sent) or None
    return Row(engine, ready, ready_again, median, p99, token, hits, queries, ceiling, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--requests", type=int, default=480)
    parser.add_argument("--engines", nargs="+", default=["plugin", "vllm"], choices=["plugin", "vllm"])
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--window", action="store_true", help="send the trace's first requests, whatever their length")
    parser.add_argument("--stalls", action="store_true", help="list engine steps of more than 100 ms")
    parser.add_argument("--caches", type=Path, help="a folder of compiled kernels")
    parser.add_argument("--longest", type=int, default=32000, help="tokens of a prompt and its answer, at most")
    arguments, arguments.options = parser.parse_known_args()
    if arguments.window:
        sent = window(arguments.trace, arguments.requests)
    else:
        sent = sessions(arguments.trace, arguments.requests, arguments.longest)
    figures = about("torch", "triton", "vllm", "transformers")
    figures |= {"requests": len(sent), "rate": arguments.rate, "options": arguments.options, "rows": []}
    for engine in arguments.engines:
        figures["rows"].append(asdict(measure(arguments, engine, sent)))
        print(json.dumps(figures["rows"][-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
