"""The routed experts for few rows, where every active expert takes all of them, and for many, sorted into blocks by expert.

How a matrix [E, N, K] is stored, which the dtype of its values tells:
    plain   values [E, N, K] in x's dtype
    fp8     (float8_e4m3fn [E, N, K], fp32 scale [E, R, ceil(K / 128)]), one scale a tile of 128 x 128. R is ceil(N / 128), or twice
            ceil(I / 128) for w13, whose gate and up rows were tiled apart
    int4    (int16 [E, ceil(K / B), N, B / 4], bf16 scale [E, ceil(K / B), N, B / 32]), B = 128 or 64 inputs: a program's tile of rows lies
            in one piece, so that the L2 cache is asked for whole lines. Unit 8 g + r of a row in a block holds q + 8 of its input
            32 g + 8 j + r in bits 4 j to 4 j + 3: a 32-bit register holds four pairs of neighbours in K, under one scale (weights/quant.py
            packs; past K the scale is 0)
"""
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minispec.kernels.experts import active_list, down, up
from minispec.kernels.fused_linear import fused_linear
from minispec.kernels.jit import INTERPRET, jit, pdl, power_of_two, tl, use_triton
from minispec.kernels.linear import linear

FEW = 16        # rows up to which every active expert takes all of them


@jit
def _order(p_ids, p_start, p_order, p_place, pairs, TOPK: tl.constexpr, C: tl.constexpr):
    """Counting sort of the pairs (row, choice) by expert, one expert a program, and one for pairs that nobody here takes (E): its first
    place, its pairs in order of rows, and for each row its places by ascending expert."""
    e = tl.program_id(0)
    less = 0
    for c in range(0, pairs, C):
        i_p = c + tl.arange(0, C)
        less += tl.sum((tl.load(p_ids + i_p, mask=i_p < pairs, other=2**30) < e).to(tl.int32), 0)
    tl.store(p_start + e, less)
    for c in range(0, pairs, C):
        i_p = c + tl.arange(0, C)
        mine = tl.load(p_ids + i_p, mask=i_p < pairs, other=2**30) == e
        place = less + tl.cumsum(mine.to(tl.int32), 0) - 1
        rank = tl.zeros((C,), tl.int32)
        for k in range(TOPK):
            other = tl.load(p_ids + i_p // TOPK * TOPK + k, mask=mine, other=2**30)
            rank += ((other < e) | (other == e) & (k < i_p % TOPK)).to(tl.int32)       # a row may have several that nobody takes
        tl.store(p_order + place, i_p, mask=mine)
        tl.store(p_place + i_p // TOPK * TOPK + rank, place, mask=mine)
        less += tl.sum(mine.to(tl.int32), 0)


@jit
def _gather(p_part, p_place, p_start, p_base, p_out, rows, E: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, SORTED: tl.constexpr,
            BASE: tl.constexpr, BH: tl.constexpr):
    """A row's parts, summed in order: part [PARTS, rows, H], or where p_place says."""
    i_row, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    out = tl.zeros((BH,), tl.float32)
    for k in tl.static_range(PARTS):
        at = tl.load(p_place + i_row * PARTS + k).to(tl.int64) if SORTED else k * rows + i_row
        width = tl.where(at < tl.load(p_start + E), H, 0) if SORTED else H        # places past every expert's hold what nobody here takes
        out += tl.load(p_part + at * H + i_h, mask=i_h < width, other=0.0)
    if BASE:
        out += tl.load(p_base + i_row * H + i_h, mask=i_h < H, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * H + i_h, out.to(p_out.dtype.element_ty), mask=i_h < H)


class Config(NamedTuple):
    """Of each product (BN, BK, SPLIT, stages, registers a thread or None), a warp a SPLIT; `parts` ranges of I, summed by another
    launch. BK (for int4 the stored block's instead), SPLIT and parts set the order of sums: they never depend on the rows. The others may."""
    up: tuple
    down: tuple
    parts: int = 1


def configure(kind, hidden, inter, rows):
    if kind == "float32":
        return Config((16, 64, 2, 1, None), (16, 64, 2, 1, None))
    if kind == "int4" and hidden % 512 == inter % 2048 == 0:
        return Config((64, 128, 2, 3, None), (128 if rows <= 8 else 64, 128, 2, 3, None), 8)
    if kind == "int4" and hidden % 512 == 0:
        return Config((32, 128, 2, 6, 128) if rows == 1 else (64, 128, 2, 3, None), (32, 128, 2, 6, 128))
    return Config((32, 64, 4, 4, None), (16 if rows == 1 and hidden < 1024 else 32, 64, 4, 4, None), 4 if inter % 1024 == 0 else 1)


def moe(x, w13, w2, ids, weights, base=None, shared=None, config=None):
    """sum over a row's experts of weight * down(silu(gate x) * up x), plus inner @ down.T of shared = (inner [N, J], down [h, J]).

    x [N, h]; w13 [E, 2I, h], gate rows first; w2 [E, h, I], both stored in one of the forms above; ids int64 (E: an expert that is not
    here), weights fp32 [N, k]; all contiguous. Returns fp32 [N, h], or with base [N, h] that plus the sum, in base's dtype. Experts are
    summed in ascending order, so the result does not depend on the order in which top-k returned them, and up to FEW rows not on the
    other rows.
    """
    if not use_triton(x):
        return moe_ref(x, w13, w2, ids, weights, base, shared)
    (v13, s13), (v2, s2) = (w if isinstance(w, tuple) else (w, w) for w in (w13, w2))
    (rows, hidden), topk, experts, inter = x.shape, ids.shape[1], v13.shape[0], v13.shape[-2] // 2
    kind = {torch.int16: "int4", torch.float8_e4m3fn: "fp8"}.get(v13.dtype, "plain")
    out = torch.empty_like(base) if base is not None else x.new_empty(x.shape, dtype=torch.float32)
    if not rows:
        return out
    tiny = inter * hidden <= 2**18 and topk <= 8        # launches, not bytes, are what such experts cost
    small = tiny and rows <= FEW
    config = config or configure("float32" if x.dtype == torch.float32 else kind, hidden, inter, rows)
    (bn, bk, split, stages, registers), (bn2, bk2, split2, stages2, registers2), parts = config
    if kind == "int4":
        bk, bk2 = 4 * v13.shape[-1], 4 * v2.shape[-1]
    if shared is not None and not (small and base is not None and shared[0].shape[1] <= split2 * bk2):
        base, shared = fused_linear(*shared, residual=base), None
        out = torch.empty_like(base)
    pairs, many, all_rows = rows * topk, rows > FEW, 8 if rows <= 8 else 16
    block, block2 = (32 if pairs > 16 * experts else 16,) * 2 if many else (8, all_rows)
    slots = min(pairs, pairs // block + min(experts, pairs)) if many else min(pairs, experts)
    parts = topk if many else 1 if tiny else math.gcd(parts, -(-inter // (split2 * bk2)))
    h = x.new_empty(pairs if many else slots * rows, inter)
    active = start = order = x.new_empty(experts + 1 if many else slots + 1, dtype=torch.int32)
    last = out if parts == 1 and not many else x.new_empty(parts * rows, hidden, dtype=torch.float32)
    dot = tl.float32 if INTERPRET else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(x.dtype, tl.float32)
    common = dict(H=hidden, I=inter, E=experts, EP=power_of_two(experts), SORTED=many, KIND=kind, ASM=dot == tl.bfloat16, DOT=dot,
                  UNIT=2.0**24 if kind == "int4" and dot == tl.bfloat16 else 1.0)
    lists = dict(LIST=small, KP=power_of_two(topk), P=power_of_two(pairs) if small else 1, TOPK=topk)
    overlap = pdl(x) if small else {"PDL": 0}
    if many:
        order, place = x.new_empty(pairs, dtype=torch.int32), x.new_empty(pairs, dtype=torch.int32)
        _order[experts + 1,](ids, start, order, place, pairs, TOPK=topk, C=1024)
    elif not small:
        taken = x.new_empty(slots, all_rows, dtype=torch.float32)
        active_list[slots,](ids, weights, active, taken, rows, E=experts, EP=power_of_two(experts), TOPK=topk, KP=power_of_two(topk),
                            P=power_of_two(pairs), ROWS=all_rows)
    halves = 1 if many else all_rows // block
    up[slots * halves * -(-2 * inter // bn),](
        x, ids, weights if many or small else taken, v13, s13, h, active, start, order, rows, slots, ROWS=all_rows, BM=block, BN=bn, BK=bk,
        SPLIT=split, num_warps=split, num_stages=stages, maxnreg=None if block == 32 or small else registers, **lists, **overlap, **common)
    down[(slots if many else parts) * -(-hidden // bn2),](
        h, v2, s2, *(shared or (None, None)), base, last, active, start, rows, slots,
        SHARED=shared[0].shape[1] if shared else 0, BASE=base is not None and last is out, PARTS=1 if many else parts,
        BM=block2, BN=bn2, BK=bk2, SPLIT=split2, num_warps=split2, num_stages=stages2,
        maxnreg=None if block == 32 or small else registers2, **overlap, **common)
    if last is not out:
        _gather[rows, -(-hidden // 1024)](last, place if many else active, start, base, out, rows, E=experts, H=hidden, PARTS=parts, SORTED=many,
                                          BASE=base is not None, BH=1024)
    return out


def dequantize(w, dtype, inputs, parts=1):
    """A stored matrix as [E, N, K = inputs] of `dtype`; fp8 rows in `parts` that were tiled apart."""
    if not isinstance(w, tuple):
        return w.to(dtype)
    values, scale = w[0], w[1].float()
    if values.dtype != torch.int16:
        n, k = values.shape[1:]
        full = scale.repeat_interleave(128, 2)[..., :k].unflatten(1, (parts, -1)).repeat_interleave(128, 2)[:, :, :n // parts]
        return (values.float() * full.flatten(1, 2)).to(dtype)
    units = values.unflatten(-1, (-1, 1, 8)).int()                                                     # [E, block, N, group, 1, 8]
    quants = ((units >> torch.arange(0, 16, 4, device=units.device)[:, None]) & 15) - 8                # [E, block, N, group, 4, 8]
    return (quants.flatten(-2) * scale[..., None]).flatten(-2).transpose(1, 2).flatten(2)[..., :inputs].to(dtype)


def moe_ref(x, w13, w2, ids, weights, base=None, shared=None, config=None):
    """The same in PyTorch."""
    if shared is not None:
        base = linear(*shared) if base is None else base + linear(*shared)
    inter = (w13[0] if isinstance(w13, tuple) else w13).shape[-2] // 2
    w13, w2 = dequantize(w13, x.dtype, x.shape[1], 2), dequantize(w2, x.dtype, inter)
    experts, rows = w2.shape[0], x.shape[0]
    dense = weights.new_zeros(rows, experts + 1).scatter_(1, ids, weights)[:, :experts]                # [N, E]
    active = sorted(set(ids.flatten().tolist()) - {experts})
    if not active or rows > FEW:
        out = x.new_zeros(x.shape, dtype=torch.float32)
        for e in active:
            taken = dense[:, e].nonzero().flatten()
            gate, up = linear(x[taken], w13[e]).chunk(2, -1)
            out[taken] += linear(F.silu(gate).mul_(up), w2[e]).float() * dense[taken, e, None]
        return out if base is None else (base + out).to(base.dtype)
    if whole := 2 * len(active) >= experts and rows > 1:
        # most experts wanted: all of them as two products (w2 lies in memory as [E, I, h]); on the CPU 2.4 times as fast at 7 rows
        both = linear(x, w13.flatten(0, 1)).unflatten(1, (experts, -1))                                # [N, E, 2I]
    else:
        both, dense = torch.stack([linear(x, w13[e]) for e in active], 1), dense[:, active]
    gate, up = both.chunk(2, -1)
    inner = (F.silu(gate) * dense[..., None] * up).to(x.dtype)      # fp32 from the weight on: fp16 could make inf, and inf * 0 is NaN
    out = (linear(inner.flatten(1), w2.mT.flatten(0, 1).T).float() if whole else
           torch.stack([linear(part, w2[e]) for part, e in zip(inner.unbind(1), active)]).sum(0, dtype=torch.float32))
    return out if base is None else (base + out).to(base.dtype)
