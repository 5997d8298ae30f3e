"""Which nodes of a drafted tree are worth a row of the target's forward, and what the forward taught about the draft's probabilities."""
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
    gain = calibrated(laid, trust)
    batch, size = gain.shape
    order = gain.flatten().sort(descending=True, stable=True)
    many = min(batch * size, len(price)) - 1
    value = torch.where(order.values[:many] > -torch.inf, order.values[:many].exp().cumsum(0) - price[1:many + 1], -torch.inf)
    best = value.max(0)
    count = torch.where(best.values > -price[0], best.indices + 1, 0)
    keep = torch.empty_like(laid.valid).view(-1).scatter_(0, order.indices, torch.arange(batch * size, device=price.device) < count)
    keep = keep.view(batch, size)
    keep[:, 0] = laid.valid[:, 0]
    return laid._replace(valid=keep, seen=laid.words * keep, positions=torch.where(keep, laid.positions, length[:, None]), slots=laid.slots * keep)


def calibrated(laid, trust):
    """fp32 [B, R]: the logarithm of each row's gain, -inf for the root and where not valid."""
    edge = laid.scores - laid.scores.gather(1, laid.parents)
    edge = edge + factors(trust).flatten()[cells(edge, laid.depth)]
    edge = edge.clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    edge[:, 0] = 0
    bits = laid.words[..., None] >> torch.arange(edge.shape[1], device=edge.device) & 1
    gain = torch.where(bits.bool(), edge[:, None], 0).sum(-1).masked_fill_(~laid.valid, -torch.inf)
    gain[:, 0] = -torch.inf
    return gain


def factors(trust):
    """fp32 [steps, BINS]: what a cell of `trust` adds to the logarithm of p."""
    return ((trust[1] + PRIOR) / (trust[0] + PRIOR)).log()


def cells(edge, depth):
    """Each row's cell of trust[0], flat, by its logarithm of p."""
    return (depth - 1).clamp(min=0) * BINS + (edge * -1.5).nan_to_num(nan=BINS).clamp(0, BINS - 1).long()


def trim(laid, length, table, page_size):
    """Without the rows that no request keeps: the reference's way to save their time; on the GPU rows are fixed and masked."""
    kept = int(laid.valid.sum(1).max())
    if kept == laid.valid.shape[1]:
        return laid
    batch, size = laid.valid.shape
    order = (~laid.valid).sort(dim=1, stable=True).indices                                             # parents stay before children
    row = torch.empty_like(order).scatter_(1, order, torch.arange(size).expand(batch, -1))
    take = order[:, :kept]
    parts = {name: part.gather(1, take) for name, part in laid._asdict().items()}
    bits = (parts["words"][..., None] >> take[:, None]) & 1                                            # [B, kept, kept]
    words, at = (bits << torch.arange(kept)).sum(-1), length[:, None] + torch.arange(kept)
    slots = table.gather(1, at // page_size) * page_size + at % page_size
    return laid._replace(**parts | {"parents": row.gather(1, parts["parents"]).clamp(max=kept - 1), "words": words,
                                    "seen": words * parts["valid"], "slots": slots * parts["valid"]})


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
    at = torch.arange(rows.shape[1], device=rows.device)
    accepted = torch.zeros_like(laid.valid).scatter_(1, rows, at < count[:, None])
    tried = accepted.gather(1, laid.parents) & laid.valid & (at > 0)
    edge = laid.scores - laid.scores.gather(1, laid.parents)
    cell = cells(edge, laid.depth).flatten()
    trust.mul_(keep)
    for part, value in zip(trust, (edge.exp(), accepted.float())):
        part.view(-1).index_add_(0, cell, torch.where(tried, value, 0).flatten())


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
