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
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Callable

import torch
import torch.nn.functional as F
import triton
from triton.runtime.errors import OutOfResources

from minispec import SamplingParams
from minispec.kernels import accept, head, moe, noise, route, tree_attention
from minispec.kernels.choose import Sampling, choose
from minispec.kernels.draft_logits import draft_logits
from minispec.kernels.jit import jit, tl
from minispec.kernels.view import View

BANDWIDTH, FLOPS = 4.3e12, 790e12       # one H200: a large copy, reads and writes counted; bf16 matrix product on random data
K = 1024
STORED = {"int4": 0.5 + 2 / 32, "fp8": 1 + 4 / 128**2, "bf16": 2}      # bytes a weight
KIMI, DEFAULT = dict(hidden=7168, experts=384, topk=8), dict(hidden=384, experts=16, topk=4)


@dataclass
class Case:
    """build() -> sets (inputs that take turns), call(*inputs, config=), error(call's result for sets[0]), and with a sweep `default` and
    `variants(best)`: lists of configs, each made from the best of those before it. limit: relative error allowed."""
    name: str
    bytes: float
    build: Callable
    target: float | None = None
    flops: float = 0
    limit: float = 1e-2

    @property
    def bound(self):
        return 1e6 * max(self.bytes / BANDWIDTH, self.flops / FLOPS)


