"""The target's token after each row: processed logits plus noise keyed by (seed, position, token id), then argmax."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minispec.kernels.head import head_logits, head_topk
from minispec.kernels.jit import use_triton
from minispec.kernels.linear import linear
from minispec.kernels.noise import noised


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters of B requests as tensors; what nobody asks for is None."""

    temperature: Tensor  # float32 [B]; 0 is greedy
    top_k: Tensor  # int64 [B]; 0 keeps all
    top_p: Tensor  # float32 [B]
    min_p: Tensor  # float32 [B]
    seed: Tensor  # int64 [B]
    all_greedy: bool = True
    wants_logprobs: bool = False
    filters: bool = False  # some sampled request has top-k, top-p or min-p
    ranked: int = 0  # how many of the largest logits top-k and top-p must see in order; 0 is none
    repetition: Tensor | None = None  # float32 [B]; the four below are set together with it
    presence: Tensor | None = None  # float32 [B]
    frequency: Tensor | None = None  # float32 [B]
    output_counts: Tensor | None = None  # int32 [B, V], without the pending root
    prompt_seen: Tensor | None = None  # bool [B, V]
    bias: Tensor | None = None  # float32 [B, V]

    @classmethod
    def build(cls, params: list, prompts: list, outputs: list, vocab: int, device="cpu") -> "Sampling":
        """From B SamplingParams, prompt ids and emitted ids, these without the pending root, which is a row of the forward."""
        def column(name, dtype):
            return torch.tensor([getattr(one, name) for one in params], dtype=dtype, device=device)

        sampled = [one for one in params if one.temperature > 0]
        ordered = [one for one in sampled if one.top_k or one.top_p < 1]
        extra = {}
        if any((one.repetition_penalty, one.presence_penalty, one.frequency_penalty) != (1, 0, 0) for one in params):
            counts = [torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab) for ids in outputs]
            seen = [torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab) > 0 for ids in prompts]
            extra = {name: column(f"{name}_penalty", torch.float32) for name in ("repetition", "presence", "frequency")}
            extra |= {"output_counts": torch.stack(counts).to(device, torch.int32), "prompt_seen": torch.stack(seen).to(device)}
        if any(one.logit_bias for one in params):
            bias = torch.zeros(len(params), vocab)
            for row, one in zip(bias, params):
                for token, value in one.logit_bias:
                    row[token] = value
            extra["bias"] = bias.to(device)
        return cls(column("temperature", torch.float32), column("top_k", torch.int64), column("top_p", torch.float32),
                   column("min_p", torch.float32), column("seed", torch.int64), not sampled, any(one.logprobs for one in params),
                   any(one.top_k or one.top_p < 1 or one.min_p > 0 for one in sampled),
                   max((min(one.top_k or vocab, vocab) for one in ordered), default=0), **extra)


def choose(hidden: Tensor, head: Tensor, positions: Tensor, sampling: Sampling, tokens: Tensor | None = None,
           ancestors: Tensor | None = None) -> tuple:
    """The target's own token after each row, and its log-probability under the processed distribution.

    hidden     float [B, R, h], after the final norm
    head       float [V, h]
    positions  int64 [B, R], of the rows; the token chosen after a row stands one further, which keys the noise
    tokens     int64 [B, R], the rows' tokens; None when they are in the prompt already (prefill), so that none counts as output
    ancestors  bool [B, R, R]; [b, r, s] says that row s is row r or an ancestor of it
    Returns (ids int64 [B, R], logprobs float32 [B, R], None unless wanted, finite bool [B, R]: whether the row's logits all are).
    Equal scores give the lowest id. A choice depends on nothing but its own row and its own request.
    On CUDA the logits are written only where something looks at a whole row: filters, penalties, bias.
    """
    if not use_triton(hidden):
        return choose_ref(hidden, head, positions, sampling, tokens, ancestors)
    if sampling.filters or sampling.repetition is not None or sampling.bias is not None:
        logits = head_logits(hidden, head)
        return *pick(logits, positions, sampling, tokens, ancestors), logits.sum(-1).isfinite()
    ids, logprobs, finite = head_topk(hidden, head, None, 1, sampling, positions, strict=True)
    return ids[..., 0], logprobs[..., 0] if sampling.wants_logprobs else None, finite


