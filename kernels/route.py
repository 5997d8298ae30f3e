"""The router: which experts each row takes, and with what weight."""
import torch

from minispec.kernels.fused_linear import FEW, ROWS, column, configure, early, fused_linear, inputs, product, rms_norm, swiglu_store
from minispec.kernels.jit import follow, jit, pdl, power_of_two, tl, use_triton
from minispec.kernels.linear import linear


@jit
def _scores(p_x, p_router, p_part, rows, H: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr):
    """part [split, rows, E] fp32: the dot products over one chunk of H. 8 rows a program always, so that a row's sum has one order."""
    i_e, i_row = tl.program_id(0) * BE + tl.arange(0, BE), tl.program_id(2).to(tl.int64) * 8 + tl.arange(0, 8)
    first = tl.program_id(1) * CHUNK
    acc = tl.zeros((8, BE, BH), tl.float32)
    for h in tl.range(0, CHUNK, BH, num_stages=4):
        i_h = first + h + tl.arange(0, BH)
        w = tl.load(p_router + i_e[:, None] * H + i_h[None, :], mask=(i_e < E)[:, None] & (i_h < H)[None, :], other=0.0)
        x = tl.load(p_x + i_row[:, None] * H + i_h[None, :], mask=(i_row < rows)[:, None] & (i_h < H)[None, :], other=0.0).to(tl.float32)
        acc += w[None, :, :] * x[:, None, :]
    out = p_part + (tl.program_id(1) * rows + i_row)[:, None] * E + i_e[None, :]
    tl.store(out, tl.sum(acc, 2), mask=(i_row < rows)[:, None] & (i_e < E)[None, :])


