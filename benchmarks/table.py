"""Prints the tables of docs/ from figures that benchmarks wrote.

    python benchmarks/table.py benchmarks/results/kernels-h200.json

Of bench_kernels.py, bench_engine.py, bench_multiturn.py, kl_hits.py or replay_trace.py, or what the plugin's GPU tests
leave (vllm-accuracy-h200.json).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# How many times as fast as the fastest peer, in a graph; the rest of prefill has no target, of decode to be as fast.
TARGETS = {
    "gated_delta_rule": {"1 x 8192": 1.1, "8 x 1024": 1.5, "64 x 128": 3, "64 x 128, vLLM's gates": 3}
    | {"batch 64": 1.4, "batch 256": 1.6, "batch 64, 4 tokens": 2.5, "batch 256, 4 tokens": 3},
    "kda": {"1 x 8192": 2.5, "8 x 1024": 2.8, "64 x 128": 3.5, "batch 64": 1.3, "batch 256": 1.5},
    "ssd": {"1 x 8192": 2.4, "8 x 1024": 3.1, "64 x 128": 3.5, "batch 64": 1.4, "batch 256": 1.6},
    "selective_scan": {"1 x 8192": 4, "8 x 1024": 12, "64 x 128": 80},
    "paged_attention": {case + wide: 0.7 for case in ("1 x 8192", "64 x 64 after 4096") for wide in ("", ", 256 wide")},
}
LAYERS = {
    "falcon_h1": "Falcon-H1-7B",
    "falcon_mamba": "Falcon-Mamba-7B",
    "granitemoehybrid": "Granite-4.0-H-Tiny",
    "jamba": "Jamba-v0.1",
    "kimi_linear": "Kimi-Linear-48B-A3B",
    "lfm2": "LFM2-700M",
    "lfm2_moe": "LFM2-8B-A1B",
    "nemotron_h": "Nemotron-H-8B",
    "olmo_hybrid": "OLMo-Hybrid-7B",
    "qwen3_next": "Qwen3-Next",
}
ENGINES = {
    "ours": "own engine",
    "plugin": "plugin",
    "vllm": "vLLM alone",
    "vllm, FlashInfer": "vLLM with FlashInfer's prefill",
}
OURS = ("ours", "plugin")
REPLAYED = {
    "mambacache": "mambacache",
    "vllm": "vLLM 0.33",
    "sglang": "SGLang 0.5.23",
    "marconi": "Marconi, one budget",
    "lru": "LRU",
    "lru-joint": "LRU, one budget",
    "clairvoyant": "told the future, one budget",
}
BOUND = "clairvoyant"
REPLAYED_MODELS = {"qwen3-next": "Qwen3-Next", "nemotron-h-8b": "Nemotron-H-8B"}


def microseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def peer_times(row: dict) -> dict[str, float | None]:
    """The times of a row by peer; rows measured when there was one have it alone."""
    return row.get("peers_us") or {"vLLM": row["peer_us"]}


def peer_names(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in peer_times(row)))


def peer_cells(row: dict, names: list[str]) -> list[str]:
    return [microseconds(peer_times(row).get(name)) for name in names]


def peers_said(row: dict) -> str:
    """The time of the fastest peer, as a picture has it; where there are others, its name and theirs too."""
    times = sorted((us, name) for name, us in peer_times(row).items() if us is not None)
    return ", ".join(f"{us:,.0f} µs" + f" {name}" * (len(times) > 1) for us, name in times)


def line(graph: dict, eager: dict, names: list[str]) -> str:
    """A case; its ratio is that of the fastest peer."""
    op, case = graph["op"], graph["case"]
    decodes = case.startswith("batch") and op != "paged_attention"  # whose decode is measured by the floor
    target = TARGETS.get(op, {}).get(case, 1 if op in TARGETS and decodes else None)
    ratio = f"{graph['peer_us'] / graph['ours_us']:.2f}x" if graph["peer_us"] else ""
    replayed, called = ([microseconds(row["ours_us"]), *peer_cells(row, names)] for row in (graph, eager))
    limits = [microseconds(graph[key]) for key in ("floor_us", "copy_us")]
    cells = [f"`{op}`", case, *replayed, ratio, f"{target:g}x" if target else "", *called, *limits]
    return f"| {' | '.join(cells)} |"


def table(result: dict) -> str:
    rows = [row for row in result["rows"] if row["mode"] != "host"]
    names = peer_names(rows)
    head = ["op", "case", "graph: ours", *names, "ratio", "to reach", "eager: ours", *names, "floor", "copy"]
    lines = [line(*pair, names) for pair in zip(rows[::2], rows[1::2], strict=True)]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def host_table(result: dict) -> str:
    rows = [row for row in result["rows"] if row["mode"] == "host"]
    names = peer_names(rows)
    head = ["host cost of one prefill call", "ours", *names]
    lines = [[f"`{row['op']}`", microseconds(row["ours_us"]), *peer_cells(row, names)] for row in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(x)} |" for x in lines)])


def faster(rows: list[dict], workload: str) -> dict:
    """vLLM alone, as it ran the workload in less time: some runs time it with FlashInfer's prefill as well."""
    alone = [row for row in rows if row["workload"] == workload and row["engine"] not in OURS]
    return min(alone, key=lambda row: row["seconds"])


