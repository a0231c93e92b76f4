"""Check that every code block runs, every link leads somewhere, and tables match code and measurements."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine_driver import TIE
from mambacache.demo.run import expected_hits
from mambacache.kernels import state_bytes
from mambacache.kernels.device import GPUS
from mambacache.models.adapt import MODEL_TYPES, adapt
from mambacache.models.attention import ATTENTION
from mambacache.report import Loss
from mambacache.runner.kv_pages import kv_block_bytes
from mambacache.runner.sizing import weight_bytes

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "tests" / "README.md", *ROOT.glob("docs/*.md"))
}
README, PERFORMANCE = PAGES["README.md"], PAGES["docs/performance.md"]
BLOCKS = [
    (page, kind, block) for page, text in PAGES.items() for kind, block in re.findall(r"```(\w*)\n(.*?)```", text, re.S)
]
PYTHON = [(page, block) for page, kind, block in BLOCKS if kind == "python"]
COMMANDS = [line for _, kind, block in BLOCKS if kind == "bash" for line in block.splitlines()]
CHECKPOINTS = json.loads((ROOT / "tests" / "checkpoint_configs.json").read_text())
PRINTED = {"README.md": "Lima .", "docs/embedding.md": "num_tokens=128"}  # where no output follows the block


def test_code_blocks_are_text_bash_or_python() -> None:
    assert {kind for _, kind, _ in BLOCKS} == {"text", "bash", "python"}


@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[page for page, _ in PYTHON])
def test_python_block(page: str, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, page, "exec"), {})
    if page in PRINTED and f"{block}```\n\n```text\n" not in PAGES[page]:
        assert PRINTED[page] in printed.getvalue()
    else:
        assert f"{block}```\n\n```text\n{printed.getvalue()}```" in PAGES[page]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tmp_path: Path) -> None:
    """Run each command; for the demo and for `make`, check only that the target exists."""
    words = shlex.split(command)
    if words == ["mambacache", "demo"]:
        words.append("--help")
    if words[0] == "make":
        words.insert(1, "--dry-run")
    elif words[0] == "pip":
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(tmp_path)]
        words = [sys.executable, "-m", *words, *options]
    else:
        words[0] = str(Path(sys.executable).with_name(words[0]))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout or words[0] == sys.executable


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Check links to files and to headings in them."""
    targets = re.findall(r"\]\(([^)\s]+)\)", PAGES[page]) + re.findall(r'(?:src|srcset)="([^"]+)"', PAGES[page])
    for target in targets:
        name, _, heading = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        titles = re.findall(r"^#+ (.*)$", path.read_text(), re.M) if heading else []
        assert not heading or heading in [re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles]


def test_demo_output_in_the_readme_is_current() -> None:
    rows = [list(map(int, row)) for row in re.findall(r"prompt +(\d+)  hit +(\d+)  ceiling +(\d+)", README)]
    assert rows and [hit for _, hit, _ in rows] == expected_hits()[: len(rows)]
    assert all(hit <= ceiling < prompt for prompt, hit, ceiling in rows)
    shown = next(block for page, kind, block in BLOCKS if page == "README.md" and block.startswith("cache on"))
    assert set(shown.splitlines()) - {"..."} <= set((RESULTS / "demo-cpu.log").read_text().splitlines())


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def test_every_result_is_named_by_a_page() -> None:
    texts = [text for page, text in PAGES.items() if page != "tests/README.md"]
    texts += [path.read_text() for path in ROOT.glob("benchmarks/*/README.md")]
    assert {path.name for path in RESULTS.iterdir() if not any(path.name in text for text in texts)} == set()


