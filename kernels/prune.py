"""Which nodes of a drafted tree are worth a row of the target's forward, and what the forward taught about the draft's probabilities."""
from itertools import accumulate
from math import exp, inf

import torch

from minispec.kernels.jit import follow, jit, pdl, power_of_two, tl, use_triton

BINS = 8            # of a draft's probability p: the bin is floor(-1.5 log p), the last one open
PRIOR = 2.0         # expected acceptances that a cell of `trust` starts with, all of them met


def prune(laid, length, trust, price):
    """Rows of a laid tree that do not pay are made invalid, in one order over all requests.

    A node's probability p under its parent becomes min(1, p * accepted / expected) of its cell of trust fp32 [2, steps, BINS] (expected,
    accepted); the gain of a node is the product along its path, so no parent is worth less than its child. Of all nodes in descending
    order of gain the first n are kept, n the argmax of (sum of their gains) - price[n] (Dinkelbach's rule where price is cost times the
    tokens a second reached); price fp32, in tokens, of 0 to B * (R - 1) nodes at least.
    laid: kernels.tree.Laid of [B, R] rows; length int64 [B]. Returns a Laid in which the other rows are as beyond the request's room.
    """
    if not use_triton(price):
        return prune_ref(laid, length, trust, price)
    batch, size = laid.tokens.shape
    if batch:
        gains = torch.empty(batch, size, device=price.device)
        _prune[1,](laid.parents, laid.depth, laid.words, laid.scores, laid.valid, laid.seen, laid.positions, laid.slots, length, trust, price, gains,
                   batch, SIZE=size, B=power_of_two(batch), R=power_of_two(size), CELLS=trust[0].numel(), BINS=BINS, PRIOR=PRIOR,
                   num_warps=1 if batch * size <= 16 else 4, **pdl(price))
    return laid


def prune_ref(laid, length, trust, price):
    added, found = factors(trust).tolist(), []
    for b, rows in enumerate(zip(*(part.tolist() for part in (laid.scores, laid.parents, laid.depth, laid.valid)))):
        scores, gains = rows[0], [0.0]
        for score, parent, depth, _ in list(zip(*rows))[1:]:
            edge = score - scores[parent] if score > -inf else score
            gains.append(gains[parent] + min(edge + added[depth - 1][cell(edge)], 0.0))
        found += [(-gain, b, row) for row, (gain, valid) in enumerate(zip(gains, rows[3])) if row and valid and gain > -inf]
    keep = torch.zeros_like(laid.valid)
    keep[:, 0] = laid.valid[:, 0]
    for _, b, row in pay(sorted(found), price.tolist()):
        keep[b, row] = True
    return laid._replace(valid=keep, seen=laid.words * keep, positions=torch.where(keep, laid.positions, length[:, None]), slots=laid.slots * keep)


def pay(order, price):
    """Those of nodes in descending order of gain that are worth their price: order holds (-logarithm of gain, ...)."""
    totals = list(accumulate((exp(-loss) for loss, *_ in order), initial=0.0))
    return order[:max(range(len(totals)), key=lambda n: totals[n] - price[n])]


def factors(trust):
    """fp32 [steps, BINS]: what a cell of `trust` adds to the logarithm of p."""
    return ((trust[1] + PRIOR) / (trust[0] + PRIOR)).log()


def cell(edge):
    """A node's bin by its logarithm of p."""
    return min(int(-1.5 * max(-99.0, edge)), BINS - 1)


def learn(laid, rows, count, trust, keep=0.995):
    """In place: trust, decayed by `keep`, takes in a round: every valid node whose parent was accepted, with its p, and whether it was too.

    rows int64 [B, R], count int64 [B]: of kernels.accept.accept.
    """
    if not use_triton(trust):
        return learn_ref(laid, rows, count, trust, keep)
    batch, size = rows.shape
    if batch:
        _learn[1,](laid.parents, laid.depth, laid.scores, laid.valid, rows, count, trust, batch, keep, SIZE=size, R=power_of_two(size),
                   CELLS=trust[0].numel(), C=power_of_two(trust[0].numel()), BINS=BINS, num_warps=4, **pdl(trust))


def learn_ref(laid, rows, count, trust, keep=0.995):
    found = []
    for path, n, *parts in zip(*(part.tolist() for part in (rows, count, laid.parents, laid.depth, laid.scores, laid.valid))):
        accepted = set(path[:n])
        found += [((depth - 1) * BINS + cell(edge), exp(edge), row in accepted) for row, (parent, depth, score, valid) in enumerate(zip(*parts))
                  if row and valid and parent in accepted for edge in [score - parts[2][parent]]]
    where, *values = torch.tensor(found, device=trust.device).view(-1, 3).T
    trust.mul_(keep).view(2, -1).index_add_(1, where.long(), torch.stack(values))


@jit
def _cell(edge, depth, BINS: tl.constexpr):
    scaled = tl.where(edge > -BINS, -1.5 * edge, BINS)         # NaN falls into the last bin too
    return tl.maximum(depth.to(tl.int32) - 1, 0) * BINS + tl.minimum(tl.maximum(scaled.to(tl.int32), 0), BINS - 1)


