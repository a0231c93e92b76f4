"""Print the tables of docs/ from results of benchmarks.

    python benchmarks/table.py benchmarks/results/kernels-h200.json

Results come from bench_kernels.py, bench_engine.py, bench_serving.py, bench_fleet.py, replay_trace.py and
`make test-vllm-gpu`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

LAYERS = {
    "falcon_h1": "Falcon-H1-7B",
    "falcon_mamba": "Falcon-Mamba-7B",
    "granitemoehybrid": "Granite-4.0-H-Tiny",
    "jamba": "Jamba-v0.1",
    "kimi_linear": "Kimi-Linear-48B-A3B",
    "lfm2": "LFM2-700M",
    "lfm2_moe": "LFM2-8B-A1B",
    "lfm2_vl": "LFM2-VL (text)",
    "nemotron_3": "Nemotron-3-Nano-30B-A3B",
    "nemotron_h": "Nemotron-H-8B",
    "olmo_hybrid": "OLMo-Hybrid-7B",
    "qwen3_5": "Qwen3.5-9B",
    "qwen3_5_moe": "Qwen3.5-35B-A3B",
    "qwen3_next": "Qwen3-Next",
}
FORMS = {
    "mtp": "two MTP drafts",
    "tp2": "tensor parallel 2",
    "awq": "AWQ",
    "block_fp8": "block FP8, FP8 KV, two MTP drafts",
    "gptq": "GPTQ, two MTP drafts",
    "modelopt_fp8": "ModelOpt FP8, FP8 KV",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}
ENGINES = {
    "ours": "own engine",
    "plugin": "plugin",
    "vllm": "vLLM alone",
    "vllm, FlashInfer": "vLLM with FlashInfer's prefill",
}
OURS = ("ours", "plugin")
REPLAYS = ", vLLM replays"
PREFILL = ("1 x 8192", "8 x 1024", "64 x 128")
DECODE = ("batch 16", "batch 64", "batch 256")
DRAFTS = "batch 64, 4 tokens"
CASES = {
    "gated_delta_rule": (*PREFILL, *DECODE, DRAFTS),
    "kda": (*PREFILL, "64 x 128, strong decays", *DECODE, DRAFTS),
    "ssd": (*PREFILL, *(f"{case}{REPLAYS}" for case in DECODE)),
    "selective_scan": (*PREFILL, *DECODE),
    "conv1d": ("1 x 8192", "batch 64"),
    "gated_rms_norm": ("8192 tokens",),
}
REPLAYED = {
    "mambacache": "mambacache",
    "vllm": "vLLM 0.33",
    "sglang": "SGLang 0.5.23",
    "marconi": "Marconi, one budget",
    "lru": "LRU",
    "lru-joint": "LRU, one budget",
    "clairvoyant": "clairvoyant bound",
}
WITH_AGENTS = REPLAYED | {
    "lru-ends": "LRU with answers' ends, one budget",
    "unbounded": "mambacache, unbounded",
}
ROUTINGS = "round robin", "by chat", "pages", "pages and states"
REPLAYED_MODELS = {
    "qwen3-next": "Qwen3-Next",
    "qwen3-next-fp8-kv": "Qwen3-Next, KV in fp8",
    "qwen3-next-bf16-states": "Qwen3-Next, states in bf16",
    "nemotron-h-8b": "Nemotron-H-8B",
}


def markdown(head: list[str], rows: list[list[str]]) -> str:
    first, *rest = (f"| {' | '.join(line)} |" for line in (head, *rows))
    return "\n".join([first, "|" + "---|" * len(head), *rest])


def microseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def fastest_peer(row: dict) -> tuple[float, str]:
    """Return the time and name of the fastest peer; a row without names has vLLM's time only."""
    times = row.get("peers_us") or {"vLLM": row["peer_us"]}
    return min((us, name) for name, us in times.items() if us is not None)


