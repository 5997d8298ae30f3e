"""Which proposals the target agrees with."""
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Path:
    """The accepted path of every request.

    rows int64 [B, R]: rows of the forward in path order, the root (row 0) first; only the first `count` [B] are meant: accepted + 1, or 0
    where the target's logits are not finite (a NaN must not pass for a token).
    tokens int64 [B, R]: the target's choice after each of them: the accepted draft tokens, then the bonus token.
    logprobs fp32 [B, R] of those tokens, or None. straight: every path is rows 0, 1, 2, ...: nothing has to move.
    """
    rows: torch.Tensor
    count: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    straight: bool


def accept(tree, choice, logprobs, finite):
    """A node is accepted when it and all its ancestors equal the target's choice after their parents.

    Siblings are distinct, so the accepted nodes form one path, and parent-first order makes it ascending in row numbers.
    choice int64 [B, R]: the target's own token after every row; finite bool [B, R]: whether its logits were.
    """
    match = torch.ones_like(tree.valid)
    match[:, 1:] = (tree.tokens[:, 1:] == choice.gather(1, tree.parents[:, 1:])) & tree.valid[:, 1:]
    accepted = ~(tree.ancestors & ~match[:, None]).any(-1)                                             # [B, R]
    rows = torch.sort(~accepted, dim=-1, stable=True).indices
    count = accepted.sum(-1) * (finite | ~tree.valid).all(-1)
    return Path(rows, count, choice.gather(1, rows), None if logprobs is None else logprobs.gather(1, rows), tree.straight)