def rms(found, expected):
    return ((found.double() - expected.double()).square().mean().sqrt() / expected.double().square().mean().sqrt()).item()


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def count(each, least=3, most=96):
    """Sets that together exceed 180 MB, more than three times L2."""
    return max(least, min(most, -(-180_000_000 // int(each))))


# tree_attention

def attention_cases():
    mla, gqa = dict(kv=1, dk=576, dv=512, first=0), dict(kv=8, dk=128, dv=128, first=128)
    targets = {(64, 1, 8): 14, (64, 1, 32): 20, (64, 1, 128): 48, (64, 8, 8): 28, (64, 16, 8): 47, (64, 8, 32): None, (64, 64, 8): None}
    targets |= {(8, rows, context): us for rows in (1, 4, 8) for context, us in ((8, 10), (32, 18), (128, 45))}
    for (heads, rows, context), target in targets.items():
        yield attention(f"mla {heads} heads, {rows} rows, {context}k", heads, rows, context * K, **mla, target=target)
    for rows, context in ((1, 8), (8, 8), (1, 32), (8, 32)):
        yield attention(f"mla 64 heads, {rows} rows, {context}k, exact", 64, rows, context * K, **mla, exact=True)
    yield attention("mla 64 heads, 1 row, 8k in a bucket of 128k", 64, 1, 8 * K, **mla, extent=128 * K)
    yield attention("mla 64 heads, 4 requests of 7 rows, 8k", 64, 7, 8 * K, **mla, batch=4)
    yield attention("mla 64 heads, prefill 256 rows, 8k", 64, 256, 8 * K, **mla, chain=True)
    for rows in (1, 4, 8):
        yield attention(f"draft gqa 64/8 x 128, {rows} rows, 8k", 64, rows, 8 * K, **gqa)
    for rows, context in ((7, 200), (7, K), (1, K)):
        yield attention(f"default pair: mla 6 heads, {rows} rows, {context}", 6, rows, context, kv=1, dk=160, dv=128, first=0)
    yield attention("default draft: gqa 6/2 x 64, 4 rows, 1k", 6, 4, K, kv=2, dk=64, dv=64, first=64)


def attention(name, heads, rows, context, kv, dk, dv, first, target=None, batch=1, extent=None, exact=False, chain=False, page=16):
    width, tokens, pairs = max(dk, first + dv), (context + rows) * batch, batch * rows * heads

    def build():
        pages, sets = -(-(context + rows) // page), count(tokens * kv * width * 2, most=64)
        cache, order = normal(sets * batch * pages * page, kv, width), torch.randperm(sets * batch * pages, device="cuda")
        reach = (extent or context) + rows
        table = F.pad(order.view(sets, batch, pages), (0, -(-reach // page) - pages))
        base, word = torch.full((batch,), context, device="cuda"), [1]
        for row in range(1, rows):
            word.append(word[torch.randint(0, row, ()).item()] | (1 << row if row < 63 else -2**63))
        prefix = (context + 1 + torch.arange(rows, device="cuda")).repeat(batch, 1) if chain else base[:, None].expand(batch, rows)
        words = torch.zeros_like(prefix) if chain else torch.tensor(word, device="cuda").repeat(batch, 1)
        view, q = View(table[0], page, prefix, base, words, reach, exact), normal(sets, batch, rows, heads, dk)
        values = slice(first, first + dv)
        inputs = [(q[i], cache, replace(view, table=table[i]), dk**-0.5, values) for i in range(sets)]
        q0, _, view0, scale, _ = inputs[0]
        expected = tree_attention.tree_attention_ref(q0, cache, replace(view0, extent=context + rows), scale, values)
        processors, hopper = tree_attention._machine(q.device)
        fits = hopper is not None and first == 0 and dv in (256, 512) and dk - dv == 64
        default = tree_attention.configure(batch, rows, heads, kv, dk, dv, reach, exact, 2, processors, fits)

        def variants(c):
            yield [c, *(c._replace(pdl=n) for n in (0, 1, 2))]      # the first of a process meets cold clocks
            yield [c._replace(N=32)] if not c.stages else [c._replace(M=M, N=N, warps=warps, stages=stages) for M in sorted({c.M, 16, 32, 64})
                                                           for N, warps, stages in ((64, 4, 2), (64, 4, 3), (64, 8, 3), (32, 4, 3))]
            yield [] if exact else [c._replace(splits=max(1, round(c.splits * f))) for f in (0.5, 0.67, 0.8, 1.25, 1.5, 2)]
        return SimpleNamespace(sets=inputs, call=tree_attention.tree_attention, error=lambda out: rms(out, expected), default=default,
                               variants=variants)
    return Case(name, 2 * (tokens * kv * width + pairs * (dk + dv)), build, target, 2 * pairs * (context + rows) * (dk + dv))


# moe and route

def moe_cases():
    for name, inter, targets in (("whole", 2048, (68, 224, 425, 840)), ("tp8", 256, (15, 37, 63, 118))):
        for rows, target in zip((1, 4, 8, 16), targets):
            yield experts(f"int4 {name} {rows} rows", "int4", rows, inter, **KIMI, target=target)
    for rows in (1, 4, 8, 16):
        yield experts(f"bf16 whole {rows} rows", "bf16", rows, 2048, **{**KIMI, "experts": 192}, target=None if rows == 1 else rows * 164 / 0.9)
    for name, inter, total in (("whole", 2048, 192), ("tp8", 256, 384)):
        for rows in (1, 8):
            yield experts(f"fp8 {name} {rows} rows", "fp8", rows, inter, **{**KIMI, "experts": total})
    for rows in (8, 32, 64, 256):
        yield experts(f"int4 tp8 {rows} rows uniform", "int4", rows, 256, **KIMI, uniform=True)
    for rows in (1, 7, 56):
        yield experts(f"default pair experts {rows} rows uniform", "int4", rows, 192, **DEFAULT, uniform=True)
    for name, shape in (("kimi", KIMI), ("default pair", DEFAULT)):
        for rows in (1, 8, 16, 64):
            yield router(f"route {name} {rows} rows", rows, **shape)


def stored(kind, experts, n, k, parts=1):
    """A random matrix in its stored form, of the size that unit inputs ask for."""
    if kind == "int4":
        block = 64 if k % 128 else 128
        values = torch.randint(-2**15, 2**15, (experts, k // block, n, block // 4), device="cuda", dtype=torch.int16)
        return values, ((torch.rand(experts, k // block, n, block // 32, device="cuda") + 0.5) * 0.2 / k**0.5).bfloat16()
    w = torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn)
    for one in w:
        one.copy_(torch.randn(n, k, device="cuda") / (k**0.5 if kind == "bf16" else 1))
    return w if kind == "bf16" else (w, (torch.rand(experts, parts * -(-n // parts // 128), -(-k // 128), device="cuda") + 0.5) / k**0.5)


def experts(name, kind, rows, inter, hidden, experts, topk, target=None, uniform=False):
    """Balanced routing takes rows * topk distinct experts, others in each set; uniform routing draws them, and the bound counts the mean."""
    each = 3 * hidden * inter * STORED[kind]
    distinct = experts * (1 - (1 - topk / experts) ** rows) if uniform else min(rows * topk, experts)

    def build():
        weights = [(stored(kind, experts, 2 * inter, hidden, 2), stored(kind, experts, hidden, inter))
                   for _ in range(count(distinct * each) if experts * each < 2e8 else 1)]
        order, sets = torch.randperm(experts, device="cuda"), []
        for i in range(count(distinct * each, most=48)):
            ids = (torch.rand(rows, experts, device="cuda").topk(topk).indices if uniform else
                   order[(i * rows * topk + torch.arange(rows * topk, device="cuda")) % experts].view(rows, topk))
            sets.append((normal(rows, hidden), *weights[i % len(weights)], ids, torch.rand(rows, topk, device="cuda")))
        x, w13, w2, ids, share = sets[0]
        expected, one = torch.zeros(x.shape, device="cuda"), lambda w, e: (w[0][e:e + 1], w[1][e:e + 1]) if isinstance(w, tuple) else w[e:e + 1]
        for e in ids.unique().tolist():
            row, k = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[row].float() @ moe.dequantize(one(w13, e), torch.float32, hidden, 2)[0].T).chunk(2, 1)
            expected[row] += (F.silu(gate) * up @ moe.dequantize(one(w2, e), torch.float32, inter)[0].T) * share[row, k, None]

        def variants(c):
            small = [(bn, bk, split, stages, None) for bn, bk in ((16, 64), (32, 64), (32, 128)) for split in (1, 2, 4) for stages in (3, 6)]
            large = [(bn, 128, split, stages, registers) for bn in (32, 64, 128) for split, stages, registers in (
                (4, 3, None), (4, 3, 128), (4, 4, 128), (2, 3, None), (2, 4, 128), (2, 6, 128), (4, 2, 96))]
            shapes = small if hidden < 1024 else large
            yield [c._replace(up=one) for one in shapes]
            yield [c._replace(down=one, parts=n) for one in shapes for n in ((8, 4) if inter > 1024 else (1,))]
        return SimpleNamespace(sets=sets, call=moe.moe, error=lambda out: rms(out, expected), variants=variants,
                               default=moe.configure("plain" if kind == "bf16" else kind, hidden, inter, rows))
    return Case(name, distinct * each + rows * (6 * hidden + 4 * topk * inter), build, target, rows * topk * 6 * hidden * inter)


def router(name, rows, hidden, experts, topk):
    """17 routers, 190 MB of Kimi's. error: the share of rows whose experts or weights differ from torch's."""
    options = dict(scoring="sigmoid", topk=topk, groups=1, topk_groups=1, group_top=2, normalise=True, scaling=2.5)

    def build():
        sets = [(normal(rows, hidden), normal(experts, hidden, dtype=torch.float32) / hidden**0.5, normal(experts, dtype=torch.float32) * 0.1)
                for _ in range(17)]
        dense = lambda found: torch.zeros(rows, experts, device="cuda").scatter_(1, *found)            # noqa: E731
        expected = dense(route.route_ref(*sets[0], **options))
        return SimpleNamespace(sets=sets, call=lambda *inputs, config=None: route.route(*inputs, **options),
                               error=lambda out: 1 - ((dense(out) - expected).abs() < 1e-4).all(1).double().mean().item())
    return Case(name, experts * hidden * 4 + rows * hidden * 2, build)


# draft_logits and choose, accept and move

def head_cases(hidden=7168):
    for rows, temperature, topk in ((1, 0, 4), (4, 0, 4), (8, 0, 4), (16, 0, 4), (1, 0.8, 4), (8, 0.8, 4), (8, 0.8, 16)):
        target = 122 if rows <= 8 and topk == 4 else None
        yield best("draft_logits", rows, 32000, hidden, temperature, topk, target)
        if not temperature:
            yield best("torch linear, log_softmax, topk, gather", rows, 32000, hidden, 0, topk, chain=True)
    for rows, temperature in ((1, 0), (8, 0), (16, 0), (64, 0), (8, 0.8)):
        yield best("choose", rows, 163840, hidden, temperature, 1, 565 if rows == 8 else None)
    yield best("default pair: draft_logits", 4, 3072, 384, 0, 4)
    yield best("default pair: choose", 7, 4096, 384, 0, 1)


def best(name, rows, vocab, hidden, temperature, topk, target=None, chain=False):
    """error: that of the log-probabilities (the order of a bf16 sum: 1e-5), or 1 where a score is 1e-4 short of the best in float64."""
    def build():
        sampling = Sampling.build([SamplingParams(temperature=float(temperature), seed=7)], [[1]], [[]], vocab, "cuda")
        ids, positions = torch.randperm(2 * vocab, device="cuda")[:vocab], torch.arange(rows, device="cuda")[None] + 1000
        ids = torch.arange(vocab, device="cuda") if "choose" in name else ids
        sets = [(normal(1, rows, hidden), normal(vocab, hidden) * 3 / hidden**0.5) for _ in range(count(vocab * hidden * 2, 2))]
        exact = (sets[0][0].double() @ sets[0][1].double().T / (temperature or 1)).log_softmax(-1)
        noisy = exact + noise.gumbel(sampling.seed[:, None, None], positions[..., None] + 1, ids) if temperature else exact
        back = torch.full((2 * vocab,), 0, device="cuda").scatter_(0, ids, torch.arange(vocab, device="cuda"))

        def call(x, weight, config=None):
            if chain:
                logp = F.linear(x, weight).log_softmax(-1, dtype=torch.float32)
                found = logp.topk(topk, -1).indices
                return ids[found], logp.gather(-1, found)
            if "choose" in name:
                tokens, logp, _ = choose(x, weight, positions, replace(sampling, wants_logprobs=True))
                return tokens[..., None], logp[..., None]
            return draft_logits(x, weight, ids, topk, sampling, positions)

        def error(found):
            short = (noisy.topk(topk, -1).values - noisy.gather(-1, back[found[0]])).abs().max().item()
            return 1.0 if short > 1e-4 and not chain else rms(found[1], exact.gather(-1, back[found[0]]))
        return SimpleNamespace(sets=sets, call=call, error=error)
    return Case(f"{name} {rows}x{vocab}x{hidden} T={temperature:g} k={topk}", vocab * hidden * 2, build, target, limit=1e-2 if chain else 1e-4)


def commit_cases(layers=61, rows=16, width=576, page=16):
    """The path 0, 1, 3, 5, ... of 9 entries, in every layer; sets lie in other pages, so that none is in L2. error: 0 or 1."""
    def build(parts):
        sets, odd = count(layers * rows * width * 2), list(range(1, rows, 2))
        cache = normal(layers, (1 + 3 * sets) * page, 1, width)
        parents = torch.tensor([[0] + [max(0, r - 2) if r % 2 else r - 1 for r in range(1, rows)]], device="cuda")
        words = [1]
        for r, parent in enumerate(parents[0].tolist()[1:], 1):
            words.append(words[parent] | 1 << r)
        choice = torch.arange(rows, device="cuda")[None] + 100
        tokens = choice.gather(1, parents)
        tokens[:, 2::2] = 7                             # the odd rows are one chain, the even ones its wrong leaves
        yes, length = torch.ones_like(choice).bool(), torch.tensor([13], device="cuda")
        tree = tokens, parents, yes, torch.tensor([words], device="cuda"), choice, None, yes
        known = accept.accept_ref(*tree)
        assert known[0][0, :9].tolist() == [0, *odd]

        def call(table, config=None):
            found = accept.accept(*tree) if "accept" in parts else known
            if "move" in parts:
                accept.move(cache, table, page, length, *found[:2])
            return found

        def error(found):
            a, b = cache.clone(), cache.clone()
            accept.move(a, sets_[0][0], page, length, *known[:2])
            accept.move_ref(b, sets_[0][0], page, length, *known[:2])
            return float(not (torch.equal(a, b) and all(map(torch.equal, found[:3], known[:3]))))
        sets_ = [(torch.arange(1 + 3 * s, 4 + 3 * s, device="cuda")[None],) for s in range(sets)]
        return SimpleNamespace(sets=sets_, call=call, error=error)
    for parts, target in ((("accept",), None), (("move",), None), (("accept", "move"), 20)):
        moved = 2 * layers * 7 * width * 2 if "move" in parts else 8 * rows * 8
        yield Case(f"{' + '.join(parts)} {layers}x{rows}x{width}", moved, lambda parts=parts: build(parts), target)


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
        cases = itertools.chain(commit_cases(), head_cases(), attention_cases(), moe_cases())
        result["rows"] = []
        for case in cases:
            if options.only in case.name:
                result["rows"].append(measure(case, options.sweep))
                torch.cuda.empty_cache()
        result["after: " + query] = clocks()
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    bad = [row["name"] for row in result["rows"] if row["wrong"]]
    sys.exit(f"wrong: {bad}" if bad else 0)


if __name__ == "__main__":
    main()
