"""sweep.py warm I N | sweep.py time OUT: variants of the portable prefill, in override.py's process."""
import itertools, json, sys, time
from functools import partial
import torch
from gpu_timing import graph_us
from kernel_workloads import DeltaRule, KimiDelta, StateSpaceDual
from mambacache.kernels.gpu.common import knobs
from mambacache.kernels.gpu.common.launch import Launcher
from mambacache.kernels.gpu.gated_delta_rule import prefill_triton as g
from mambacache.kernels.gpu.kda import prefill_triton as k
from mambacache.kernels.gpu.ssd import prefill_triton as s

CASES = {"64x128": [128] * 64, "8x1024": [1024] * 8, "1x8192": [8192]}
TILES = ["16,4", "32,4", "32,8", "64,4", "64,8", "128,8"]
def grid(**lists):
    return [dict(zip(lists, v)) for v in itertools.product(*lists.values())]
PREP_G = grid(PW=[4, 8], PR=[255, 168, 128], SQ=[0, 1])
SCAN_G = grid(TILE=TILES, ST=[1, 2, 3], SR=[255], ONE=[0]) + grid(TILE=["16,4", "32,4"], ST=[1, 2, 3], SR=[168], ONE=[0]) + grid(TILE=["32,8", "64,8", "16,4"], ST=[2], SR=[128], ONE=[0]) + grid(TILE=["32,4", "64,8", "32,8"], ST=[2], SR=[255], ONE=[1])
PREP_K = grid(KC=[16, 32, 64, 128], PW=[4, 8], PR=[255]) + grid(KC=[16, 32], PW=[4, 8], PR=[168])
SCAN_K = SCAN_G
PREP_S = grid(PW=[2, 4, 8], SH=[4, 8, 16], PR=[255]) + grid(PW=[4], SH=[4, 8], PR=[128])
SCAN_S = grid(SP=[16, 32, 64], SW=[4, 8], ST=[1, 2, 3], SR=[255]) + grid(SP=[16, 32, 64], SW=[4], ST=[2, 3], SR=[168, 128]) + grid(SP=[64, 32], SW=[8], ST=[2], SR=[128])
WORK = [("gdn", DeltaRule, "prepare", g.prepare, PREP_G), ("gdn", DeltaRule, "scan", g.scan, SCAN_G),
        ("kda", KimiDelta, "prepare", k.prepare, PREP_K), ("kda", KimiDelta, "scan", k.scan, SCAN_K),
        ("ssd", StateSpaceDual, "prepare", s.prepare, PREP_S), ("ssd", StateSpaceDual, "scan", s.scan, SCAN_S)]
ONLY = None
call = Launcher.__call__
def only(self, *a, **o):
    if ONLY is None or self is ONLY:
        return call(self, *a, **o)
Launcher.__call__ = only

def main():
    global ONLY
    if sys.argv[1] == "warm":
        i, n = map(int, sys.argv[2:4])
        cache, jobs = {}, [(op, make, part, launcher, v) for op, make, part, launcher, vs in WORK for v in vs]
        for op, make, part, launcher, v in jobs[i::n]:
            ONLY = launcher
            for name in (["8x1024", "1x8192"] if part == "scan" else ["8x1024"]):
                if (op, name) not in cache:
                    cache[op, name] = make(CASES[name])
                knobs.SET.clear(); knobs.SET.update(v)
                try:
                    cache[op, name].ours()
                except Exception as e:
                    print(op, part, v, repr(e)[:100])
        torch.cuda.synchronize()
        return
    rows = []
    for op, make, part, launcher, vs in WORK:
        for name, lengths in CASES.items():
            sets = [make(lengths) for _ in range(3)]
            for v in [{}, *vs]:
                knobs.SET.clear(); knobs.SET.update(v)
                ONLY = None if not v else launcher
                try:
                    us = graph_us([x.ours for x in sets], 5)
                except Exception as e:
                    us, e = float("inf"), print(op, part, v, repr(e)[:100])
                rows.append({"op": op, "part": part if v else "all", "case": name, "us": us, **v})
            del sets
            torch.cuda.empty_cache()
            best = sorted((r for r in rows if r["op"] == op and r["case"] == name and r["part"] == part), key=lambda r: r["us"])
            whole = next(r["us"] for r in rows if r["op"] == op and r["case"] == name and r["part"] == "all")
            print(op, part, name, f"all {whole:.0f}", *(f"| {r['us']:.0f} " + ",".join(f"{a}{b}" for a, b in r.items() if a.isupper()) for r in best[:6]), flush=True)
        json.dump(rows, open(sys.argv[2], "w"))
main()
