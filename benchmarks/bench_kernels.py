"""Time the ops beside vLLM's kernels and a floor of the hardware, on one GPU.

    python benchmarks/bench_kernels.py [--quick] [--only TEXT ...] [--json OUT.json]

Prefill resumes from a cached state and stores a state. `graph` replays a CUDA graph, `eager` includes the launches.
`floor` is the largest of three times: bytes at the bandwidth of a large copy, products at PRODUCT_RATE, exponentials at
EXPONENTIAL_RATE. `copy` moves a prefill's bytes between two tensors. Successive calls take different inputs, so that
the L2 cache holds none. Decode rows begin at all entries of their token logs equally often, as in a long run: one of 16
rows is folded with one token, one of 13 with four. "vLLM replays" stands for `--use-replayssm`.

vLLM has two prefills of the gated delta rule, Triton's and FlashInfer's. Each installed prefill has a column; "peer" is
the fastest.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kernel_peers
import torch
from attention_workload import Attention
from gpu_timing import Call, copy_bandwidth, eager_us, graph_us, host_us
from kernel_peers import FLASHINFER, HOW_TO_GET, VLLM
from kernel_steps import Case, Recurrence
from kernel_workloads import Conv1d, DeltaRule, GatedNorm, KimiDelta, SelectiveScan, ShortConv, StateSpaceDual
from torch import Tensor

PRODUCT_RATE = 790e12  # bf16 operations per second of a large matrix product on an H200
EXPONENTIAL_RATE = 132 * 16 * 1.83e9  # per second: 16 a clock on each processor of an H200
ROTATE_BYTES = 200 << 20  # several times the L2 cache


QUICK = ("64 x 128", "8192 tokens", "batch 64 x 4096")  # cases of `--quick`


def recurrence_cases(family: type[Recurrence]) -> Iterator[tuple[str, partial[Case]]]:
    for lengths in ([8192], [1024] * 8, [128] * 64, [64] * 64):
        yield f"{len(lengths)} x {lengths[0]}", partial(family, lengths)
    if family is DeltaRule:
        yield "64 x 128, vLLM's gates", partial(DeltaRule, [128] * 64, copied_gates=True)
    if family is KimiDelta:
        yield "64 x 128, strong decays", partial(KimiDelta, [128] * 64, rate=16.0)
    for batch in (16, 64, 256):
        yield f"batch {batch}", partial(family, [1] * batch, decode=True)
        if family is StateSpaceDual:
            yield f"batch {batch}, vLLM replays", partial(family, [1] * batch, decode=True, peer_replays=True)
    for tokens in (4, 8):
        for batch in (16, 64, 256):
            yield f"batch {batch}, {tokens} tokens", partial(family, [tokens] * batch, decode=True)


def attention_cases() -> Iterator[tuple[str, partial[Case]]]:
    """Yield cases with heads of width 128, and of width 256 as in Qwen3-Next."""
    for name, heads, width in (("", (32, 8), 128), (", 256 wide", (16, 2), 256)):
        family = partial(Attention, heads=heads, width=width)
        for rows, context, tokens in ((64, 4096, 1), (1, 32768, 1), (64, 4096, 4)):
            drafts = ", 4 tokens" if tokens > 1 else ""
            yield (
                f"batch {rows} x {context}{drafts}{name}",
                partial(family, [tokens] * rows, context - tokens, decode=True),
            )
        yield f"1 x 8192{name}", partial(family, [8192], 0)
        yield f"64 x 64 after 4096{name}", partial(family, [64] * 64, 4096)


def case_list() -> Iterator[tuple[str, partial[Case]]]:
    """Yield names, and functions that make inputs."""
    yield from recurrence_cases(DeltaRule)
    for lengths in ([8192], [128] * 64):
        name = f"{len(lengths)} x {lengths[0]}"
        yield name, partial(Conv1d, lengths)
        yield f"{name}, vLLM's metadata included", partial(Conv1d, lengths, peer_builds_metadata=True)
        yield f"{name}, LFM2's gates", partial(ShortConv, lengths)
    for batch in (64, 256):
        yield f"batch {batch}", partial(Conv1d, [1] * batch, decode=True)
        yield f"batch {batch}, 4 tokens", partial(Conv1d, [4] * batch, decode=True)
    for tokens in (8192, 256):
        yield f"{tokens} tokens", partial(GatedNorm, tokens)
    for family in (StateSpaceDual, KimiDelta, SelectiveScan):
        yield from recurrence_cases(family)
    yield from attention_cases()


def relative_error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest RMS error relative to the RMS of `exact`."""
    pairs = zip(actual, exact, strict=True)
    return max(float(((x.double() - y).square().mean() / y.square().mean()).sqrt()) for x, y in pairs)


def peer_calls(case: Case) -> dict[str, Call]:
    """Return the calls of peers; none without vLLM."""
    try:
        return case.peers()
    except ImportError:
        return {}