@pytest.mark.usefixtures("benchmarks")
def test_kernel_times_match_the_benchmark() -> None:
    from table import fastest_peer, kernel_table

    figures, attention = result("kernels-h200.json"), result("attention-h200.json")["rows"]
    assert kernel_table(figures) in PERFORMANCE and len(figures["commits"]) == 5 and "from six runs" in PERFORMANCE
    compared = [row for row in (*figures["rows"], *attention) if row.get("peer_error")]
    assert compared and all(row["ours_error"] <= 1.2 * row["peer_error"] for row in compared)
    ratios = [row["ours_us"] / row["peer_us"] for row in attention if row["mode"] == "graph"]
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} times as long as FlashAttention 3" in PERFORMANCE
    [called] = [
        row
        for row in figures["rows"]
        if (row["op"], row["case"], row["mode"]) == ("gated_delta_rule", "batch 16", "eager")
    ]
    peer, _ = fastest_peer(called)
    assert f"takes {called['ours_us']:.0f} µs, and vLLM's takes {peer:.0f} (kernels-h200.json)" in PERFORMANCE


def test_ratios_with_the_code_of_another_gpu_match_the_benchmark() -> None:
    ratios: dict[str, dict[str, str]] = {}
    for row in result("kernels-sm80-h200.json")["rows"]:
        if row["mode"] == "graph" and "vLLM" in row["peers_us"]:
            ratios.setdefault(row["op"], {})[row["case"]] = f"{row['ours_us'] / row['peers_us']['vLLM']:.2f}"
    assert ratios.keys() == {"gated_delta_rule", "kda", "ssd"}
    for op, cases in ratios.items():
        figures = [cases[case] for case in ("1 x 8192", "8 x 1024", "64 x 128", "batch 64")]
        assert f"| `{op}` | {' | '.join(figures)} |" in PERFORMANCE
    assert f"SSD's batch of 64 takes {ratios['ssd']['batch 64, vLLM replays']}." in PERFORMANCE
    prefill = [ratio for cases in ratios.values() for case, ratio in cases.items() if not case.startswith("batch")]
    assert f"prefill kernels take {min(prefill)} to {max(prefill)} of vLLM's [time]" in README


@pytest.mark.usefixtures("benchmarks")
def test_replay_hits_match_the_benchmark() -> None:
    from table import REPLAYED, agents_table, replay_table, replayed

    figures = result("replay-conversation.json")
    assert replay_table(figures) in PERFORMANCE
    assert {row["policy"] for row in figures["rows"]} == set(REPLAYED)
    shares = {(row["policy"], row["state_gib"]): row["share"] for row in figures["rows"] if row["kv_gib"] == 0}
    budgets = {gib for _, gib in shares}
    assert {25, 60, 160} <= budgets and shares["mambacache", 60] >= 0.35
    assert all(shares["mambacache", gib] == max(shares[p, gib] for p, at in shares if at == gib) for gib in budgets)
    report = result("replay-report.json")
    assert replay_table(report) in PERFORMANCE
    for row in report["rows"]:
        ours = [each for each in report["rows"] if each["policy"] == "mambacache" and replayed(each) == replayed(row)]
        assert row["policy"] == "mambacache" or row["share"] + 0.03 < ours[0]["share"], row
    memories = result("replay-agents.json")["budgets"]
    agents, quarter = memories["25"], memories["quarter"]
    assert agents_table(agents) in PERFORMANCE and f"{len(agents)} settings" in PERFORMANCE
    leads = [row["mambacache"] - row["lru-joint"] for row in agents]
    assert min(leads) > -0.02 and mean(leads) > 0.03
    unseen = mean(row["mambacache"] for row in agents if row["setting"] not in (7, 15, 17, 33, 129))
    assert f"The other 95 hit {unseen:.1%} in the mean." in PERFORMANCE
    for rows, policy in product((agents, memories["60"], memories["120"]), ("lru-ends", "vllm", "sglang", "marconi")):
        assert mean(row["mambacache"] - row[policy] for row in rows) > 0, policy
    for gib in ("60", "120"):
        share, marconi, lru = (mean(row[p] for row in memories[gib]) for p in ("mambacache", "marconi", "lru-ends"))
        assert f"{share:.1%} with {gib} GiB (Marconi {marconi:.1%}, LRU with ends {lru:.1%})" in PERFORMANCE
    share, lost = mean(row["mambacache"] for row in quarter), [row["unbounded"] - row["mambacache"] for row in quarter]
    assert f"hits {share:.1%} in the mean of the first {len(quarter)} settings. Unbounded memory hits " in PERFORMANCE
    assert f"hits {100 * min(lost):.1f} to {100 * max(lost):.1f} points more." in PERFORMANCE and max(lost) < 0.1
    simulated = result("replay-vllm.json")["rows"]
    served = {row["by_last_use"]: f"hits {row['share']:.1%}" for row in simulated if row["requests"] > 2000}
    assert f"it {served[False]} of the ceiling" in PERFORMANCE and f"eviction it {served[True]}." in PERFORMANCE
    [run] = result("serving-window-h200.json")["rows"]
    window = [row for row in simulated if row["requests"] == 2000]
    share, shares = run["hit_tokens"] / run["ceiling_tokens"], [row["share"] for row in window]
    waits = [row["first_token_median"] for row in window]
    assert len(window) == 8 and mean(waits) == pytest.approx(run["first_token_median"], rel=0.02)
    assert abs(mean(shares) - share) < 0.02
    assert f"They hit {share:.1%} of the ceiling" in PERFORMANCE
    assert f"hit {mean(shares):.1%} in the mean, {min(shares):.1%} to {max(shares):.1%}." in PERFORMANCE
    [own] = [row["share"] for row in window if row["seed"] == 2]
    assert f"The run's own arrivals hit {own:.1%}." in PERFORMANCE


