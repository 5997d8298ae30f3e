"""The Triton kernels on one GPU: each shape is checked, its bound printed, then timed by graph replay over inputs larger than L2.

    python -m bench.kernels --json bench/results/h200-kernels.json
    python -m bench.kernels --only "int4 tp8" --sweep       launch shapes that may be faster, each checked too; the best a shape last

us: median of a call (p10, p90 beside); bound: bytes / 4.3 TB/s or flops / 790 T, each byte read or written once; error: relative root
mean square against PyTorch in fp32 or fp64; launches: as torch.profiler counts them. Copies and matrix products are timed first.
"""
import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

import torch
import triton
from triton.runtime.errors import OutOfResources

from minispec.bench.cases import K, attention_cases, commit_cases, head_cases, linear_cases, moe_cases, normal
from minispec.kernels import head, noise
from minispec.kernels.jit import jit, tl


@jit
def _noise(p_seed, p_position, p_token, p_out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_out + i, noise.keyed_noise(tl.load(p_seed + i), tl.load(p_position + i), tl.load(p_token + i)))


def check_bits(n=10_000 * K):
    """Noise on the GPU, by Triton and by torch, against the CPU's, bit for bit; and logits of rows in company of 63 others and of fewer."""
    g, out = torch.Generator().manual_seed(2), torch.zeros(n, device="cuda")
    keys = [torch.randint(0, high, (n,), generator=g) for high in (2**63 - 1, 2**31 - 1, 2**31)]
    there, wanted = [x.cuda() for x in keys], noise.gumbel(*keys).view(torch.int32)
    _noise[n // K,](*there, out, K, enable_fp_fusion=False)
    differ = [(x.cpu().view(torch.int32) != wanted).sum().item() for x in (out, noise.gumbel(*there))]
    x, weight = normal(1, 64, 7168), normal(32000, 7168)
    logits = head.head_logits(x, weight)
    rows = {r: (head.head_logits(x[:, :r], weight) != logits[:, :r]).sum().item() for r in (1, 2, 8, 16, 17, 32, 33)}
    print(f"noise: of {n} values {differ[0]} (Triton) and {differ[1]} (torch) differ from the CPU's; logits that differ, by rows: {rows}", flush=True)
    return {"noise_differs": differ, "logits_differ": sum(rows.values())}


def time(call, sets, rounds=21):
    """Median, p10 and p90 of a call in microseconds: replays of a graph that takes each set in turn."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for inputs in sets:                             # each alignment of a pointer compiles anew
            call(*inputs)
    torch.cuda.synchronize()
    graph, repeat = torch.cuda.CUDAGraph(), max(1, 40 // len(sets))
    with torch.cuda.graph(graph):
        for inputs in sets:
            call(*inputs)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
    for start, stop in marks:
        start.record()
        for _ in range(repeat):
            graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = sorted(1e3 * start.elapsed_time(stop) / repeat / len(sets) for start, stop in marks[1:])
    return [times[len(times) // 2], times[len(times) // 10], times[-1 - len(times) // 10]]


def launches(call, inputs):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(*inputs)
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def measure(case, sweep):
    """A dict; with a sweep the best config's, the default's time beside it."""
    print(f"{case.name:<52} bound {case.bound:7.1f}", end="", flush=True)
    built = case.build()

    def one(config):
        call = (lambda *inputs: built.call(*inputs, config=config)) if config else built.call
        poison = [torch.full((size,), float("nan"), device="cuda") for size in (2**26, 2**22, 2**17, 2**12, 2**12)]
        del poison                                      # what an allocation finds is NaN
        error = built.error(call(*built.sets[0]))
        return {"error": error, "config": str(config), "us": time(call, built.sets), "call": call}
    row = default = one(None)
    if sweep and hasattr(built, "variants") and row["error"] <= case.limit:
        chosen, steps = built.default, len(list(built.variants(built.default)))
        for step in range(steps):
            for config in list(built.variants(chosen))[step]:
                try:
                    found = one(config)
                except (OutOfResources, RuntimeError, triton.compiler.CompilationError) as problem:      # one result of a sweep
                    print(f"\n    {config}: {type(problem).__name__} {str(problem)[:90]}", end="")
                    continue
                print(f"\n    {found['us'][0]:8.1f} us  error {found['error']:.1e}  {config}", end="", flush=True)
                if found["error"] <= case.limit and found["us"][0] < row["us"][0]:
                    row, chosen = found, config
        print(f"\n{case.name:<52} default {default['us'][0]:5.1f}", end="")
    us, low, high = (round(value, 2) for value in row.pop("us"))
    row["launches"] = launches(row.pop("call"), built.sets[0])
    row = {"name": case.name, "us": us, "p10": low, "p90": high, "bound_us": round(case.bound, 2), "percent": round(100 * case.bound / us, 1),
           "target_us": case.target, "met": None if case.target is None else us <= case.target, "wrong": not row["error"] <= case.limit, **row}
    print(f"  {us:8.2f} us ({low:.1f}..{high:.1f})  {row['percent']:5.1f} %  target {case.target and round(case.target) or '-':>4}  "
          f"launches {row['launches']}  error {row['error']:.1e}{'  WRONG' if row['wrong'] else ''}", flush=True)
    return row


def ceilings():
    """What this GPU does: bytes a second of a kernel that copies 1 GB (in a graph copy_ would go to the copy engine, 2.7 TB/s), flops a
    second of a bf16 product of 8192 x 8192."""
    x, y, a, b = torch.ones(2**28, device="cuda"), torch.empty(2**28, device="cuda"), normal(8192, 8192), normal(8192, 8192)
    copied, multiplied = time(lambda x: torch.neg(x, out=y), [(x,)])[0], time(torch.matmul, [(a, b)])[0]
    return {"copy_bytes_per_s": 2e6 * 2**30 / copied, "matmul_flops": 2e6 * 8192**3 / multiplied}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.manual_seed(0)
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit"
    clocks = lambda: subprocess.run(["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader"], capture_output=True,   # noqa: E731
                                    text=True, check=True).stdout.strip()
    with torch.inference_mode():
        result = {"command": " ".join(sys.orig_argv[1:]), "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
                  query: clocks(), "ceilings": ceilings(), "bits": check_bits() if not options.only else None}
        print(result["ceilings"], flush=True)
        cases = itertools.chain(attention_cases(), linear_cases(), moe_cases(), head_cases(), commit_cases())
        result["rows"] = []
        for case in cases:
            if options.only in case.name:
                result["rows"].append(measure(case, options.sweep))
                torch.cuda.empty_cache()
                result["after: " + query] = clocks()
                if options.json:        # after every case: a run that is cut short leaves what it has
                    Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    bad = [row["name"] for row in result["rows"] if row["wrong"]]
    sys.exit(f"wrong: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