def against(times: dict[str, float | None], errors: dict[str, float]) -> dict:
    """Return a row's fields for peers: all times in µs by name, and time and error of the fastest."""
    timed = {name: us for name, us in times.items() if us is not None}
    fastest = min(timed, key=timed.__getitem__, default=None)
    return {"peer_us": timed.get(fastest), "peer_error": errors.get(fastest), "peers_us": times}


def graph_us_or_none(calls: Sequence[Call], repeats: int) -> float | None:
    """Return `graph_us`, or None for calls that synchronise with the device."""
    try:
        return graph_us(calls, repeats)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def measure(name: str, make: partial[Case], bandwidth: float, repeats: int, errors: bool) -> Iterator[dict]:
    """Yield the rows of a case, graph and eager."""
    case = make()
    sets = [case, *(make() for _ in range(min(ROTATE_BYTES // case.nbytes, 31)))]
    ours = [s.ours for s in sets]
    peer_sets = [peer_calls(s) for s in sets]
    peers = {name: [calls[name] for calls in peer_sets] for name in peer_sets[0]}
    copies = [call for s in sets if (call := s.copy())]
    row = {"op": case.op, "case": name}
    row["floor_us"] = 1e6 * max(
        case.nbytes / bandwidth, case.flops / PRODUCT_RATE, case.exponentials / EXPONENTIAL_RATE
    )
    peer_errors = {}
    if errors:
        exact = case.exact()
        row["ours_error"] = relative_error(case.results(ours[0], of_peer=False), exact)
        peer_errors = {n: relative_error(case.results(calls[0], of_peer=True), exact) for n, calls in peers.items()}
    for mode, us in (("graph", graph_us_or_none), ("eager", eager_us)):
        of_peers = against({name: us(calls, repeats) for name, calls in peers.items()}, peer_errors)
        copied = us(copies, repeats) if copies else None
        yield row | {"mode": mode, "ours_us": us(ours, repeats), **of_peers, "copy_us": copied}


def measure_host(repeats: int) -> Iterator[dict]:
    """Yield rows with the host time of an eager prefill call."""
    recurrences = [family([128] * 8) for family in (DeltaRule, KimiDelta, StateSpaceDual, SelectiveScan)]
    for case in (*recurrences, Conv1d([128] * 8), GatedNorm(1024)):
        row = {"op": case.op, "case": "host cost of a prefill call", "mode": "host", "floor_us": None}
        of_peers = against({name: host_us(call, repeats) for name, call in peer_calls(case).items()}, {})
        yield row | {"ours_us": host_us(case.ours, repeats), **of_peers}


def environment() -> dict:
    """Return GPU, versions and commit."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            **{package: installed(package) for package in ("torch", "triton", "vllm")},
            "flashinfer": kernel_peers.flashinfer_version(),
        },
        "commit": None if commit.returncode else commit.stdout.strip(),
    }


def format_row(row: dict) -> str:
    times = row["ours_us"], *map(row["peers_us"].get, (VLLM, FLASHINFER)), row["floor_us"], row.get("copy_us")
    cells = " ".join(f"{us:10.1f}" if us else f"{'-':>10}" for us in times)
    ratio = f"{row['peer_us'] / row['ours_us']:7.2f}x" if row["peer_us"] else f"{'-':>8}"
    return f"{row['op']:<17} {row['case']:<36} {row['mode']:<6} {cells} {ratio}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one case an op, fewer repeats, no errors: under a minute once kernels are compiled",
    )
    parser.add_argument("--only", nargs="+", help="run cases with one of these texts in op or name")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    repeats = 5 if options.quick else 20
    bandwidth = copy_bandwidth(repeats)
    result = environment() | {"copy_bytes_per_second": bandwidth, "rows": []}
    print(f"{result['gpu']}, {bandwidth / 1e12:.2f} TB/s, {result['versions']}")
    heads = " ".join(f"{head:>10}" for head in ("ours", VLLM, FLASHINFER, "floor", "copy"))
    print(f"{'µs':<17} {'':<36} {'':<6} {heads} fastest peer/ours")

    def record(rows: Iterator[dict]) -> None:
        for row in rows:
            result["rows"].append(row)
            print(format_row(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(result, indent=1) + "\n")

    if not options.only and not options.quick:
        record(measure_host(repeats * 5))
    for name, make in case_list():
        title = f"{make.func.op} {name}"
        if any(text in title for text in options.only or [""]) and (name in QUICK or not options.quick):
            record(measure(name, make, bandwidth, repeats, errors=not options.quick))
            gc.collect()
            torch.cuda.empty_cache()
    for name, how in HOW_TO_GET.items():
        if not result["versions"][name.lower()]:
            print(f"The column {name} is empty: to fill it, {how}")


if __name__ == "__main__":
    main()
