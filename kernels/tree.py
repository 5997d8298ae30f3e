"""A draft tree on its way: the nodes of a level, the choice of the best, and the rows that verify them."""
from typing import NamedTuple

import torch

from minispec.kernels.jit import follow, jit, pdl, power_of_two, tl, use_triton


class Frontier(NamedTuple):
    """The nodes of a level that are to be expanded: all [B, topk]; int64 but for the scores.

    scores: cumulative log-probability; index: in the pool; words: ancestry, bit t for cache entry length + t, itself included; tokens;
    positions of the rows, slots of their KV, above: the positions of the tokens; take: their parent among the rows before, flat.
    """
    scores: torch.Tensor
    index: torch.Tensor
    words: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    above: torch.Tensor
    take: torch.Tensor


class Pool(NamedTuple):
    """Every candidate of a tree, level by level, [B, P]: tokens, scores (cumulative log-probability), parents (pool index, -1 root)."""
    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor

    @classmethod
    def empty(cls, batch, steps, topk, device):
        size = topk + (steps - 1) * topk**2
        scores = torch.empty(batch, size, device=device)
        return cls(torch.empty(batch, size, dtype=torch.int64, device=device), scores, torch.empty(batch, size, dtype=torch.int64, device=device))

    def settled(self, frontier, nodes):
        """No child of the frontier can enter the best `nodes`: its score is at most its parent's, and ties go to the earlier entry.

        frontier fp32 [B, K]: the scores of the nodes to expand. Asked on the CPU only, where looking costs nothing; on CUDA it would stop the queue.
        """
        if self.scores.is_cuda or self.scores.shape[1] < nodes:
            return False
        return bool((frontier.amax(-1) <= self.scores.topk(nodes, -1).values[:, -1]).all())

    def filled(self, depth, topk):
        """The pool as it is after `depth` levels."""
        return Pool(*(part[:, :topk + (depth - 1) * topk**2] for part in self))


class Laid(NamedTuple):
    """Rows of a forward that verifies a tree, root first: all [B, R], int64 but for scores and valid.

    tokens; parents: row of the parent, the root's its own; depth; words: ancestors, bit j for row j, itself included (bit 63 is the sign);
    seen: the words where valid, else 0; positions; slots: 0 where not valid; scores fp32: cumulative log-probability; valid bool: the
    request still wants the token after the parent, and the row pays (prune.py).
    """
    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    words: torch.Tensor
    seen: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    scores: torch.Tensor
    valid: torch.Tensor