@pytest.mark.usefixtures("benchmarks")
def test_vllm_times_match_the_benchmarks() -> None:
    from table import engine_table, serving_table

    for model in ("9b", "35b-a3b-fp8"):
        assert engine_table(result(f"vllm-qwen3.5-{model}-h100.json")) in PERFORMANCE
    experts = result("experts-h100.json")
    used = f"{experts['least']} to {experts['most']} of {experts['experts']} experts"
    assert f"A decode step of {experts['rows']} rows uses {used}" in PERFORMANCE
    page, serving = PAGES["docs/vllm.md"], result("serving-h100.json")
    assert serving_table(serving) in page and f"commit {serving['commit'][:7]}" in page
    plugin, vllm = serving["rows"]
    median, last, token, hits = (
        [row[key] for row in (plugin, vllm)]
        for key in ("first_token_median", "first_token_p99", "token_median", "hit_tokens")
    )
    assert f"First token, median: {median[0]:.3f} s and {median[1]:.3f} s" in PERFORMANCE
    assert f"99th percentile: {last[0]:.2f} s and {last[1]:.2f} s" in PERFORMANCE
    assert f"Between tokens, median: {1e3 * token[0]:.1f} ms and {1e3 * token[1]:.1f} ms" in PERFORMANCE
    assert f"Hits: {hits[0]:,} and {hits[1]:,} of {vllm['prompt_tokens']:,} tokens" in PERFORMANCE


@pytest.mark.usefixtures("benchmarks")
def test_vllm_errors_match_the_measurements() -> None:
    from table import tables

    errors, page = result("vllm-accuracy-h100.json"), PAGES["docs/vllm.md"]
    assert all(table in page for table in tables(errors)) and f"at {errors['commit'][:7]}" in page
    models = [model["rms"] for part in ("models", "quantised", "fp8") for model in errors[part].values()]
    assert all(rms["plugin"] <= 1.005 * rms["vllm"] for rms in models)


@pytest.mark.usefixtures("benchmarks")
def test_fleet_figures_match_the_benchmark() -> None:
    from table import ROUTINGS, fleet_table

    page, figures = PAGES["docs/routers.md"], result("fleet.json")
    assert fleet_table(figures) in page
    rows = {(row["replicas"], row["routing"]): row for row in figures["rows"]}
    assert all(row["requests"] == 3000 for row in rows.values())
    wrong = [[row["wrong"][kind] for row in rows.values()] for kind in ROUTINGS[2:]]
    assert f"{min(wrong[0])} to {max(wrong[0])} of 3,000 requests" in page
    assert f"{min(wrong[1])} to {max(wrong[1])} by pages and states" in page
    step, row, token = (1e3 * figures["cost"][key] for key in ("step", "row", "token"))
    assert f"{step:.2f} ms, {row:.3f} ms for each row that decodes, and {token:.4f} ms for each" in page


