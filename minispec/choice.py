"""The target's choice and the draft's children where ranks share a head by rows of the vocabulary; alone, the kernels'."""
import torch

from minispec.kernels import choose as kernel
from minispec.kernels.draft_logits import draft_logits as draft_kernel
from minispec.kernels.head import head_logits, merge_topk, shard_topk
from minispec.kernels.jit import use_triton
from minispec.kernels.linear import linear


def choose(hidden, head, positions, sampling, tokens, ancestors, vocab, ranks):
    """kernels.choose.choose with this rank's rows of a head of `vocab` rows: the same on every rank.

    Only winners travel, one a rank and row. What looks at a whole row of logits (filters, penalties, bias) gathers the rows.
    """
    if ranks.size == 1:
        return kernel.choose(hidden, head, positions, sampling, tokens, ancestors)
    if sampling.filters or sampling.repetition is not None or sampling.bias is not None:
        logits = ranks.join(head_logits(hidden, head) if use_triton(hidden) else linear(hidden, head).float(), vocab)
        return *kernel.pick(logits, positions, sampling, tokens, ancestors), logits.sum(-1).isfinite()
    ids, logprobs, finite = _best(hidden, head, None, 1, sampling, positions, vocab, ranks, True)
    return ids[..., 0], logprobs[..., 0] if sampling.wants_logprobs else None, finite


def draft_logits(hidden, head, ids, topk, sampling, positions, vocab, ranks):
    """kernels.draft_logits.draft_logits with this rank's rows of a head of `vocab` rows; ids are the whole table, read for the winners."""
    if ranks.size == 1:
        return draft_kernel(hidden, head, ids, topk, sampling, positions)
    return _best(hidden, head, ids, topk, sampling, positions, vocab, ranks, False)[:2]


def _best(hidden, head, ids, topk, sampling, positions, vocab, ranks, strict):
    first, last = ranks.span(vocab)
    own = None if sampling.all_greedy else torch.arange(first, last, device=head.device) if ids is None else ids[first:last]
    return merge_topk(ranks.gather(shard_topk(hidden, head, first, own, topk, sampling, positions, strict)), ids, topk)