def slots_of(table, page_size, index):
    """Cache index of a request [B, R] -> slot; table int64 [B, pages]."""
    return table.gather(1, index // page_size) * page_size + index % page_size


def level(tokens, logp, before, pool, depth, length, table, page_size):
    """The children of a level join the pool (in place); the best topk of them are the next Frontier, each level's in descending order.

    tokens int64, logp fp32 [B, K, topk]: the children at `depth` of K rows; before: the Frontier those rows are, None for the root's;
    length int64 [B]; table int64 [B, pages]. The first level's nodes stay in the order of logp's columns.
    """
    if not use_triton(tokens):
        return level_ref(tokens, logp, before, pool, depth, length, table, page_size)
    batch, rows, topk = tokens.shape
    ints, scores = torch.empty(7, batch, topk, dtype=torch.int64, device=tokens.device), torch.empty(batch, topk, device=tokens.device)
    base = 0 if before is None else topk + (depth - 2) * topk**2
    if batch:
        _level[batch,](tokens, logp, None if before is None else before.scores, None if before is None else before.index,
                       None if before is None else before.words, *pool, scores, ints, length, table, batch, pool.tokens.shape[1], base,
                       (depth - 1) * topk, depth, table.stride(0), table.shape[1] * page_size, ROWS=rows, TOPK=topk, KP=power_of_two(topk),
                       C=power_of_two(rows * topk), FIRST=before is None, PAGE=page_size, num_warps=1 if rows * topk <= 128 else 4, **pdl(tokens))
    return Frontier(scores, *ints)


def level_ref(tokens, logp, before, pool, depth, length, table, page_size):
    batch, rows, topk = tokens.shape
    place, order = slice(0, topk), torch.arange(topk, device=tokens.device)
    if before is None:
        scores = best = logp[:, 0]
        parents, best = torch.full_like(tokens[:, 0], -1), order.expand(batch, -1)
    else:
        scores = (before.scores[..., None] + logp).flatten(1)
        parents, base = before.index[..., None].expand(-1, -1, topk).flatten(1), topk + (depth - 2) * topk**2
        place = slice(base, base + topk**2)
        best = scores.topk(topk, -1).indices
    flat = tokens.flatten(1)
    for part, now in zip(pool, (flat, scores, parents)):
        part[:, place] = now
    parent, entry = best // topk, (depth - 1) * topk + order
    words = 1 << entry
    words = words.expand(batch, -1) if before is None else before.words.gather(1, parent) | words
    positions, index = (length + depth - 1)[:, None].expand(-1, topk), length[:, None] + entry
    inside = index < table.shape[1] * page_size         # the last level's nodes get no KV and may lie past every page
    return Frontier(scores.gather(1, best), place.start + best, words, flat.gather(1, best), positions,
                    torch.where(inside, slots_of(table, page_size, torch.where(inside, index, 0)), 0), positions + 1,
                    parent + torch.arange(batch, device=tokens.device)[:, None] * rows)


def plant(pool, nodes, topk, pending, length, room, table, page_size):
    """The `nodes` best of a pool (ancestors included by construction) under the root `pending`, as the rows of the forward: Laid.

    pool: as `level` fills it, or None for the root alone; pending, length, room int64 [B]; table int64 [B, pages].
    """
    if not use_triton(pending):
        return plant_ref(pool, nodes, topk, pending, length, room, table, page_size)
    batch, size = len(pending), nodes + 1
    ints = torch.empty(7, batch, size, dtype=torch.int64, device=pending.device)
    scores, valid = (torch.empty(batch, size, dtype=kind, device=pending.device) for kind in (torch.float32, torch.bool))
    if batch:
        entries = pool.tokens.shape[1] if nodes else 1
        _plant[batch,](*(pool if nodes else (None,) * 3), pending, length, room, table, ints, scores, valid, batch, table.stride(0),
                       ENTRIES=entries, P=power_of_two(entries), NODES=nodes, R=power_of_two(size), TOPK=topk, PAGE=page_size,
                       DEPTH=1 + -(-max(entries - topk, 0) // topk**2), num_warps=1 if entries <= 128 and size <= 8 else 4, **pdl(pending))
    return Laid(*ints, scores, valid)


def plant_ref(pool, nodes, topk, pending, length, room, table, page_size):
    found = [()] * len(pending)
    for b, (tokens, scores, parents) in enumerate(zip(*(part.tolist() for part in pool))) if nodes else ():
        found[b] = [(i, tokens[i], parents[i], 1 + (i - topk + topk**2) // topk**2, scores[i]) for i in select(scores, nodes)]
    return lay(found, pending, length, room, table, page_size)


def select(scores, nodes):
    """The `nodes` best of a request's pool, by ascending index. Its scores: a child's is never above its parent's, its index is.

    A stable descending sort puts a parent before its children even on ties, so a prefix of the order is closed under parents.
    """
    return sorted(sorted(range(len(scores)), key=lambda i: -scores[i])[:nodes])


def lay(nodes, pending, length, room, table, page_size):
    """Laid from the nodes of every request, parents first, without the root: (number, token, the parent's number, depth, score), a parent that
    is not among them is the root. Requests that have fewer than another get rows that are not valid."""
    size, rows, scores = 1 + max(map(len, nodes), default=0), [], []
    for some, root, start, space in zip(nodes, pending.tolist(), length.tolist(), room.tolist()):
        numbers, words, missing = {-1: 0}, [], size - 1 - len(some)
        for row, (number, token, parent, depth, score) in enumerate([(-1, root, -1, 0, 0.0), *some, *[(-1, root, -1, space, 0.0)] * missing]):
            above, _ = numbers.get(parent, 0), numbers.setdefault(number, row)
            words.append((words[above] if row else 0) | (1 if row < 63 else -1) << row)                # the last bit is the sign
            rows.append((token, above, depth, words[row], *((words[row], start + depth) if depth < space else (0, start))))
            scores.append(score)
    ints, scores = torch.tensor(rows, device=length.device).T.reshape(6, -1, size), torch.tensor(scores, device=length.device).view(-1, size)
    valid = ints[4] != 0
    return Laid(*ints, slots_of(table, page_size, length[:, None] + torch.arange(size, device=length.device)) * valid, scores, valid)


@jit
def slots_at(p_table, index, mask, PAGE: tl.constexpr):
    return tl.load(p_table + index // PAGE, mask=mask, other=0) * PAGE + index % PAGE


@jit
def _level(p_tokens, p_logp, p_fscores, p_findex, p_fwords, p_pool_tokens, p_pool_scores, p_pool_parents, p_scores, p_ints, p_length, p_table,
           batch, size, base, entry, depth, s_table, reach, ROWS: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr, C: tl.constexpr,
           FIRST: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_b, i_c, i_k = tl.program_id(0).to(tl.int64), tl.arange(0, C), tl.arange(0, KP)
    real, live, n = i_c < ROWS * TOPK, i_k < TOPK, ROWS * TOPK
    score = tl.load(p_logp + i_b * n + i_c, mask=real, other=0.0)
    token = tl.load(p_tokens + i_b * n + i_c, mask=real, other=0)
    parent = tl.full([C], -1, tl.int64)
    if not FIRST:
        score += tl.load(p_fscores + i_b * ROWS + i_c // TOPK, mask=real, other=0.0)
        parent = tl.load(p_findex + i_b * ROWS + i_c // TOPK, mask=real, other=0)
    at = i_b * size + base + i_c
    tl.store(p_pool_tokens + at, token, mask=real)
    tl.store(p_pool_scores + at, score, mask=real)
    tl.store(p_pool_parents + at, parent, mask=real)
    chosen = i_k
    if not FIRST:
        left = real
        for k in range(0, TOPK):
            best = tl.max(tl.where(left, score, float("-inf")), 0)
            c = tl.min(tl.where(left & (score == best), i_c, C - 1), 0)
            chosen, left = tl.where(i_k == k, c, chosen), left & (i_c != c)
    hit = (i_c[:, None] == chosen[None, :]) & real[:, None]
    score = tl.sum(tl.where(hit, score[:, None], 0.0), 0)
    token = tl.sum(tl.where(hit, token[:, None], 0), 0)
    word = tl.full([KP], 1, tl.int64) << (entry + i_k).to(tl.int64)
    if not FIRST:
        word = word | tl.load(p_fwords + i_b * ROWS + chosen // TOPK, mask=live, other=0)
    length = tl.load(p_length + i_b)
    tl.store(p_scores + i_b * TOPK + i_k, score, mask=live)
    p_ints += i_b * TOPK + i_k
    many = batch * TOPK
    tl.store(p_ints, (base + chosen).to(tl.int64), mask=live)
    tl.store(p_ints + many, word, mask=live)
    tl.store(p_ints + 2 * many, token, mask=live)
    position = length + depth - 1 + tl.zeros([KP], tl.int64)
    tl.store(p_ints + 3 * many, position, mask=live)
    index = length + entry + i_k
    tl.store(p_ints + 4 * many, tl.where(index < reach, slots_at(p_table + i_b * s_table, index, live & (index < reach), PAGE), 0), mask=live)
    tl.store(p_ints + 5 * many, position + 1, mask=live)
    tl.store(p_ints + 6 * many, i_b * ROWS + chosen // TOPK, mask=live)


@jit
def _plant(p_tokens, p_scores, p_parents, p_pending, p_length, p_room, p_table, p_ints, p_out, p_valid, batch, s_table,
           ENTRIES: tl.constexpr, P: tl.constexpr, NODES: tl.constexpr, R: tl.constexpr, TOPK: tl.constexpr, PAGE: tl.constexpr, DEPTH: tl.constexpr,
           PDL: tl.constexpr):
    follow(PDL)
    i_b, i_r, i_p = tl.program_id(0).to(tl.int64), tl.arange(0, R), tl.arange(0, P)
    live = i_r <= NODES
    pending, length, room = tl.load(p_pending + i_b), tl.load(p_length + i_b), tl.load(p_room + i_b)
    token, parent, depth = tl.zeros([R], tl.int64) + pending, tl.zeros([R], tl.int64), tl.zeros([R], tl.int64)
    total = tl.zeros([R], tl.float32)
    if NODES:
        real = i_p < ENTRIES
        score = tl.load(p_scores + i_b * ENTRIES + i_p, mask=real, other=float("-inf"))
        above = tl.load(p_parents + i_b * ENTRIES + i_p, mask=real, other=0)
        tokens = tl.load(p_tokens + i_b * ENTRIES + i_p, mask=real, other=0)
        rank = tl.zeros([P], tl.int32)
        for q in range(0, ENTRIES, 32):         # how many come before, in descending order of score, of equals the earlier first
            i_q = q + tl.arange(0, 32)
            other = tl.load(p_scores + i_b * ENTRIES + i_q, mask=i_q < ENTRIES, other=float("-inf"))
            ahead = (other[None, :] > score[:, None]) | ((other[None, :] == score[:, None]) & (i_q[None, :] < i_p[:, None]))
            rank += tl.sum((ahead & (i_q < ENTRIES)[None, :]).to(tl.int32), 1)
        taken = real & (rank < NODES)
        row = tl.cumsum(taken.to(tl.int32), 0)
        here = taken[:, None] & (row[:, None] == i_r[None, :])                                         # [P, R]
        token = tl.where(i_r > 0, tl.sum(tl.where(here, tokens[:, None], 0), 0), token)
        above = tl.sum(tl.where(here, above[:, None], 0), 0)                                           # pool index of each row's parent
        parent = tl.sum(tl.where((i_p[:, None] == above[None, :]) & taken[:, None], row[:, None], 0), 0).to(tl.int64)
        parent = tl.where((i_r > 0) & (above >= 0), parent, 0)
        total = tl.sum(tl.where(here, score[:, None], 0.0), 0)
        first = tl.sum(tl.where(here, i_p[:, None], 0), 0)
        depth = tl.where(i_r == 0, 0, tl.where(first < TOPK, 1, 2 + (first - TOPK) // (TOPK * TOPK))).to(tl.int64)
    bit = tl.full([R], 1, tl.int64) << i_r.to(tl.int64)
    word = tl.where(i_r > 0, bit | 1, bit)
    if NODES:
        for _ in range(0, DEPTH):               # by one generation a step
            word = bit | tl.reduce_or(tl.where(parent[:, None] == i_r[None, :], word[None, :], 0), 1)
    valid = depth < room
    many, out = batch * (NODES + 1), i_b * (NODES + 1) + i_r
    tl.store(p_valid + out, valid, mask=live)
    tl.store(p_out + out, total, mask=live)
    p_ints += out
    tl.store(p_ints, token, mask=live)
    tl.store(p_ints + many, parent, mask=live)
    tl.store(p_ints + 2 * many, depth, mask=live)
    tl.store(p_ints + 3 * many, word, mask=live)
    tl.store(p_ints + 4 * many, tl.where(valid, word, 0), mask=live)
    tl.store(p_ints + 5 * many, tl.where(valid, length + depth, length), mask=live)
    tl.store(p_ints + 6 * many, slots_at(p_table + i_b * s_table, length + i_r, live & valid, PAGE), mask=live & valid)
    tl.store(p_ints + 6 * many, tl.zeros([R], tl.int64), mask=live & ~valid)