def test_tier_figures_match_the_benchmark() -> None:
    [row] = result("host-tier-h200.json")["rows"]
    longer = (row["host_hit_ms"] - row["device_hit_ms"]) / row["plain_ms"]
    slower = row["decode_beside_ms"] / row["decode_ms"] - 1
    assert longer <= 1.3 and slower <= 0.03
    times = f"{row['host_hit_ms']:.2f} ms to the first token from host memory and {row['device_hit_ms']:.2f}"
    assert f"A hit of {row['tokens']:,} tokens takes {times} from the device" in PERFORMANCE
    assert f"Decode beside transfers is {slower:.1%} slower" in PERFORMANCE


def test_offload_figures_match_the_benchmark() -> None:
    figures, page = result("serving-window-host-h200.json"), PAGES["docs/offload.md"]
    plugin, vllm = rows = figures["rows"]
    hits = [row["hit_tokens"] / row["ceiling_tokens"] for row in rows]
    simulated = figures["simulated"]["share"]
    assert abs(hits[0] - simulated) < 0.02 and f"predicts {simulated:.1%}" in page
    assert hits[0] > hits[1] and plugin["first_token_median"] < vllm["first_token_median"]
    medians, lasts, tokens = (
        [row[key] for row in rows] for key in ("first_token_median", "first_token_p99", "token_median")
    )
    assert f"| hits, of the ceiling | {hits[0]:.1%} | {hits[1]:.1%} |" in page
    assert f"| first token, median | {medians[0]:.3f} s | {medians[1]:.3f} s |" in page
    assert f"| first token, 99th percentile | {lasts[0]:.2f} s | {lasts[1]:.2f} s |" in page
    assert f"| between tokens, median | {1e3 * tokens[0]:.1f} ms | {1e3 * tokens[1]:.1f} ms |" in page


def test_chat_and_answer_figures_match_the_benchmarks() -> None:
    chats, kl = result("multiturn-h200.json"), result("kl-hits-h200.json")["kl"]
    on, off = ([row for row in chats["rows"] if row["cache"] is cache][-1] for cache in (True, False))
    assert on["turn"] == 8 and f"({chats['chats']} chats," in PERFORMANCE
    times = f"{1e3 * on['seconds']:.0f} ms to the first token, and {1e3 * off['seconds']:.0f} without the cache"
    assert f"the last of eight turns takes {times}" in PERFORMANCE
    batch = "no hit, other batch"
    compared = [found for found in kl.values() if found[batch]]
    assert len(compared) == 10
    for text, writer in (("changes the next token", "prefill"), ("If decode wrote the state, it is", "decode")):
        ratios = [found[f"hit, state written by {writer}"] / found[batch] for found in compared]
        assert f"{text} {min(ratios):.2f} to {max(ratios):.2f} times" in PERFORMANCE


def test_readme_figures_match_the_benchmark() -> None:
    rows = [row for model in ("9b", "35b-a3b-fp8") for row in result(f"vllm-qwen3.5-{model}-h100.json")["rows"]]
    for shared, own in ((1600, 600), (1500, 700)):
        workload = f"64 x ({shared} shared by 8 + {own}), all at once"
        four = [row for row in rows if row["workload"] == workload]
        assert [row["engine"] for row in four] == ["plugin", "vllm, FlashInfer"] * 2
        hits, times = [f"{row['hit_tokens']:,}" for row in four], [f"{row['seconds']:.3f}" for row in four]
        assert {row["prompt_tokens"] for row in four} == {140_800}
        assert f"| {shared:,} shared + {own}: tokens hit | {' | '.join(hits)} |" in README
        assert f"| {shared:,} shared + {own}: seconds | {' | '.join(times)} |" in README