def kernel_table(result: dict) -> str:
    """Return a table of `CASES` in a CUDA graph, beside the fastest peer and the floor."""
    rows = {(row["op"], row["case"]): row for row in result["rows"] if row["mode"] == "graph"}
    lines = []
    for op, cases in CASES.items():
        for case in cases:
            row = rows[op, case]
            ours, (peer, name) = row["ours_us"], fastest_peer(row)
            name += " replays" if case.endswith(REPLAYS) else ""
            numbers = [microseconds(ours), f"{microseconds(peer)} {name}", f"{ours / peer:.2f}"]
            lines.append([f"`{op}`", case.removesuffix(REPLAYS), *numbers, f"{row['floor_us'] / ours:.0%}"])
    return markdown(["op", "case", "ours, µs", "fastest peer, µs", "ratio", "floor"], lines)


def faster(rows: list[dict], workload: str) -> dict:
    """Return the row of vLLM alone with its faster prefill."""
    alone = [row for row in rows if row["workload"] == workload and row["engine"] not in OURS]
    return min(alone, key=lambda row: row["seconds"])


def engine_table(run: dict) -> str:
    """Return a table of each workload's seconds and hits, with ratios to the faster vLLM."""
    rows = {(row["workload"], row["engine"]): row for row in run["rows"]}
    engines = [engine for engine in ENGINES if any(engine == each for _, each in rows)]
    ours = [engine for engine in engines if engine in OURS]
    ratios, hits = ([f"{what}: {ENGINES[engine]}" for engine in ours] for what in ("ratio", "hit"))
    lines = []
    for workload in dict.fromkeys(workload for workload, _ in rows):
        peer, own = faster(run["rows"], workload), [rows[workload, engine] for engine in ours]
        times = [f"{rows[workload, engine]['seconds']:.3f}" for engine in engines]
        shares = [f"{row['seconds'] / peer['seconds']:.2f}" for row in own]
        tokens = [f"{row['hit_tokens']:,}" for row in (*own, peer)]
        lines.append([workload, *times, *shares, *tokens])
    return markdown(["workload", *(ENGINES[engine] for engine in engines), *ratios, *hits, "vLLM"], lines)


def serving_table(result: dict) -> str:
    """Return a table of `vllm serve`: times until it is ready, to the first token and between tokens, and hits."""
    plugin, vllm = result["rows"]
    lines = []
    for name, key, digits in (
        ("seconds until ready, nothing compiled", "ready", 0),
        ("seconds until ready, all compiled", "ready_again", 0),
        ("seconds to the first token, median", "first_token_median", 3),
        ("seconds to the first token, 99th percentile", "first_token_p99", 3),
        ("seconds from token to token, median", "token_median", 4),
    ):
        lines.append([name, f"{plugin[key]:.{digits}f}", f"{vllm[key]:.{digits}f}"])
    hits = [f"{row['hit_tokens']:,}" for row in (plugin, vllm)]
    return markdown(["", "plugin", "vLLM alone"], [*lines, [f"hit of {vllm['prompt_tokens']:,} tokens", *hits]])


def layers_of(key: str) -> str:
    """Return the name of the layers, with their weights' form and the mode."""
    parts = key.split("-")
    return ", ".join([*(LAYERS[part] for part in parts if part in LAYERS), *(FORMS[p] for p in parts if p in FORMS)])


def error_table(models: dict[str, dict]) -> str:
    """Return a table of errors against fp32, with the mean KL divergence from vLLM alone if measured."""
    lines = []
    for key in sorted(models, key=layers_of):
        plugin, vllm, kl = *(models[key]["rms"][engine] for engine in ("plugin", "vllm")), models[key].get("kl")
        ratio = [f"{plugin:.4f}", f"{vllm:.4f}", f"{plugin / vllm:.3f}"]
        lines.append([layers_of(key), *ratio, *([f"{kl['plugin']:.5f}"] if kl else [])])
    head = ["layers", "plugin", "vLLM alone", "ratio", "KL"]
    return markdown(head[: len(lines[0])], lines)


def cut_table(models: dict[str, dict]) -> str:
    """Return a table of mean KL divergences from vLLM alone: the plugin, and vLLM with another batch order."""
    lines = []
    for key, model in models.items():
        far, near = model["kl"]["plugin"], model["kl"]["vllm, backwards"]
        lines.append([layers_of(key), f"{far:.5f}", f"{near:.5f}", f"{far / near:.2f}"])
    return markdown(["layers", "KL: plugin", "vLLM, other order", "ratio"], lines)