def choose_ref(hidden, head, positions, sampling, tokens=None, ancestors=None):
    logits = linear(hidden, head).float()
    return *pick(logits, positions, sampling, tokens, ancestors), logits.sum(-1).isfinite()


def pick(logits: Tensor, positions: Tensor, sampling: Sampling, tokens: Tensor | None = None,
         ancestors: Tensor | None = None) -> tuple:
    """`choose` from logits float [B, R, V]: (ids, logprobs). It uses no sum over the vocabulary except for top-p."""
    if sampling.all_greedy and not sampling.wants_logprobs:
        return _adjust(logits, sampling, tokens, ancestors).argmax(-1), None
    scores = _filter(_adjust(logits, sampling, tokens, ancestors).float(), sampling)
    noisy = scores if sampling.all_greedy else noised(scores, sampling.temperature, sampling.seed, positions,
                                                      torch.arange(logits.shape[-1], device=logits.device))
    ids = noisy.argmax(-1)  # x - max is 0 for the largest x alone, so greedy rows choose as the logits do, rounded or not
    if not sampling.wants_logprobs:
        return ids, None
    return ids, scores.gather(-1, ids[..., None])[..., 0] - scores.logsumexp(-1)


def process(logits: Tensor, sampling: Sampling, tokens: Tensor | None = None, ancestors: Tensor | None = None) -> Tensor:
    """Log-probabilities float32 [B, R, V] of the distribution that `choose` draws from, -inf outside; arguments as there.

    Penalties and bias, then temperature, top-k, top-p (of what top-k left, renormalised), min-p, renormalised.
    At temperature 0 the filters do nothing and the temperature is 1.
    """
    scores = _filter(_adjust(logits, sampling, tokens, ancestors).float(), sampling)
    return scores - scores.logsumexp(-1, keepdim=True)


def _adjust(logits, sampling, tokens, ancestors):
    """Penalties over prompt and output, the row's own ancestors included, then bias."""
    if sampling.repetition is not None:
        counts = sampling.output_counts[:, None]
        if tokens is not None:
            counts = counts.expand(logits.shape).scatter_add(-1, tokens[:, None].expand(ancestors.shape), ancestors.int())
        repetition = torch.where((counts > 0) | sampling.prompt_seen[:, None], _per_row(sampling.repetition), 1.0)
        logits = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = logits - _per_row(sampling.presence) * (counts > 0) - _per_row(sampling.frequency) * counts
    return logits if sampling.bias is None else logits + sampling.bias[:, None]


def _filter(adjusted, sampling):
    """(adjusted - max) / T with -inf where top-k, top-p or min-p exclude; not normalised, so that its largest value is exactly 0.
    The three are thresholds on the score: of equal scores all stay or none, whatever order a sort gives them."""
    temperature = _per_row(sampling.temperature)
    sampled = temperature > 0
    scores = (adjusted - adjusted.amax(-1, keepdim=True)) * torch.where(sampled, temperature, 1.0).reciprocal()
    if not sampling.filters:
        return scores
    # min_p 0 gives log(0) = -inf, no threshold
    threshold = _per_row(sampling.min_p).log().expand(*scores.shape[:2], 1)
    if sampling.ranked:
        whole = sampling.ranked == scores.shape[-1]
        ranked = (scores.sort(descending=True) if whole else scores.topk(sampling.ranked)).values
        top_k, top_p = _per_row(sampling.top_k), _per_row(sampling.top_p)
        last = (top_k.clamp(1, sampling.ranked) - 1).expand(threshold.shape)
        kth = torch.where(top_k > 0, ranked.gather(-1, last), -math.inf)
        left = scores.masked_fill(scores < kth, -math.inf).logsumexp(-1, keepdim=True)
        above = (ranked - left).exp().double().cumsum(-1).roll(1, -1)  # probability of all that rank higher
        above[..., 0] = 0
        last = (above < top_p).sum(-1, keepdim=True) - 1
        mass = torch.where(top_p < 1, ranked.gather(-1, last), -math.inf)
        threshold = threshold.maximum(kth).maximum(mass)
    return scores.masked_fill((scores < threshold) & sampled, -math.inf)


def _per_row(values):
    return values[:, None, None]
