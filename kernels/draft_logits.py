"""From draft states to the children of a node: head, normalisation, keyed noise, top-k and the map to target ids."""
import torch

from minispec.kernels.head import head_topk
from minispec.kernels.jit import use_triton
from minispec.kernels.linear import linear
from minispec.kernels.noise import noised


def draft_logits(hidden, head, ids, topk, sampling, positions):
    """The topk children of every row.

    hidden [B, K, h]; head [draft vocab, h]; ids int64 [draft vocab]: the target id of each draft id, or None where the vocabularies are one;
    positions int64 [B, K] of the rows: a child stands one further. The children are the topk of log p + keyed noise (the noise of the *target's*
    choice at that position, so that both tend to the same token; none at temperature 0); their rank in a tree is log p without noise.
    Returns target ids int64 [B, K, topk], distinct in a row, and log-probabilities fp32 [B, K, topk], at most 0, -inf for NaN.
    """
    run = head_topk if use_triton(hidden) else draft_logits_ref
    return run(hidden, head, ids, topk, sampling, positions)[:2]


def draft_logits_ref(hidden, head, ids, topk, sampling, positions):
    logits = linear(hidden, head).float()
    if not sampling.all_greedy:
        logits = logits / torch.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None, None]
    logp = logits.log_softmax(-1).clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    scores = logp
    if not sampling.all_greedy:
        ids = torch.arange(head.shape[0], device=head.device) if ids is None else ids
        scores = noised(logp, sampling.temperature, sampling.seed, positions, ids)
    best = scores.topk(topk, -1).indices
    return best if ids is None else ids[best], logp.gather(-1, best)