@jit
def _prune(p_parents, p_depth, p_words, p_scores, p_valid, p_seen, p_positions, p_slots, p_length, p_trust, p_price, p_gains, batch,
           SIZE: tl.constexpr, B: tl.constexpr, R: tl.constexpr, CELLS: tl.constexpr, BINS: tl.constexpr, PRIOR: tl.constexpr,
           PDL: tl.constexpr):
    follow(PDL)
    i_b, i_r = tl.arange(0, B), tl.arange(0, R)
    at, real = i_b[:, None] * SIZE + i_r[None, :], (i_b < batch)[:, None] & (i_r < SIZE)[None, :]
    parents = tl.load(p_parents + at, mask=real, other=0)
    above = tl.load(p_scores + i_b[:, None] * SIZE + parents, mask=real, other=0.0)
    edge = tl.load(p_scores + at, mask=real, other=0.0) - above
    cell = _cell(edge, tl.load(p_depth + at, mask=real, other=0), BINS)
    expected, accepted = tl.load(p_trust + cell), tl.load(p_trust + CELLS + cell)
    edge += tl.log((accepted + PRIOR) / (expected + PRIOR))
    edge = tl.where(edge > float("-inf"), tl.minimum(edge, 0.0), float("-inf"))
    edge = tl.where((i_r > 0)[None, :], edge, 0.0)
    bits = (tl.load(p_words + at, mask=real, other=0)[:, :, None] >> i_r[None, None, :].to(tl.int64)) & 1
    gain = tl.sum(tl.where(bits != 0, edge[:, None, :], 0.0), 2)
    candidate = real & (i_r > 0)[None, :] & (tl.load(p_valid + at, mask=real, other=0) != 0) & (gain > float("-inf"))
    tl.store(p_gains + at, tl.where(candidate, gain, float("-inf")), mask=real)
    tl.debug_barrier()      # the gains of all rows, read anew in blocks
    i_m = tl.arange(0, B * R)
    many = batch * SIZE
    mine = tl.load(p_gains + i_m, mask=i_m < many, other=float("-inf"))
    rank, total = tl.zeros([B * R], tl.int32), tl.exp(mine)
    for q in range(0, many, 16):
        i_q = q + tl.arange(0, 16)
        other = tl.load(p_gains + i_q, mask=i_q < many, other=float("-inf"))
        ahead = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (i_q[None, :] < i_m[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
        total += tl.sum(tl.where(ahead, tl.exp(other)[None, :], 0.0), 1)
    live = mine > float("-inf")
    value = tl.where(live, total - tl.load(p_price + rank + 1, mask=live, other=0.0), float("-inf"))
    best = tl.max(value, 0)
    last = tl.min(tl.where(live & (value == best), rank, 2**30), 0)
    last = tl.where(best > -tl.load(p_price), last, -1)
    row, request = i_m % SIZE, i_m // SIZE
    drop = (i_m < many) & (row > 0) & ((live == 0) | (rank > last))
    tl.store(p_valid + i_m, tl.zeros([B * R], tl.int1), mask=drop)
    tl.store(p_seen + i_m, tl.zeros([B * R], tl.int64), mask=drop)
    tl.store(p_slots + i_m, tl.zeros([B * R], tl.int64), mask=drop)
    tl.store(p_positions + i_m, tl.load(p_length + request, mask=drop, other=0), mask=drop)


@jit
def _learn(p_parents, p_depth, p_scores, p_valid, p_rows, p_count, p_trust, batch, keep, SIZE: tl.constexpr, R: tl.constexpr,
           CELLS: tl.constexpr, C: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_r, i_c = tl.arange(0, R), tl.arange(0, C)
    expected = tl.load(p_trust + i_c, mask=i_c < CELLS, other=0.0) * keep
    accepted = tl.load(p_trust + CELLS + i_c, mask=i_c < CELLS, other=0.0) * keep
    for b in range(0, batch):
        at, real = b * SIZE + i_r, i_r < SIZE
        rows = tl.load(p_rows + at, mask=real & (i_r < tl.load(p_count + b)), other=-1)
        parents = tl.load(p_parents + at, mask=real, other=0)
        hit = tl.max((rows[None, :] == i_r[:, None]).to(tl.int32), 1) != 0
        under = tl.max((rows[None, :] == parents[:, None]).to(tl.int32), 1) != 0
        tried = real & under & (i_r > 0) & (tl.load(p_valid + at, mask=real, other=0) != 0)
        edge = tl.load(p_scores + at, mask=real, other=0.0) - tl.load(p_scores + b * SIZE + parents, mask=real, other=0.0)
        here = tried[:, None] & (_cell(edge, tl.load(p_depth + at, mask=real, other=0), BINS)[:, None] == i_c[None, :])
        expected += tl.sum(tl.where(here, tl.exp(edge)[:, None], 0.0), 0)
        accepted += tl.sum((here & hit[:, None]).to(tl.float32), 0)
    tl.store(p_trust + i_c, expected, mask=i_c < CELLS)
    tl.store(p_trust + CELLS + i_c, accepted, mask=i_c < CELLS)