@jit
def _select(p_part, p_bias, p_live, p_ids, p_weights, rows, scaling, E: tl.constexpr, PARTS: tl.constexpr, SIGMOID: tl.constexpr,
            BIAS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
            TAKEN_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, NORMALISE: tl.constexpr):
    """One row a program; experts as [group, place in the group]."""
    i_row = tl.program_id(0).to(tl.int64)
    i_group, i_place = tl.arange(0, GP), tl.arange(0, SP)
    i_e = i_group[:, None] * (E // GROUPS) + i_place[None, :]
    live = (i_place < E // GROUPS)[None, :] & (i_group < GROUPS)[:, None]
    score = tl.zeros((GP, SP), tl.float32)
    for part in tl.static_range(PARTS):
        score += tl.load(p_part + (part * rows + i_row) * E + i_e, mask=live, other=0.0)
    _take(score, p_bias, p_live, p_ids, p_weights, i_row, scaling, E, SIGMOID, BIAS, K, KP, GROUPS, GP, SP, TAKEN_GROUPS, GROUP_TOP, NORMALISE)


@jit
def _take(score, p_bias, p_live, p_ids, p_weights, i_row, scaling, E: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, K: tl.constexpr,
          KP: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr, TAKEN_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr,
          NORMALISE: tl.constexpr):
    """A row's experts from its scores [GP, SP]. Equal scores give the lowest id, NaN counts as the lowest score."""
    i_group, i_place = tl.arange(0, GP), tl.arange(0, SP)
    i_e = i_group[:, None] * (E // GROUPS) + i_place[None, :]
    live = (i_place < E // GROUPS)[None, :] & (i_group < GROUPS)[:, None]
    if SIGMOID:
        score = 1 / (1 + tl.exp(-score))
    else:
        score = tl.where(live, score, -float("inf"))
        score = tl.exp(score - tl.max(tl.max(score, 1), 0))
        score = score / tl.sum(tl.sum(score, 1), 0)
    key = score
    if BIAS:
        key += tl.load(p_bias + i_e, mask=live, other=0.0)
    key = tl.where(live, tl.where(key > -3e38, key, -3e38), -float("inf"))
    if GROUPS > 1:
        left, value = key, tl.zeros((GP,), tl.float32)
        for _ in tl.static_range(GROUP_TOP):
            best = tl.max(left, 1)
            value += best
            place = tl.min(tl.where(left == best[:, None], i_place[None, :], SP), 1)
            left = tl.where(i_place[None, :] == place[:, None], -float("inf"), left)
        ahead = (value[None, :] > value[:, None]) | ((value[None, :] == value[:, None]) & (i_group[None, :] < i_group[:, None]))
        taken = tl.sum((ahead & (i_group < GROUPS)[None, :]).to(tl.int32), 1) < TAKEN_GROUPS
        key = tl.where(taken[:, None], key, -float("inf"))
    i_k = tl.arange(0, KP)
    ids, weights = tl.zeros((KP,), tl.int32), tl.zeros((KP,), tl.float32)
    for k in tl.static_range(K):
        best = tl.max(tl.max(key, 1), 0)
        e = tl.min(tl.min(tl.where(key == best, i_e, E - 1), 1), 0)
        weight = tl.sum(tl.sum(tl.where((i_e == e) & live, score, 0.0), 1), 0)
        ids, weights = tl.where(i_k == k, e, ids), tl.where(i_k == k, weight, weights)
        key = tl.where(i_e == e, -float("inf"), key)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    if p_live is not None:
        ids = tl.where(tl.load(p_live + i_row) != 0, ids, E)
    tl.store(p_ids + i_row * K + i_k, ids.to(tl.int64), mask=i_k < K)
    tl.store(p_weights + i_row * K + i_k, weights * scaling, mask=i_k < K)


@jit
def _ffn_front(p_x, p_norm, p_gate_up, p_router, p_bias, p_live, p_h, p_inner, p_ids, p_weights, rows, s_x, eps, scaling, N: tl.constexpr,
               BLOCKS: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, HP: tl.constexpr, BH: tl.constexpr, E: tl.constexpr,
               SIGMOID: tl.constexpr, BIAS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr,
               SP: tl.constexpr, TAKEN_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, NORMALISE: tl.constexpr, K: tl.constexpr,
               K1: tl.constexpr, NORM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr,
               PDL: tl.constexpr):
    """The first programs: tiles of the shared expert's gate and up. The others: a row each, its norm, its scores, its experts."""
    if tl.program_id(0) < TILES * BLOCKS:
        tile, i_row = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS * ROWS + tl.arange(0, ROWS)
        i_n = column(tile, N, BN, True)
        w, gains = early(p_gate_up, i_n, p_norm, p_norm, K, K1, NORM, BK, SPLIT)
        follow(PDL)
        acc = product(w, gains, p_x, p_x, p_norm, p_norm, p_gate_up, p_ids, p_ids, i_n, i_row, rows, s_x, s_x, eps, K, K1, NORM, BK, SPLIT, ROWS, DOT,
                      False, False)
        swiglu_store(acc, p_inner, tile, i_row, rows, N, BN, ROWS)
    else:
        T: tl.constexpr = p_h.dtype.element_ty
        i_one, i_h, i_f = (tl.program_id(0) - TILES * BLOCKS).to(tl.int64), tl.arange(0, HP), tl.arange(0, GP * SP)
        i_e = i_f // SP * (E // GROUPS) + i_f % SP
        live, i_b = (i_f % SP < E // GROUPS) & (i_f // SP < GROUPS), tl.arange(0, BH)
        if K <= BH:         # all of it at once: asked for before the previous kernel ends
            router = tl.load(p_router + i_e[:, None] * K + i_b[None, :], mask=live[:, None] & (i_b < K)[None, :], other=0.0)
            gain = tl.load(p_norm + i_b, mask=i_b < K, other=0.0).to(tl.float32)
        follow(PDL)
        x = tl.load(p_x + i_one * s_x + i_h, mask=i_h < K, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / K + eps)
        score = tl.zeros((GP * SP,), tl.float32)
        for h in tl.static_range(0, K, BH):
            k = h + i_b
            if K > BH:
                router = tl.load(p_router + i_e[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
                gain = tl.load(p_norm + k, mask=k < K, other=0.0).to(tl.float32)
            y = ((tl.load(p_x + i_one * s_x + k, mask=k < K, other=0.0).to(tl.float32) * scale).to(T).to(tl.float32) * gain).to(T)
            tl.store(p_h + i_one * K + k, y, mask=k < K)
            score += tl.sum(router * y.to(tl.float32)[None, :], 1)
        _take(tl.reshape(score, (GP, SP)), p_bias, p_live, p_ids, p_weights, i_one, scaling, E, SIGMOID, BIAS, TOPK, KP, GROUPS, GP, SP,
              TAKEN_GROUPS, GROUP_TOP, NORMALISE)


def ffn_front(x, norm, eps, router, bias, gate_up, exact=False, live=None, **routing):
    """What a layer of experts starts with: the norm, `route` and the shared expert's first product, in one launch where the router is small.

    x [N, h]; norm [h]; gate_up [2I, h], gate rows first, or None; router, bias, live, routing: as of `route`.
    Returns normed [N, h], ids int64 and weights fp32 [N, topk], and silu(gate) * up [N, I] or None.
    """
    (rows, hidden), experts = x.shape, len(router)
    if not use_triton(x) or rows > FEW or router.numel() > 2**15:
        return ffn_front_ref(x, norm, eps, router, bias, gate_up, exact, live, **routing)
    h, topk = torch.empty(x.shape, dtype=x.dtype, device=x.device), routing["topk"]
    ids, weights = x.new_empty(rows, topk, dtype=torch.int64), x.new_empty(rows, topk, dtype=torch.float32)
    inner = None if gate_up is None else x.new_empty(rows, len(gate_up) // 2)
    if not rows:
        return h, ids, weights, inner
    c = configure(0 if gate_up is None else len(gate_up), hidden, x.element_size())
    tiles, blocks, groups = 0 if inner is None else -(-inner.shape[1] // (c.BN // 2)), -(-rows // ROWS), routing["groups"]
    padded = power_of_two(groups), power_of_two(experts // groups)
    _ffn_front[tiles * blocks + rows,](
        # without a shared expert its programs are not launched, but are compiled
        x, norm, gate_up if tiles else x, router, bias, live, h, inner if tiles else h, ids, weights, rows, x.stride(0), eps, routing["scaling"],
        N=inner.shape[1] if tiles else 0,
        BLOCKS=blocks, TILES=tiles, BN=c.BN, HP=power_of_two(hidden), BH=max(16, min(power_of_two(hidden), 2**13 // (padded[0] * padded[1]))),
        E=experts, SIGMOID=routing["scoring"] == "sigmoid", BIAS=bias is not None, TOPK=topk, KP=power_of_two(topk), GROUPS=groups,
        GP=padded[0], SP=padded[1], TAKEN_GROUPS=routing["topk_groups"], GROUP_TOP=routing["group_top"], NORMALISE=routing["normalise"],
        **inputs(c, hidden, hidden, norm, None, x.dtype), num_warps=c.SPLIT, num_stages=c.stages, **pdl(x))
    return h, ids, weights, inner


def ffn_front_ref(x, norm, eps, router, bias, gate_up, exact=False, live=None, **routing):
    h = rms_norm(x, norm, eps)
    return h, *route(h, router, bias, live, **routing), None if gate_up is None else fused_linear(h, gate_up, swiglu=True, exact=exact)


def route(x, router, bias, live=None, *, scoring, topk, groups, topk_groups, group_top, normalise, scaling):
    """Which experts each row takes, and with what weight (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; V2's softmax routing too).

    x [N, h]; router fp32 [E, h]; bias fp32 [E] or None: it steers the selection only, never the weight. live bool [N] or None: a row that is not
    takes E, an expert that nobody has. A group's score is the sum of its
    `group_top` best experts (2 in V3, 1 in V2); outside the topk_groups best groups no expert is taken.
    Returns ids int64 [N, topk], weights fp32 [N, topk], sum-normalised if `normalise`, times `scaling`. All in fp32.
    """
    if not use_triton(x):
        return route_ref(x, router, bias, live, scoring=scoring, topk=topk, groups=groups, topk_groups=topk_groups, group_top=group_top,
                         normalise=normalise, scaling=scaling)
    (rows, hidden), experts = x.shape, router.shape[0]
    ids, weights = x.new_empty(rows, topk, dtype=torch.int64), x.new_empty(rows, topk, dtype=torch.float32)
    if not rows:
        return ids, weights
    chunk = -(-hidden // 1024) * 128        # about 8 parts, summed apart, so that one row keeps many multiprocessors reading
    parts = -(-hidden // chunk)
    part = x.new_empty(parts, rows, experts, dtype=torch.float32)
    _scores[-(-experts // 4), parts, -(-rows // 8)](x, router, part, rows, H=hidden, E=experts, CHUNK=chunk, BE=4, BH=128)
    _select[rows,](part, bias, live, ids, weights, rows, scaling, E=experts, PARTS=parts, SIGMOID=scoring == "sigmoid", BIAS=bias is not None,
                   K=topk, KP=power_of_two(topk), GROUPS=groups, GP=power_of_two(groups), SP=power_of_two(experts // groups),
                   TAKEN_GROUPS=topk_groups, GROUP_TOP=group_top, NORMALISE=normalise, num_warps=1)
    return ids, weights


def route_ref(x, router, bias, live=None, *, scoring, topk, groups, topk_groups, group_top, normalise, scaling):
    """The same in PyTorch."""
    scores = linear(x.float(), router)
    scores = scores.sigmoid() if scoring == "sigmoid" else scores.softmax(-1)
    select = scores if bias is None else scores + bias
    if groups > 1:
        per_group = select.unflatten(-1, (groups, -1))
        best = per_group.topk(group_top, -1).values.sum(-1).topk(topk_groups, -1).indices
        outside = torch.ones_like(per_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        select = per_group.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    ids = select.topk(topk, -1).indices
    weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids if live is None else ids.masked_fill(~live[:, None], len(router)), weights * scaling
