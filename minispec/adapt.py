"""How much of a tree to verify, from what rounds have cost and what the draft has been worth; and when not to draft at all.

Only speed depends on it: the text is a function of the target's logits and the keyed noise alone, whatever is verified.
"""
from dataclasses import dataclass
from itertools import accumulate
from math import exp
from time import perf_counter

import torch

from minispec.kernels.prune import BINS, factors

PLAIN = -1          # where others say how many nodes a round verified
NEVER = 1e30        # a price that no gain pays
ROWS = 64           # of one forward at most, over all requests: rows of a captured round are there whether they are valid or not
AHEAD = 1.3         # worth of another level over the probability that reaches it: levels below it, and the choice to stop there
REFRESH = 4         # rounds between two looks at the prices
LONG, SHORT = 32, 4         # rounds over which gains are averaged; that an average is held to be of when drafting begins again
PROBE = 128         # plain rounds between two probes at most, from 8 on
GROWTH = 0.66       # distinct experts of n rows, where they have been counted, are about n ** 0.66 times one row's


@dataclass
class Budget:
    """What Tree.best and Draft.grow ask. nodes: of a request at most; trust: of kernels/prune.py, one for all batch sizes; price fp32
    [requests * nodes + 1]: what verifying n nodes costs, in tokens, on the device. On the CPU also, in tokens, level: what a level of the
    draft costs, row: a further row; factors: kernels.prune.factors of `trust`."""
    nodes: int
    trust: torch.Tensor
    price: torch.Tensor
    level: float = 0.0
    row: float = 0.0
    factors: list | None = None
    took: float = 0.0           # seconds of the newest level but the first

    def enough(self, frontier, depth):
        """Whether the nodes of the last level that it would expand, a Frontier, promise less than another level costs. On the CPU only:
        elsewhere the host does not know them. Levels are asked about in order."""
        if self.factors is None:
            return False
        now = perf_counter()
        above, gains, began = ([0.0] * len(frontier.take), [0.0] * len(frontier.take), None) if depth == 1 else self.before
        self.took = now - began if began else 0.0
        scores, paths = frontier.scores.flatten().tolist(), []
        for score, parent in zip(scores, frontier.take.flatten().tolist()):
            edge = score - above[parent] if score > -torch.inf else -torch.inf
            cell = min(int(-1.5 * max(edge, -99.0)), BINS - 1)
            paths.append(gains[parent] + min(edge + self.factors[depth - 1][cell], 0.0))
        self.before = scores, paths, now
        return sum(max(exp(path) * AHEAD - self.row, 0.0) for path in paths) <= self.level


