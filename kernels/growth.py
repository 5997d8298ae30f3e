"""A draft tree that grows on the host, where looking at it costs nothing: an adaptive round on the CPU. What is drafted further and what is
verified is decided by the same calibrated gains, before anything is computed for it; on a GPU level, plant and prune decide on the device."""
from math import exp, inf
from time import perf_counter

import torch

from minispec.kernels.prune import cell, pay
from minispec.kernels.tree import Frontier, lay, slots_of

AHEAD = 1.3         # worth of another level over the probability that reaches it: levels below it, and the choice to stop there


class Growth:
    """The nodes of every request's tree, root first: (gain, score, token, parent, depth, place): the logarithms of the path's probability,
    calibrated and as the draft says it, the parent's number and its place in the frontier that it was in.

    budget: adapt.Budget, which it tells `grown` and `took`; batch: Batch; scratch: cache entries past its lengths that may be written.
    """

    def __init__(self, budget, batch, scratch):
        self.budget, self.batch, self.length, self.rows, self.began = budget, batch, batch.length.tolist(), 0, None
        self.nodes = [[(0.0, 0.0, token, 0, 0, 0)] for token in batch.pending.tolist()]
        self.front = [[(0, 0)]] * len(self.nodes)               # number, and the ancestors' word, of those that were expanded last
        self.slots = slots_of(batch.table, batch.page_size, batch.length[:, None] + torch.arange(scratch))

    def add(self, tokens, logp):
        """The children tokens int64, logp fp32 [B, K, topk] of the frontier's K rows -> the next Frontier (without scores and index): as many
        nodes of a request as promise more than a row costs, in the request that has most of them. None: all together promise less than
        another level costs, or there are levels enough."""
        budget, now, depth = self.budget, perf_counter(), self.nodes[0][-1][4] + 1
        budget.took, self.began, budget.grown, factors = now - self.began if self.began else 0.0, now, depth, budget.factors[depth - 1]
        best, promise, width, rows, before = [], 0.0, 0, [], self.front
        for nodes, front, some, edges in zip(self.nodes, before, tokens.tolist(), logp.tolist()):
            old = len(nodes)
            for place, ((parent, _), ids, row) in enumerate(zip(front, some, edges)):
                gain, score, *_ = nodes[parent]
                nodes += [(gain + min(edge + factors[cell(edge)], 0.0), score + edge, token, parent, depth, place) for token, edge in zip(ids, row)]
            best.append(sorted(range(old, len(nodes)), key=lambda i: -nodes[i][0])[:budget.topk])
            worth = [more for i in best[-1] if (more := exp(nodes[i][0]) * AHEAD - budget.row) > 0]
            promise, width = promise + sum(worth), max(width, len(worth))
        if depth == budget.steps or promise <= budget.level:
            return None
        self.front, self.rows = [], self.rows + width
        for b, (nodes, front, length, some) in enumerate(zip(self.nodes, before, self.length, best)):
            self.front.append([])
            for entry, i in enumerate(some[:width], self.rows - width):
                *_, token, _, _, place = nodes[i]
                word = front[place][1] | (1 if entry < 63 else -1) << entry         # the last bit is the sign
                self.front[b].append((i, word))
                rows.append((word, token, length + depth - 1, length + depth, b * len(front) + place))
        words, tokens, positions, above, take = torch.tensor(list(zip(*rows))).view(5, -1, width)
        return Frontier(None, None, words, tokens, positions, self.slots[:, self.rows - width:self.rows], above, take)

    def lay(self):
        """The Laid of the nodes that pay, all requests' in one order."""
        order = sorted(one for b, (some, room) in enumerate(zip(self.nodes, self.batch.room.tolist())) for one in sorted(
            (-gain, b, i) for i, (gain, *_, depth, _) in enumerate(some) if i and gain > -inf and depth < room)[:self.budget.nodes])
        kept = sorted((b, i, *self.nodes[b][i]) for _, b, i in pay(order, self.budget.prices))
        nodes = [[(i, token, above, depth, score) for b, i, _, score, token, above, depth, _ in kept if b == one] for one in range(len(self.nodes))]
        return lay(nodes, self.batch.pending, self.batch.length, self.batch.room, self.batch.table, self.batch.page_size)
