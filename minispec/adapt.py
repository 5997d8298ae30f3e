"""How much of a tree to verify, from what rounds have cost and what the draft has been worth; and when not to draft at all.

Only speed depends on it: the text is a function of the target's logits and the keyed noise alone, whatever is verified.
"""
from dataclasses import dataclass

import torch

from minispec.curve import REFRESH, Curve
from minispec.kernels.prune import BINS, factors

NEVER = 1e30        # a price that no gain pays
ROWS = 64           # of one forward at most, over all requests: rows of a captured round are there whether they are valid or not


@dataclass
class Budget:
    """What Tree.best and Draft.grow ask. nodes: of a request at most; steps: levels at most; topk (for Growth): children tried a node; trust: of
    kernels/prune.py, one for all batch sizes; price fp32 [requests * nodes + 1]: what verifying n nodes costs, in tokens, on the device; cuts:
    whether nodes that do not pay are left out. On the CPU also: prices, the same; in tokens, level: what a level of the draft costs, row: a
    further row; factors: kernels.prune.factors of `trust`; and what Growth tells."""
    nodes: int
    steps: int
    topk: int
    trust: torch.Tensor
    price: torch.Tensor
    level: float = 0.0
    row: float = 0.0
    factors: list | None = None
    prices: list | None = None
    took: float = 0.0           # seconds of the newest level but the first
    grown: int = 0              # levels of the newest tree
    cuts: bool = True


class Adaptive:
    """The budgets of an engine by batch size: everything it has learnt is in `trust` and `curves`, and starts anew with the engine."""

    def __init__(self, shape, device):
        self.shape, self.device = shape, device
        self.arms = sorted({1, (shape.steps + 1) // 2, shape.steps})        # each is captured: more gave nothing that could be measured
        self.trust = torch.zeros(2, shape.steps, BINS, device=device)
        self.curves, self.budgets, self.newest, self.unseen = {}, {}, None, None
        self.usual = self.sent = None       # the kind of round by whose prices trees are cut; that prices were planned for, not yet uploaded

    def budget(self, size):
        """size: places of a batch."""
        if size not in self.budgets:
            nodes = max(1, min(self.shape.nodes, ROWS // size - 1))
            self.budgets[size] = Budget(nodes, self.shape.steps, self.shape.topk, self.trust, torch.zeros(size * nodes + 1, device=self.device))
        return self.budgets[size]

    def plan(self, captured, size, requests):
        """What rank 0 says of the next round, in terms of JSON: [levels, and where they change price and level], [levels, True] for a captured
        round that is not cut, or [0] for a plain one.

        captured: whether it is a CUDA graph; requests: who is in it, oldest first: a new one is worth a probe.
        """
        new = requests[-1] is not self.newest
        if not captured or new or self.trying(captured, size):
            self.look()
        if (captured, size) not in self.curves:
            whole = captured or self.device.type != "cpu"
            self.curves[captured, size] = Curve(size, self.budget(size).nodes, self.arms if whole else self.arms[-1:], whole)
        curve = self.curves[captured, size]
        if new:
            curve.newcomer()
        self.newest, (depth, nodes) = requests[-1], curve()
        if depth and nodes is not None:         # its cost is tried
            self.usual = self.sent = None
            return [depth, [0.0] * (nodes + 1) + [NEVER] * (size * curve.nodes - nodes), 0.0]
        most = min(depth, max(request.room for request in requests) - 1)        # no deeper than there is room for
        depth = min(arm for arm in (0, *curve.arms) if arm >= most) if curve.whole else most
        if not depth:
            return [0]
        if captured and depth == self.shape.steps and curve.uncut:
            self.usual = None       # what is cut next is cut by the prices of then
            return [depth, True]
        if self.usual == (captured, size) and curve.age % (4 * REFRESH if curve.whole else REFRESH):       # an upload, there
            return [depth]
        self.usual, self.sent = None, (captured, size)
        price, level = curve.prices(len(requests))
        if curve.whole:
            price[0] = NEVER            # what verifies nothing learns nothing
        return [depth, price, level]

    def trying(self, *kind):
        """Whether costs of a size are being tried: each round of it is to be seen before the next is planned. kind: captured, size."""
        return kind not in self.curves or bool(self.curves[kind].trials)

    def saw(self, captured, size, *round):
        """Of a round that was planned: its size, and as Curve.saw, which hears of it at the next `look`: when a captured one runs, so that no
        GPU waits for it, else before the next is planned."""
        self.unseen = (captured, size), round

    def look(self):
        kind, round = self.unseen or (None, None)
        self.unseen = None
        if kind in self.curves:
            self.curves[kind].saw(*round)

    def follow(self, size, plan):
        """The Budget of the round that rank 0 planned, or None for a plain one."""
        if not plan[0]:
            return None
        budget = self.budget(size)
        budget.steps, *more = plan
        if len(more) > 1:
            budget.prices, budget.level = price, _ = more
            self.usual = self.sent
            with torch.inference_mode():        # pinned and not waited for: else the host waits for the round before
                budget.price.copy_(torch.tensor(price, pin_memory=budget.price.is_cuda), non_blocking=True)
            if self.device.type == "cpu":
                last = min(self.shape.steps, len(price) - 1)
                budget.row = min((price[last] - price[1]) / max(last - 1, 1), 1.0)
                budget.factors = factors(self.trust).tolist()
        return budget
