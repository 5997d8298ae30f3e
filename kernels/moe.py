"""Mixture of experts: the router's choice, and the routed experts for few or many rows."""
import torch
import torch.nn.functional as F

from minispec.kernels.linear import linear

FEW = 16     # rows up to which an expert computes all of them rather than picking its own


def route(x, router, bias, *, scoring, topk, groups, topk_groups, group_top, normalise, scaling):
    """Which experts each row takes, and with what weight (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16; V2's softmax routing too).

    x [N, h]; router fp32 [E, h]; bias fp32 [E] or None: it steers the selection only, never the weight. A group's score is the sum of its
    `group_top` best experts (2 in V3, 1 in V2); outside the topk_groups best groups no expert is taken.
    Returns ids int64 [N, topk], weights fp32 [N, topk], sum-normalised if `normalise`, times `scaling`. All in fp32.
    """
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


def moe(x, w13, w2, ids, weights):
    """sum over a row's experts of weight * down(silu(gate x) * up x).

    x [N, h]; w13 [E, 2I, h], gate rows first; w2 [E, h, I]; ids, weights [N, k]. Returns fp32 [N, h]. Experts are summed in ascending
    order, so the result does not depend on the order in which top-k returned them.
    """
    experts, rows = w2.shape[0], x.shape[0]
    dense = weights.new_zeros(rows, experts).scatter_(1, ids, weights)                                 # [N, E]
    active = sorted(set(ids.flatten().tolist()))
    if not 0 < rows <= FEW:
        out = x.new_zeros(x.shape, dtype=torch.float32)
        for e in active:
            taken = dense[:, e].nonzero().flatten()
            gate, up = linear(x[taken], w13[e]).chunk(2, -1)
            out[taken] += linear(F.silu(gate).mul_(up), w2[e]).float() * dense[taken, e, None]
        return out
    # few rows: every expert in use computes all of them, and the weight is zero where a row did not ask
    if whole := 2 * len(active) >= experts and rows > 1:
        # most experts wanted: all of them as two products (w2 lies in memory as [E, I, h]); on the CPU 2.4 times as fast at 7 rows
        both = linear(x, w13.flatten(0, 1)).unflatten(1, (experts, -1))                                # [N, E, 2I]
    else:
        both, dense = torch.stack([linear(x, w13[e]) for e in active], 1), dense[:, active]
    gate, up = both.chunk(2, -1)
    inner = (F.silu(gate) * dense[..., None] * up).to(x.dtype)      # fp32 from the weight on: fp16 could make inf, and inf * 0 is NaN
    if whole:
        return linear(inner.flatten(1), w2.mT.flatten(0, 1).T).float()
    return torch.stack([linear(part, w2[e]) for part, e in zip(inner.unbind(1), active)]).sum(0, dtype=torch.float32)