def engine_table(run: dict) -> str:
    """Seconds and hits of each workload of bench_engine.py; ratios and hits beside those of the faster vLLM."""
    rows = {(row["workload"], row["engine"]): row for row in run["rows"]}
    engines = [engine for engine in ENGINES if any(engine == each for _, each in rows)]
    ours = [engine for engine in engines if engine in OURS]
    ratios, hits = ([f"{what}: {ENGINES[engine]}" for engine in ours] for what in ("ratio", "hit"))
    head = ["workload", *(ENGINES[engine] for engine in engines), *ratios, *hits, "vLLM"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for workload in dict.fromkeys(workload for workload, _ in rows):
        peer, own = faster(run["rows"], workload), [rows[workload, engine] for engine in ours]
        times = [f"{rows[workload, engine]['seconds']:.3f}" for engine in engines]
        ratios = [f"{row['seconds'] / peer['seconds']:.2f}" for row in own]
        hits = [f"{row['hit_tokens']:,}" for row in (*own, peer)]
        lines.append(f"| {' | '.join([workload, *times, *ratios, *hits])} |")
    return "\n".join(lines)


def serving_table(result: dict) -> str:
    """Of bench_serving.py."""
    plugin, vllm = result["rows"]
    lines = ["| | plugin | vLLM alone |\n|---|---|---|"]
    for name, key in (
        ("seconds to the first token, median", "first_token_median"),
        ("seconds to the first token, 99th percentile", "first_token_p99"),
        ("seconds from token to token, median", "token_median"),
    ):
        lines.append(f"| {name} | {plugin[key]:.4f} | {vllm[key]:.4f} |")
    lines.append(f"| hit of {vllm['prompt_tokens']:,} tokens | {plugin['hit_tokens']:,} | {vllm['hit_tokens']:,} |")
    return "\n".join(lines)


def error_table(result: dict) -> str:
    lines = ["| layers | plugin | vLLM alone | ratio |\n|---|---|---|---|"]
    for name, model in result["models"].items():
        plugin, vllm = model["rms"]["plugin"], model["rms"]["vllm"]
        lines.append(f"| {LAYERS[name]}'s | {plugin:.4f} | {vllm:.4f} | {plugin / vllm:.2f} |")
    return "\n".join(lines)


def fp8_table(result: dict) -> str:
    """Of quantised models: errors as above, and the mean KL divergence from vLLM alone."""
    head = "| layers | plugin | vLLM alone | ratio | KL: plugin | vLLM, other order | ratio |"
    lines = [head + "\n|---|---|---|---|---|---|---|"]
    for name, model in result["fp8"].items():
        plugin, vllm = model["rms"]["plugin"], model["rms"]["vllm"]
        far, near = model["kl"]["plugin"], model["kl"]["vllm, backwards"]
        errors = f"{plugin:.4f} | {vllm:.4f} | {plugin / vllm:.2f}"
        lines.append(f"| {LAYERS[name]}'s | {errors} | {far:.5f} | {near:.5f} | {far / near:.1f} |")
    return "\n".join(lines)


def cut_table(result: dict) -> str:
    """Of quantised models whose prompts are cut all over: the mean KL divergence from vLLM alone."""
    lines = ["| layers | KL: plugin | vLLM, other order | ratio |\n|---|---|---|---|"]
    for name, model in result["fp8_in_steps_of_128_tokens"].items():
        far, near = model["kl"]["plugin"], model["kl"]["vllm, backwards"]
        lines.append(f"| {LAYERS[name]}'s | {far:.5f} | {near:.5f} | {far / near:.2f} |")
    return "\n".join(lines)


def kl_table(result: dict) -> str:
    """Of kl_hits.py, by model: what another batch changes, and what hits change, with the ratio where that is not 0."""
    names = list(next(iter(result["kl"].values())))
    lines = [f"| mean KL | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for model, found in result["kl"].items():
        ruler = found[names[0]]
        ratios = [f" ({found[name] / ruler:.2f})" if ruler and name != names[0] else "" for name in names]
        cells = [f"{found[name]:.1e}{ratio}" for name, ratio in zip(names, ratios, strict=True)]
        who = f"{LAYERS[model]}'s" if model in LAYERS else "the trained model of the demo"
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


def turn_table(result: dict) -> str:
    """Of bench_multiturn.py, by turn: milliseconds to the first token, and what is hit."""
    lines = ["| turn | tokens of a prompt | hit | cache on | p99 | cache off | p99 |", "|---" * 7 + "|"]
    on, off = ([row for row in result["rows"] if row["cache"] is cache] for cache in (True, False))
    for one, other in zip(on, off, strict=True):
        times = [f"{1e3 * row[key]:.0f}" for row in (one, other) for key in ("seconds", "p99")]
        tokens, hit = one["prompt_tokens"] // result["chats"], one["hit_tokens"] / one["prompt_tokens"]
        lines.append(f"| {one['turn']} | {tokens:,} | {hit:.0%} | {' | '.join(times)} |")
    return "\n".join(lines)


def memory(row: dict) -> str:
    if row["state_gib"] is None:
        return "unbounded"
    gib = " + ".join(f"{row[part]:g}" for part in ("state_gib", "kv_gib", "host_gib") if row[part]) + " GiB"
    return gib if row["kv_gib"] else f"{gib} for both"


def replayed(row: dict) -> str:
    """What a row of replay_trace.py has in common with those of other policies."""
    running = f", {row['running']} running" if row["running"] > 1 else ""
    return f"{REPLAYED_MODELS[row['model']]}{running}, {memory(row)}"


def in_order(rows: list[dict]) -> list[dict]:
    """By model, by how many run, and by memory, unbounded last."""
    models = list(REPLAYED_MODELS)
    return sorted(
        rows,
        key=lambda row: (
            models.index(row["model"]),
            row["running"],
            row["state_gib"] or 1e9,
            row["kv_gib"],
            row["host_gib"],
        ),
    )


def replay_table(result: dict) -> str:
    """The share of the ceiling that each policy hits."""
    rows = in_order(result["rows"])
    columns = list(dict.fromkeys(map(replayed, rows)))
    shares = {(row["policy"], replayed(row)): f"{row['share']:.1%}" for row in rows}
    lines = [f"| hit, of the ceiling | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for policy, name in REPLAYED.items():
        lines.append(f"| {name} | {' | '.join(shares.get((policy, column), '') for column in columns)} |")
    return "\n".join(lines)


def replay_loss_table(result: dict) -> str:
    """What mambacache does not hit, by reason; states that it stored, and the host's time."""
    rows = [row for row in in_order(result["rows"]) if row["losses"] is not None]
    reasons = list(dict.fromkeys(reason for row in rows for reason in row["losses"]))
    head = ["mambacache", *(f"lost: {reason}" for reason in reasons), "states stored", "host, ms a request"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        lost = [f"{row['losses'].get(reason, 0):.1%}" for reason in reasons]
        cells = [replayed(row), *lost, f"{row['states_stored']:,}", f"{row['host_ms']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    figures = json.loads(Path(sys.argv[1]).read_text())
    if "policy" in figures.get("rows", [{}])[0]:
        print(replay_table(figures), replay_loss_table(figures), sep="\n\n")
    elif "runs" in figures:
        print(*map(engine_table, figures["runs"]), sep="\n\n")
    elif "workload" in figures.get("rows", [{}])[0]:
        print(engine_table(figures))
    elif "chats" in figures:
        print(turn_table(figures))
    elif "models" in figures:
        print(error_table(figures), fp8_table(figures), cut_table(figures), sep="\n\n")
    elif "kl" in figures:
        print(kl_table(figures))
    else:
        print(table(figures), host_table(figures), sep="\n\n")


if __name__ == "__main__":
    main()
