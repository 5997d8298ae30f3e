"""A matrix product of few rows with what stands around it: gathered rows, RMS norms before, SwiGLU or a residual after. One launch.

Such products read their weight and wait: a program holds a few output columns, and each of its warps its own part of K, so that a short
K keeps many loads in flight. Rows come in blocks of ROWS whatever their number, K is cut by the weight's shape alone and summed in a fixed
order: a row has the same bits in any company.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

from minispec.kernels.jit import INTERPRET, follow, jit, pdl, power_of_two, tl, use_triton
from minispec.kernels.linear import linear

ROWS = 16           # of a program
FEW, SMALL = 64, 2**22      # up to FEW rows share a weight of at most SMALL elements, up to ROWS any
WIDE = 1024         # inputs beyond which a norm has a launch of its own: at 2112 x 7168 on an H200 25 us with it inside, 11 + 3 apart


class Config(NamedTuple):
    """BN output columns a program; SPLIT warps, each BK of K a step; Triton's stages. BK and SPLIT set the order of sums."""
    BN: int
    BK: int
    SPLIT: int
    stages: int


def configure(columns, depth, itemsize):
    if itemsize > 2:
        return Config(16, 64, 4, 1)
    if depth <= 1024:       # the whole depth at once: no loop, and the weight is asked for before the previous kernel ends
        split = 4 if depth <= 512 else 8
        return Config(16, max(16, power_of_two(depth) // split), split, 1)
    return Config(16 if columns <= 4096 else 32, 64, 4, 4)


def few(rows, weight, exact=False):
    """Whether a product of this many rows belongs to the kernels of this file; libraries are faster above."""
    return exact or rows <= ROWS or rows <= FEW and weight.numel() <= SMALL


def rms_norm(x, weight, eps):
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; the mean in fp32, the product in x's dtype (as transformers rounds)."""
    if not use_triton(x) or x.shape[-1] > 2**14:
        return rms_norm_ref(x, weight, eps)
    out, rows = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[:-1].numel()
    if rows:
        flat, width = x.flatten(0, -2), x.shape[-1]
        _norm[rows,](flat, weight, out, flat.stride(0), eps, W=width, WP=power_of_two(width), num_warps=4 if width <= 2048 else 8, **pdl(x))
    return out


def rms_norm_ref(x, weight, eps):
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return weight * F.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def fused_linear(x, weight, norm=None, eps=0.0, *, index=None, second=None, norm2=None, residual=None, take=None, swiglu=False, exact=False,
                 config=None):
    """[norm(x), norm2(second)] @ weight.T, then SwiGLU, then + residual.

    x [..., K1], or with index int64 [...] a table [..., K1] whose rows it names; second [..., K - K1], norm2 and both norms optional;
    weight [N, K], with swiglu its gate rows first, N/2 columns come out; residual [..., N]. take int64 [...]: row numbers, flat, of second
    and residual.
    exact: no bit of a row depends on the number of rows. Returns [..., N] in x's dtype.
    """
    shape = (x if index is None else index).shape[: None if index is not None else -1]
    rows = shape.numel()
    if not use_triton(x) or not few(rows, weight, exact):
        return fused_linear_ref(x, weight, norm, eps, index=index, second=second, norm2=norm2, residual=residual, take=take, swiglu=swiglu)
    if weight.shape[1] > WIDE and norm is not None:
        x, index, norm = rms_norm(x if index is None else F.embedding(index, x.flatten(0, -2)), norm, eps), None, None
    if weight.shape[1] > WIDE and norm2 is not None:
        second, norm2 = rms_norm(second, norm2, eps), None
    (columns, depth), width, dtype = weight.shape, x.shape[-1], x.dtype
    columns = columns // 2 if swiglu else columns
    out = torch.empty(*shape, columns, dtype=dtype, device=x.device)
    if not rows:
        return out
    x, second, residual = (None if t is None else t.flatten(0, -2) for t in (x, second, residual))
    c = config or configure(*weight.shape, x.element_size())
    grid = -(-columns // (c.BN // 2 if swiglu else c.BN)), -(-rows // ROWS)
    _linear[grid](x, second, norm, norm2, weight.contiguous(), residual, index, take, out, rows, x.stride(0),
                  0 if second is None else second.stride(0), 0 if residual is None else residual.stride(0), eps,
                  columns, **inputs(c, depth, width, norm, norm2, dtype), INDEX=index is not None, RESIDUAL=residual is not None,
                  TAKE=take is not None, SWIGLU=swiglu, BN=c.BN, num_warps=c.SPLIT, num_stages=c.stages, **pdl(x))
    return out


def inputs(config, depth, width, norm, norm2, dtype):
    """The constants of `product`."""
    return dict(K=depth, K1=width, NORM=(norm is not None) + 2 * (norm2 is not None), BK=config.BK, SPLIT=config.SPLIT, ROWS=ROWS,
                DOT=dot_type(dtype))


def dot_type(dtype):
    """What a product's operands become: their own type, but the interpreter multiplies fp32 alone rightly."""
    return tl.float32 if INTERPRET else {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(dtype, tl.float32)


def fused_linear_ref(x, weight, norm=None, eps=0.0, *, index=None, second=None, norm2=None, residual=None, take=None, swiglu=False,
                     exact=False, config=None):
    x = x if index is None else F.embedding(index, x.flatten(0, -2))
    x = x if norm is None else rms_norm_ref(x, norm, eps)
    second, residual = (t if t is None or take is None else t.flatten(0, -2)[take] for t in (second, residual))
    if second is not None:
        x = torch.cat([x, second if norm2 is None else rms_norm_ref(second, norm2, eps)], -1)
    out = linear(x, weight)
    if swiglu:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if residual is None else residual + out


@jit
def _norm(p_x, p_weight, p_out, s_x, eps, W: tl.constexpr, WP: tl.constexpr, PDL: tl.constexpr):
    T: tl.constexpr = p_out.dtype.element_ty
    i_row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WP)
    weight = tl.load(p_weight + i, mask=i < W, other=0.0).to(tl.float32)
    follow(PDL)
    x = tl.load(p_x + i_row * s_x + i, mask=i < W, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 0) / W + eps)).to(T).to(tl.float32) * weight
    tl.store(p_out + i_row * W + i, x.to(T), mask=i < W)


@jit
def _values(p_x, p_y, k, real, K: tl.constexpr, K1: tl.constexpr):
    """The inputs k [SPLIT, BK] of the rows at p_x and p_y [ROWS]: fp32 [SPLIT, BK, ROWS]."""
    x = tl.load(p_x[None, None, :] + k[:, :, None], mask=(k < K1)[:, :, None] & real[None, None, :], other=0.0).to(tl.float32)
    if K1 < K:
        x += tl.load(p_y[None, None, :] + (k - K1)[:, :, None], mask=((k >= K1) & (k < K))[:, :, None] & real[None, None, :],
                     other=0.0).to(tl.float32)
    return x


@jit
def _gains(k, p_norm, p_norm2, K: tl.constexpr, K1: tl.constexpr, NORM: tl.constexpr):
    """The norms' weights of the inputs k [SPLIT, BK], fp32."""
    first, g = k < K1, tl.full(k.shape, 1.0, tl.float32)
    if NORM % 2:
        g = tl.where(first, tl.load(p_norm + k, mask=first, other=0.0).to(tl.float32), g)
    if NORM // 2:
        g = tl.where(first, g, tl.load(p_norm2 + (k - K1), mask=(k >= K1) & (k < K), other=0.0).to(tl.float32))
    return g


@jit
def _normed(x, k, g, r1, r2, K1: tl.constexpr, NORM: tl.constexpr, T: tl.constexpr):
    """x times its row's factor, rounded to T, times the norm's weight, rounded again."""
    if NORM == 0:
        out = x
    else:
        first, r = k < K1, tl.full(x.shape, 1.0, tl.float32)
        if NORM % 2:
            r = tl.where(first[:, :, None], r1[None, None, :], r)
        if NORM // 2:
            r = tl.where(first[:, :, None], r, r2[None, None, :])
        out = (x * r).to(T).to(tl.float32) * g[:, :, None]
    return out


@jit
def early(p_w, i_n, p_norm, p_norm2, K: tl.constexpr, K1: tl.constexpr, NORM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr):
    """What `product` reads that no kernel writes, to be asked for before `follow`: the weight's rows i_n [BN], [SPLIT, BN, BK], and the norms'
    weights, fp32 [SPLIT, BK]. Where K is cut into steps nothing that it uses."""
    k = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]
    w, g = tl.zeros([1, 1, 1], tl.float32), tl.zeros([1, 1], tl.float32)
    if K <= SPLIT * BK:
        w = tl.load(p_w + i_n.to(tl.int64)[None, :, None] * K + k[:, None, :], mask=(k < K)[:, None, :], other=0.0)
        g = _gains(k, p_norm, p_norm2, K, K1, NORM)
    return w, g