def memory(row: dict) -> str:
    if row["state_gib"] is None:
        return "unbounded"
    gib = " + ".join(f"{row[part]:g}" for part in ("state_gib", "kv_gib", "host_gib") if row[part]) + " GiB"
    return gib if row["kv_gib"] else f"{gib} for both"


def replayed(row: dict) -> str:
    """Return a replay's model, traffic if mixed, number of running requests and memory."""
    mixed = " with agents" if "+" in row["trace"] else ""
    running = f", {row['running']} running" if row["running"] > 1 else ""
    return f"{REPLAYED_MODELS[row['model']]}{mixed}{running}, {memory(row)}"


def in_order(rows: list[dict]) -> list[dict]:
    """Sort rows by model, traffic, number of running requests and memory, unbounded memory last."""
    models = list(REPLAYED_MODELS)
    return sorted(
        rows,
        key=lambda row: (
            models.index(row["model"]),
            row["trace"],
            row["running"],
            row["state_gib"] or 1e9,
            row["kv_gib"],
            row["host_gib"],
        ),
    )


def replay_table(result: dict) -> str:
    """Return a table of each policy's share of the ceiling, by memory."""
    shares = {(replayed(row), row["policy"]): f"{row['share']:.1%}" for row in result["rows"]}
    settings = list(dict.fromkeys(map(replayed, in_order(result["rows"]))))
    policies = [policy for policy in REPLAYED if any(row["policy"] == policy for row in result["rows"])]
    lines = [[setting, *(shares.get((setting, policy), "") for policy in policies)] for setting in settings]
    return markdown(["model, memory", *map(REPLAYED.get, policies)], lines)


def agents_table(settings: list[dict]) -> str:
    """Return a table of each policy's mean share of the ceiling, and of mambacache's lead in points."""
    lines = []
    for policy in [key for key in settings[0] if key != "setting"]:
        ahead = [100 * (row["mambacache"] - row[policy]) for row in settings]
        leads = [f"{mean(ahead):.1f}", f"{min(ahead):.1f}", f"{sum(points < -2 for points in ahead)}"]
        share = f"{mean(row[policy] for row in settings):.1%}"
        lines.append([WITH_AGENTS[policy], share, *([""] * 3 if policy == "mambacache" else leads)])
    return markdown(["", "share", "mambacache's lead, mean", "least", "settings more than 2 points behind"], lines)


def fleet_table(result: dict) -> str:
    """Return a table of each routing: hits, wrong predictions by pages and by states too, and times."""
    lines = []
    for row in result["rows"]:
        hits, wrong = f"{row['hit_tokens'] / row['prompt_tokens']:.1%}", [f"{n:,}" for n in row["wrong"].values()]
        times = [f"{row[key]:.2f}" for key in ("mean", "median", "p99")]
        routing = row["routing"] if row["replicas"] > 1 else "none"
        lines.append([str(row["replicas"]), routing, hits, *wrong, *times])
    head = ["replicas", "routing", "hit", "wrong by pages", "wrong by pages and states"]
    return markdown([*head, "seconds to the first token, mean", "median", "99th percentile"], lines)


def tables(figures: dict) -> list[str]:
    """Return the tables of a result; its keys identify the benchmark."""
    if "models" in figures:
        errors = [error_table(figures[part]) for part in ("models", "quantised", "fp8")]
        return [*errors, cut_table(figures["fp8_in_steps_of_128_tokens"])]
    if "budgets" in figures:
        return [agents_table(settings) for settings in figures["budgets"].values()]
    if "runs" in figures:
        return [engine_table(run) for run in figures["runs"]]
    makers = {"policy": replay_table, "workload": engine_table, "first_token_median": serving_table, "op": kernel_table}
    makers["routing"] = fleet_table
    return [make(figures) for key, make in makers.items() if key in figures["rows"][0]]


def main() -> None:
    print(*tables(json.loads(Path(sys.argv[1]).read_text())), sep="\n\n")


if __name__ == "__main__":
    main()
