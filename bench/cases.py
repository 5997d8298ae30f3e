"""What bench/kernels.py runs: every kernel of kernels/ at Kimi-K2.5's shapes and at the default pair's, each with its bound and its check."""
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Callable

import torch
import torch.nn.functional as F

from minispec import SamplingParams
from minispec.kernels import accept, fused_linear as fused, moe, noise, project, route, tree_attention
from minispec.kernels.choose import Sampling, choose
from minispec.kernels.draft_logits import draft_logits
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


# fused_linear and project: what stands between the others

def linear_cases():
    """Kimi-K2.5's matrices, and the default pair's: columns, inputs, and what goes with them."""
    shapes = ("qkv_a", 2112, 7168, "norm"), ("q_b", 12288, 1536, "norm"), ("o", 7168, 8192, "residual"), ("shared gate_up", 4096, 7168, "swiglu"), (
        "dense down", 7168, 18432, "residual"), ("draft fc", 7168, 21504, ""), ("default qkv_a", 352, 384, "norm"), (
        "default o", 384, 384, "residual"), ("default dense", 2048, 384, "swiglu")
    for name, columns, depth, extra in shapes:
        for rows in (1, 8, 16):
            yield linear(f"fused_linear {name} {rows}x{columns}x{depth} {extra}".rstrip(), rows, columns, depth, extra)
            if not extra or rows == 8:
                yield linear(f"torch linear {name} {rows}x{columns}x{depth}", rows, columns, depth, "", torch_own=True)
    for name, heads, rank, rope, nope, value in (("kimi", 64, 512, 64, 128, 128), ("default", 6, 128, 32, 32, 64)):
        for rows in (1, 8):
            yield lift(f"latent_lift {name} {rows} rows", rows, heads, rank, nope, value)


def linear(name, rows, columns, depth, extra, torch_own=False):
    def build():
        sets = [(normal(1, rows, depth), normal(columns, depth) / depth**0.5, torch.rand(depth, device="cuda").bfloat16() + 0.5,
                 normal(1, rows, columns)) for _ in range(count(columns * depth * 2))]
        x, weight, norm, residual = (part.double() for part in sets[0])
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm if extra in ("norm", "swiglu") else x
        expected = x @ weight.T
        if extra == "swiglu":
            gate, up = expected.chunk(2, -1)
            expected = F.silu(gate) * up
        expected = expected + residual if extra == "residual" else expected

        def call(x, weight, norm, residual, config=None):
            if torch_own:
                return F.linear(x, weight)
            return fused.fused_linear(x, weight, norm if extra in ("norm", "swiglu") else None, 1e-6, swiglu=extra == "swiglu",
                                      residual=residual if extra == "residual" else None)
        return SimpleNamespace(sets=sets, call=call, error=lambda out: rms(out, expected))
    return Case(name, columns * depth * 2, build)


def lift(name, rows, heads, rank, nope, value, splits=16):
    def build():
        kv_b = normal(heads, nope + value, rank) / rank**0.5
        sets = [(torch.randn(splits, 1, rows, heads, rank, device="cuda"), torch.randn(splits, 1, rows, heads, device="cuda"), kv_b)
                for _ in range(count(splits * rows * heads * rank * 4))]
        part, lse, _ = sets[0]
        merged = ((lse - lse.amax(0)).exp2()[..., None] * part).double().sum(0) / (lse - lse.amax(0)).exp2().double().sum(0)[..., None]
        expected = torch.einsum("brhk,hvk->brhv", merged, kv_b[:, nope:].double()).flatten(2)
        return SimpleNamespace(sets=sets, call=lambda part, lse, kv_b, config=None: project.latent_lift(part, lse, kv_b, nope),
                               error=lambda out: rms(out, expected))
    return Case(name, splits * rows * heads * rank * 4 + heads * value * rank * 2, build)