@jit
def product(w, g, p_x, p_y, p_norm, p_norm2, p_w, p_index, p_take, i_n, i_row, rows, s_x, s_y, eps, K: tl.constexpr, K1: tl.constexpr,
            NORM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr, INDEX: tl.constexpr,
            TAKE: tl.constexpr):
    """fp32 [BN, ROWS]: rows i_n [BN] of the weight by rows i_row of the input. w, g: of `early`."""
    T: tl.constexpr = p_x.dtype.element_ty
    BN: tl.constexpr = i_n.shape[0]
    k, real, at = tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :], i_row < rows, i_row.to(tl.int64)
    if K1 < K:
        p_y += (tl.load(p_take + at, mask=real, other=0) if TAKE else at) * s_y
    p_x += (tl.load(p_index + at, mask=real, other=0) if INDEX else at) * s_x
    r1, r2 = tl.full([ROWS], 1.0, tl.float32), tl.full([ROWS], 1.0, tl.float32)
    if K <= SPLIT * BK:
        x = _values(p_x, p_y, k, real, K, K1)
        if NORM % 2:
            r1 = tl.rsqrt(tl.sum(tl.sum(tl.where((k < K1)[:, :, None], x * x, 0.0), 1), 0) / K1 + eps)
        if NORM // 2:
            r2 = tl.rsqrt(tl.sum(tl.sum(tl.where((k >= K1)[:, :, None], x * x, 0.0), 1), 0) / (K - K1) + eps)
        x = _normed(x, k, g, r1, r2, K1, NORM, T).to(T).to(DOT)
        acc = tl.dot(w.to(DOT), x, input_precision="ieee")
    else:
        if NORM:
            s1, s2 = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
            for start in range(0, K, SPLIT * BK):
                x = _values(p_x, p_y, start + k, real, K, K1)
                s1 += tl.sum(tl.sum(tl.where((start + k < K1)[:, :, None], x * x, 0.0), 1), 0)
                s2 += tl.sum(tl.sum(tl.where((start + k >= K1)[:, :, None], x * x, 0.0), 1), 0)
            r1, r2 = tl.rsqrt(s1 / K1 + eps), tl.rsqrt(s2 / max(K - K1, 1) + eps)
        acc, p_w = tl.zeros([SPLIT, BN, ROWS], tl.float32), p_w + i_n.to(tl.int64)[None, :, None] * K
        for start in range(0, K, SPLIT * BK):
            i_k = start + k
            step = tl.load(p_w + i_k[:, None, :], mask=(i_k < K)[:, None, :], other=0.0)
            if NORM == 0 and K1 == K:
                x = tl.load(p_x[None, None, :] + i_k[:, :, None], mask=(i_k < K)[:, :, None] & real[None, None, :], other=0.0)
            else:
                x = _normed(_values(p_x, p_y, i_k, real, K, K1), i_k, _gains(i_k, p_norm, p_norm2, K, K1, NORM), r1, r2, K1, NORM, T).to(T)
            acc = tl.dot(step.to(DOT), x.to(DOT), acc, input_precision="ieee")
    return tl.sum(acc, 0)


