"""The draft tree in flat form: row 0 is the pending true token, parents come before children, siblings differ."""
from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True)
class Tree:
    """All int64 [B, R], R = nodes + 1; column 0 is the root.

    tokens: target ids; parents: row of the parent (the root names itself); depth: root 0; valid: bool, false for nodes that would pass
    the end of the request; ancestors: bool [B, R, R], row i's ancestors and i itself; straight: a chain by construction.

            row     0        1        2        3        4
            token   root     a        b        aa       aaa        root -- a -- aa -- aaa
            parent  0        0        0        1        3               \\- b
    """
    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    valid: torch.Tensor
    ancestors: torch.Tensor
    straight: bool

    @classmethod
    def build(cls, batch, tokens, parents, depth, straight):
        """From node tensors [B, n] without the root; parents count the root as row 0."""
        root = torch.zeros_like(batch.pending[:, None])
        tokens, parents = torch.cat([batch.pending[:, None], tokens], 1), torch.cat([root, parents], 1)
        depth = torch.cat([root, depth], 1)
        size = tokens.shape[1]
        ancestors = torch.eye(size, device=tokens.device).expand(len(tokens), -1, -1).clone()
        ancestors.scatter_(2, parents[..., None], 1.0)
        for _ in range((size - 1).bit_length()):                                                       # paths of 2, 4, 8, ... steps
            ancestors = torch.bmm(ancestors, ancestors).clamp_(max=1)
        # a node at depth d can emit only if the token after its parent, emission number d, is still wanted
        return cls(tokens, parents, depth, depth < batch.room[:, None], ancestors.bool(), straight)

    @classmethod
    def root(cls, batch):
        """No nodes: a round that verifies nothing is plain decoding."""
        nothing = batch.pending[:, None][:, :0]
        return cls.build(batch, nothing, nothing, nothing, True)

    def agreed(self, ranks):
        """Rank 0's tree, so that all verify the same one."""
        if ranks.size == 1:
            return self
        names = ("tokens", "parents", "depth", "valid", "ancestors")
        return replace(self, **dict(zip(names, ranks.agree(*(getattr(self, name) for name in names)))))

    @cached_property
    def words(self):
        """int64 [B, R]: the ancestors as bits, bit j for row j; bit 63 is the sign."""
        return (self.ancestors * (1 << torch.arange(self.tokens.shape[1], device=self.tokens.device))).sum(-1)

    def rows(self, batch):
        """The forward that verifies the tree: row i sees the committed prefix and its ancestors, at position length + depth."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        length, size = batch.length[:, None], len(at)
        return batch.rows(self.tokens, torch.where(self.valid, length + self.depth, length), (length + at).expand_as(self.tokens),
                          prefix=length.expand_as(self.tokens), words=self.words * self.valid, valid=self.valid, extent=batch.longest + size,
                          exact=batch.exact)


def select(scores, parents, nodes):
    """The `nodes` best of a pool, ancestors included by construction.

    scores fp32 [B, P]: a child's is never above its parent's; parents int64 [B, P]: pool index, -1 for the root, always below the child's.
    A stable descending sort puts a parent before its children even on ties, so a prefix of the order is closed under parents.
    Returns chosen int64 [B, nodes], ascending pool index, and their parents as rows of the tree (root 0).
    """
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :nodes]
    chosen = order.sort(-1).values
    row = torch.zeros_like(parents).scatter_(1, chosen, torch.arange(1, nodes + 1, device=scores.device).expand_as(chosen))
    above = parents.gather(1, chosen)
    return chosen, torch.where(above < 0, 0, row.gather(1, above.clamp(min=0)))