class Curve:
    """Costs and gains of one batch size. Costs are relative to `base`, seconds, which follows the machine's changes in speed: a slow
    minute makes no row count look dear. gain: tokens a request and drafted round; spent: the cost of such a round."""

    def __init__(self, requests, nodes, steps):
        self.requests, self.nodes, self.cost, self.seen, self.use, self.base, self.level = requests, nodes, {}, {}, {}, None, 0.0
        self.trials = [n if n == PLAIN else min(n, nodes) * requests for n in (steps, PLAIN, 1, 3, 10)] * 2
        self.gain, self.spent, self.drafted, self.rest, self.interval, self.age = 1.0, 1.0, 0, 0, 0, 0

    def __call__(self):
        """The next round: PLAIN, the number of nodes to try, or None for what the prices say."""
        return self.trials[0] if self.trials else PLAIN if self.rest else None

    def saw(self, nodes, emitted, seconds, drafting=0.0, level=0.0):
        """A round: nodes verified or PLAIN, tokens emitted a request, seconds; on the CPU how many of them for the draft, and for one more
        level of it, where it had more than one."""
        self.age += 1
        cost = self._average(nodes, seconds - drafting)
        if level:
            level /= self.base
            self.level += (min(level, 2 * self.level) - self.level) / 16 if self.level else level
        if nodes != PLAIN:
            self.drafted += 1
            share = 0.5 if self.interval else 1 / min(self.drafted, LONG)      # a probe speaks of the text as it is now
            self.gain += (emitted - self.gain) * share
            self.spent += (cost + drafting / self.base - self.spent) * share
        if self.trials:
            del self.trials[0]
            self.drafted = min(self.drafted, SHORT)
        elif nodes == PLAIN:
            self.rest = max(self.rest - 1, 0)
        elif self.gain * min(self.cost.get(PLAIN, 1e9), self.cost.get(0, 1e9)) < self.spent * (1 - (not self.interval) / self.drafted):
            # by less than a young average can tell, it goes on
            self.interval = self.rest = min(max(2 * self.interval, 8), PROBE)
        elif self.interval:
            self.interval, self.drafted = 0, SHORT

    def _average(self, nodes, seconds):
        """The better of the first two rounds of a kind, then a running geometric mean that no outlier drags far. The kind that is usual now
        keeps its cost and moves the base instead: were both free, kinds that are rare would be left behind on another scale."""
        self.base = self.base or seconds
        known, count, relative = self.cost.get(nodes, 1e9), self.seen.get(nodes, 0), seconds / self.base
        self.seen[nodes], self.use = count + 1, {n: 0.97 * use for n, use in self.use.items()}
        self.use[nodes] = self.use.get(nodes, 0) + 1
        change = min(max(relative / known, 0.5), 2)
        if count < 2:
            self.cost[nodes] = min(known, relative)
        elif nodes == max(self.use, key=self.use.get):
            self.base *= change**0.1
        else:
            self.cost[nodes] *= change ** (1 / min(count, 32))
        return self.cost[nodes]

    def prices(self):
        """Tokens that a round of 0 ... requests * nodes verified nodes must bring, its cost times the present tokens a cost, and a level's.

        Costs are a + b * n ** 0.66, as the distinct experts of n rows grow where they have been counted, by least squares over the rounds
        seen; from there a count's own average counts the more the more often it was seen. They never fall.
        """
        found = [(n, n**GROWTH, self.cost[n], min(self.seen[n], 32)) for n in sorted(self.cost.keys() - {PLAIN})]
        weight = sum(w for *_, w in found) or 1
        middle, mean = sum(w * x for _, x, _, w in found) / weight, sum(w * y for *_, y, w in found) / weight
        spread = sum(w * (x - middle) ** 2 for _, x, _, w in found)
        slope = max(sum(w * (x - middle) * y for _, x, y, w in found) / spread, 0) if spread else 0.1
        rate, table = self.requests * self.gain / self.spent, [mean + slope * (n**GROWTH - middle) for n in range(self.requests * self.nodes + 1)]
        for n, _, y, w in found:
            table[n] += (y - table[n]) * w / (w + 16)
        return [rate * cost for cost in accumulate(table, max)], rate * self.level


class Adaptive:
    """The budgets of an engine by batch size: everything it has learnt is in `trust` and `curves`, and starts anew with the engine."""

    def __init__(self, shape, device):
        self.shape, self.device = shape, device
        self.trust = torch.zeros(2, shape.steps, BINS, device=device)
        self.curves, self.budgets, self.newest = {}, {}, None

    def budget(self, size):
        """size: places of a batch."""
        if size not in self.budgets:
            nodes = max(1, min(self.shape.nodes, ROWS // size - 1))
            self.budgets[size] = Budget(nodes, self.trust, torch.zeros(size * nodes + 1, device=self.device))
        return self.budgets[size]

    def plan(self, captured, size, requests):
        """What rank 0 says of the next round, in terms of JSON: [PLAIN or None, and where they change price and level].

        captured: whether it is a CUDA graph; requests: who is in it, oldest first: a new one is worth a probe.
        """
        if (captured, size) not in self.curves:
            self.curves[captured, size] = Curve(size, self.budget(size).nodes, self.shape.steps)
        curve, newest = self.curves[captured, size], id(requests[-1])
        if curve.rest and newest != self.newest:
            curve.rest = 0
        self.newest, what = newest, curve()
        if what == PLAIN:
            return [PLAIN]
        if what is None and not curve.interval and curve.age % REFRESH:
            return [None]
        price, level = curve.prices()
        if what is not None:
            price = [0.0] * (what + 1) + [NEVER] * (len(price) - what - 1)
            level = 0.0
        elif curve.interval:
            price[0] = NEVER        # a probe that verifies nothing learns nothing
        return [None, price, level]

    def saw(self, captured, size, *round):
        """Of a round that was planned: Curve.saw."""
        if (captured, size) in self.curves:
            self.curves[captured, size].saw(*round)

    @torch.inference_mode()
    def follow(self, size, plan):
        """The Budget of the round that rank 0 planned, or None for a plain one."""
        if plan[0] == PLAIN:
            return None
        budget = self.budget(size)
        if plan[1:]:
            price, budget.level = plan[1:]
            budget.price.copy_(torch.tensor(price))
            if self.device.type == "cpu":
                last = min(self.shape.steps, len(price) - 1)
                budget.row = min((price[last] - price[1]) / max(last - 1, 1), 1.0)
                budget.factors = factors(self.trust).tolist()
        return budget