def test_options_page_matches_the_dataclasses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from make_options import page

    assert PAGES["docs/options.md"] == page()


def test_bounds_and_lengths_match_the_code() -> None:
    """Check the bound of ties, and the length of the example engine."""
    assert re.findall(r"two best logits are closer than (\S+),", PAGES["tests/README.md"]) == [
        f"{TIE:.0e}".replace("-0", "-")
    ]
    lines = str(len((ROOT / "examples" / "host_engine.py").read_text().splitlines()))
    assert re.findall(r"an engine in (\d+)\s+lines", README) == [lines]
    assert re.findall(r"a host in (\d+) lines", PAGES["docs/embedding.md"]) == [lines]
    lines = str(len((ROOT / "examples" / "router.py").read_text().splitlines()))
    assert re.findall(r"a router in (\d+) lines", PAGES["docs/routers.md"]) == [lines] and int(lines) <= 100


def test_plugin_log_lines_match_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "mambacache" / "vllm").glob("*.py"))
    formats = re.findall(r'logger\.\w+\(\s*"([^"]+)"', code)
    patterns = [re.escape(each) for each in formats]
    for field, pattern in (("%d", r"[\d,]+"), ("%.2f", r"\d+\.\d\d"), ("%s", ".+")):
        patterns = [each.replace(re.escape(field), pattern) for each in patterns]
    section = PAGES["docs/vllm.md"].partition("## What one sees")[2]
    [sample] = re.findall(r"```text\n(.*?)\n```", section.partition("## Settings")[0], re.S)
    assert len(sample.splitlines()) == 3
    for line in sample.splitlines():
        assert any(re.fullmatch(pattern, line) for pattern in patterns), line


def test_options_that_the_plugin_refuses_are_listed() -> None:
    code = (ROOT / "mambacache" / "vllm" / "config.py").read_text()
    refusing = code.partition("def refuse(")[2].partition("def is_cpu")[0]
    options = set(re.findall(r"--[a-z][a-z-]+|VLLM_[A-Z0-9_]+", refusing))
    section = PAGES["docs/vllm.md"].partition("## What is refused")[2].partition("## How it stays")[0]
    assert len(options) > 10 and {each for each in options if f"`{each}`" not in section} == set()


def test_the_readme_tells_what_proves_the_kernels_of_each_gpu() -> None:
    meanings = {
        "run": "the GPU tests ran on it",
        "emulated": "a Hopper ran tests of kernels or models with its code",
        "compiled": "on a CPU alone",
    }
    rows = []
    for proof, meaning in meanings.items():
        found = [f"{gpu.names} ({major}.{minor})" for (major, minor), gpu in GPUS.items() if gpu.proof == proof]
        rows += [f"| {'; '.join(found)} | {proof}: {meaning} |"] * bool(found)
    assert "\n".join(rows) in README


def test_all_model_types_and_losses_are_listed() -> None:
    assert all(f"`{name}`" in page for name in MODEL_TYPES for page in (README, PAGES["docs/models.md"]))
    assert set(re.findall(r"^\| `([a-z ]+)` \|.*\|.*\|$", PAGES["docs/report.md"], re.M)) == set(Loss)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_sizes(name: str) -> None:
    config = AutoConfig.for_model(**CHECKPOINTS[name])
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
    model = adapt(module.to(torch.bfloat16))  # releases of transformers keep more or fewer routers in fp32
    state, log = (state_bytes(layers(torch.float32)) for layers in (model.state_layers, model.log_layers))
    sizes = [weight_bytes(model), state]
    if model.kv_layers:
        sizes.append(kv_block_bytes(model.kv_layers, 64) // 64)
    row = next(line for line in PAGES["docs/models.md"].splitlines() if line.startswith(f"| {name} |"))
    assert [int(n.replace(",", "")) for n in re.findall(r"([\d,]{5,}) bytes", row)] == sizes
    assert f"| {log / state:.0%} of a state |" in row
