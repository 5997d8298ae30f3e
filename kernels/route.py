"""The router: which experts each row takes, and with what weight."""
import torch

from minispec.kernels.jit import jit, power_of_two, tl, use_triton
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
def _select(p_part, p_bias, p_ids, p_weights, rows, scaling, E: tl.constexpr, PARTS: tl.constexpr, SIGMOID: tl.constexpr,
            BIAS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, GROUPS: tl.constexpr, GP: tl.constexpr, SP: tl.constexpr,
            TAKEN_GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, NORMALISE: tl.constexpr):
    """One row a program; experts as [group, place in the group]. Equal scores give the lowest id, NaN counts as the lowest score."""
    i_row = tl.program_id(0).to(tl.int64)
    i_group, i_place = tl.arange(0, GP), tl.arange(0, SP)
    i_e = i_group[:, None] * (E // GROUPS) + i_place[None, :]
    live = (i_place < E // GROUPS)[None, :] & (i_group < GROUPS)[:, None]
    score = tl.zeros((GP, SP), tl.float32)
    for part in tl.static_range(PARTS):
        score += tl.load(p_part + (part * rows + i_row) * E + i_e, mask=live, other=0.0)
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
    tl.store(p_ids + i_row * K + i_k, ids.to(tl.int64), mask=i_k < K)
    tl.store(p_weights + i_row * K + i_k, weights * scaling, mask=i_k < K)


def route(x, router, bias, *, scoring, topk, groups, topk_groups, group_top, normalise, scaling):
    """Which experts each row takes, and with what weight (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; V2's softmax routing too).

    x [N, h]; router fp32 [E, h]; bias fp32 [E] or None: it steers the selection only, never the weight. A group's score is the sum of its
    `group_top` best experts (2 in V3, 1 in V2); outside the topk_groups best groups no expert is taken.
    Returns ids int64 [N, topk], weights fp32 [N, topk], sum-normalised if `normalise`, times `scaling`. All in fp32.
    """
    if not use_triton(x):
        return route_ref(x, router, bias, scoring=scoring, topk=topk, groups=groups, topk_groups=topk_groups, group_top=group_top,
                         normalise=normalise, scaling=scaling)
    (rows, hidden), experts = x.shape, router.shape[0]
    ids, weights = x.new_empty(rows, topk, dtype=torch.int64), x.new_empty(rows, topk, dtype=torch.float32)
    if not rows:
        return ids, weights
    chunk = -(-hidden // 1024) * 128        # about 8 parts, summed apart, so that one row keeps many multiprocessors reading
    parts = -(-hidden // chunk)
    part = x.new_empty(parts, rows, experts, dtype=torch.float32)
    _scores[-(-experts // 4), parts, -(-rows // 8)](x, router, part, rows, H=hidden, E=experts, CHUNK=chunk, BE=4, BH=128)
    _select[rows,](part, bias, ids, weights, rows, scaling, E=experts, PARTS=parts, SIGMOID=scoring == "sigmoid", BIAS=bias is not None,
                   K=topk, KP=power_of_two(topk), GROUPS=groups, GP=power_of_two(groups), SP=power_of_two(experts // groups),
                   TAKEN_GROUPS=topk_groups, GROUP_TOP=group_top, NORMALISE=normalise, num_warps=1)
    return ids, weights


def route_ref(x, router, bias, *, scoring, topk, groups, topk_groups, group_top, normalise, scaling):
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
    return ids, weights * scaling