@jit
def column(tile, N: tl.constexpr, BN: tl.constexpr, SWIGLU: tl.constexpr):
    """The weight's rows of a tile. SWIGLU: 8 of gate, 8 of up in turns, so that both halves of a product lie in the same threads."""
    i_n = tl.arange(0, BN)
    if SWIGLU:
        return tl.minimum(tile * (BN // 2) + i_n // 16 * 8 + i_n % 8, N - 1) + i_n // 8 % 2 * N
    return tl.minimum(tile * BN + i_n, N - 1)


@jit
def swiglu_store(acc, p_out, tile, i_row, rows, N: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr):
    gate, up = tl.split(tl.permute(tl.reshape(acc, (BN // 16, 2, 8, ROWS)), (0, 2, 3, 1)))
    i_j = tile * (BN // 2) + tl.arange(0, BN // 16)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
    tl.store(p_out + i_row.to(tl.int64)[None, None, :] * N + i_j, (gate / (1 + tl.exp(-gate)) * up).to(p_out.dtype.element_ty),
             mask=(i_row < rows)[None, None, :] & (i_j < N))


@jit
def _linear(p_x, p_y, p_norm, p_norm2, p_w, p_residual, p_index, p_take, p_out, rows, s_x, s_y, s_r, eps, N: tl.constexpr, K: tl.constexpr,
            K1: tl.constexpr, NORM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr,
            INDEX: tl.constexpr, RESIDUAL: tl.constexpr, TAKE: tl.constexpr, SWIGLU: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr):
    tile, i_row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    i_n = column(tile, N, BN, SWIGLU)
    w, g = early(p_w, i_n, p_norm, p_norm2, K, K1, NORM, BK, SPLIT)
    follow(PDL)
    acc = product(w, g, p_x, p_y, p_norm, p_norm2, p_w, p_index, p_take, i_n, i_row, rows, s_x, s_y, eps, K, K1, NORM, BK, SPLIT, ROWS, DOT,
                  INDEX, TAKE)
    if SWIGLU:
        swiglu_store(acc, p_out, tile, i_row, rows, N, BN, ROWS)
    else:
        i_n, at, real = tile * BN + tl.arange(0, BN), i_row.to(tl.int64), i_row < rows
        mask = (i_n < N)[:, None] & real[None, :]
        if RESIDUAL:
            from_row = tl.load(p_take + at, mask=real, other=0) if TAKE else at
            # rounded before it is added, as two separate operations would
            acc = acc.to(p_out.dtype.element_ty).to(tl.float32)
            acc += tl.load(p_residual + from_row[None, :] * s_r + i_n[:, None], mask=mask, other=0.0).to(tl.float32)
        tl.store(p_out + at[None, :] * N + i_n[:, None], acc.to(p_out.dtype.element_ty), mask=mask)
