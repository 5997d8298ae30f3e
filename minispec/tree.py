"""The draft tree in flat form: row 0 is the pending true token, parents come before children, siblings differ."""
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from minispec.batch import Rows
from minispec.kernels.growth import Growth
from minispec.kernels.prune import prune
from minispec.kernels.tree import Laid, lay, plant
from minispec.kernels.view import View


@dataclass(frozen=True)
class Tree:
    """laid: kernels.tree.Laid, R = nodes + 1; column 0 is the root. straight: a chain by construction; pruned: rows may be dead.

            row     0        1        2        3        4
            token   root     a        b        aa       aaa        root -- a -- aa -- aaa
            parent  0        0        0        1        3               \\- b
    """
    laid: Laid
    straight: bool
    pruned: bool = False

    @classmethod
    def build(cls, batch, tokens, parents, depth, straight):
        """From node tensors [B, n] without the root; parents count the root as row 0."""
        nodes = [[(i, *node, 0.0) for i, node in enumerate(zip(*one), 1)] for one in zip(*(part.tolist() for part in (tokens, parents, depth)))]
        return cls(lay(nodes, batch.pending, batch.length, batch.room, batch.table, batch.page_size), straight)

    @classmethod
    def best(cls, batch, pool, shape, budget=None):
        """The shape.nodes best of a pool, or with a Budget those of them that pay; no pool, no nodes: plain decoding."""
        if isinstance(pool, Growth):
            laid = pool.lay()
            return cls(laid, laid.depth.tolist() == [list(range(laid.depth.shape[1]))] * len(laid.depth), len(laid.depth) > 1)
        nodes = min(budget.nodes if budget else shape.nodes, pool.tokens.shape[1]) if pool else 0
        laid = plant(pool, nodes, shape.topk, batch.pending, batch.length, batch.room, batch.table, batch.page_size)
        cuts = bool(nodes and budget and budget.cuts)
        if cuts:
            laid = prune(laid, batch.length, budget.trust, budget.price)
        return cls(laid, shape.topk == 1 or not nodes, cuts)

    def agreed(self, ranks):
        """Rank 0's tree, so that all verify the same one."""
        if ranks.size == 1:
            return self
        return replace(self, laid=Laid(*ranks.agree(*self.laid)))

    @cached_property
    def ancestors(self):
        """bool [B, R, R]: row i's ancestors and i itself."""
        words = self.laid.words
        return (words[..., None] >> torch.arange(words.shape[1], device=words.device) & 1).bool()

    def rows(self, batch):
        """The forward that verifies the tree: row i sees the committed prefix and its ancestors, at position length + depth."""
        prefix = batch.length[:, None].expand_as(self.laid.tokens)
        view = View(batch.table, batch.page_size, prefix, batch.length, self.laid.seen, batch.longest + prefix.shape[1], batch.exact)
        return Rows(self.laid.tokens, self.laid.positions, self.laid.slots, view, self.laid.valid if self.pruned else None)
