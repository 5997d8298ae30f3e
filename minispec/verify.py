"""Which proposals the target agrees with."""
from dataclasses import dataclass, replace

import torch

from minispec.kernels import accept as kernel


@dataclass(frozen=True)
class Path:
    """The accepted path of every request.

    rows int64 [B, R]: rows of the forward in path order, the root (row 0) first; only the first `count` [B] are meant: accepted + 1, or 0
    where the target's logits are not finite (a NaN must not pass for a token).
    tokens int64 [B, R]: the target's choice after each of them: the accepted draft tokens, then the bonus token.
    logprobs fp32 [B, R] of those tokens, or None. straight: every path is rows 0, 1, 2, ...: nothing has to move.
    valid bool [B, R]: rows that were verified.
    """
    rows: torch.Tensor
    count: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    straight: bool
    valid: torch.Tensor | None = None

    def agreed(self, ranks):
        """Rank 0's decision, taken over by all."""
        if ranks.size == 1:
            return self
        names = ("rows", "count", "tokens", "logprobs")[:3 + (self.logprobs is not None)]
        return replace(self, **dict(zip(names, ranks.agree(*(getattr(self, name) for name in names)))))

    def read(self):
        """The host's one look at a round: [count, tokens ...] of each request, and its log-probabilities, or None for each."""
        emitted = torch.cat([self.count[:, None], self.tokens], 1).tolist()
        return emitted, [None] * len(emitted) if self.logprobs is None else self.logprobs.tolist()


def accept(tree, choice, logprobs, finite):
    """A node is accepted when it and all its ancestors equal the target's choice after their parents.

    choice int64 [B, R]: the target's own token after every row; finite bool [B, R]: whether its logits were.
    """
    return Path(*kernel.accept(tree.laid.tokens, tree.laid.parents, tree.laid.valid, tree.laid.words, choice, logprobs, finite), tree.straight,
                tree.laid.valid)
