"""The target's token after each row: processed logits plus noise keyed by (seed, position, token id), then argmax.

The noise. All integers are 32-bit and wrap; mix(x) is the finaliser `lowbias32` of Chris Wellons:
    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16
    low, high = seed mod 2**32, seed div 2**32
    key0 = mix(mix(mix(low  ^ 0x9E3779B9) ^ high) ^ position)        key1 = mix(mix(mix(high ^ 0xBB67AE85) ^ low) ^ position)
    h = mix(mix(token ^ key0) + key1)                                within a row a bijection of the token: no two tie
    v = (h + 0.5) * 2**-32,  E = -log(1 - v),  g = -log(E)           Gumbel; g is at most 22.9 (v = 2**-33)
and in float32, each multiplication, addition and conversion rounding once (no fused multiply-add, no library log, no division):
    log(x): e = (bits(x) - bits(sqrt(1/2))) >> 23,  f = x * 2**-e - 1,  log(x) = f * Q(f) + e * log(2), Q of degree 7 by Horner
    E:      h < 2**30:  f = -((h + 0.5) * 2**-32) and e = 0, which keeps the digits of small E, where the winners are;
            else        x = (((2**32 - 1 - h) >> 1) + 0.5) * 2**-31
So CPU and GPU agree bit for bit. Against exact arithmetic on the same v the error of g is under 1e-6 for
|g| < 8, and under 2.2e-6 everywhere.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2 = 0.69314718246459960938  # float32(log(2))
SQRT_HALF_BITS = 0x3F3504F3  # float32(sqrt(1/2))
# log(1 + f) / f on sqrt(1/2) - 1 .. sqrt(2) - 1, fitted for the least relative error (1.7e-7), highest power first
Q = (-0.10106899589300156, 0.1622258424758911, -0.17250829935073853, 0.19900165498256683, -0.24969908595085144,
     0.33335059881210327, -0.5000036358833313, 0.9999999403953552)


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


def choose(logits: Tensor, positions: Tensor, sampling: Sampling, tokens: Tensor | None = None,
           ancestors: Tensor | None = None) -> tuple:
    """The target's own token after each row, and its log-probability under the processed distribution.

    logits     float [B, R, V]
    positions  int64 [B, R], of the rows; the token chosen after a row stands one further, which keys the noise
    tokens     int64 [B, R], the rows' tokens; None when they are in the prompt already (prefill), so that none counts as output
    ancestors  bool [B, R, R]; [b, r, s] says that row s is row r or an ancestor of it
    Returns (ids int64 [B, R], logprobs float32 [B, R], None unless wanted). Equal scores give the lowest id.
    A choice depends on nothing but its own row and its own request. It uses no sum over the vocabulary except for top-p.
    """
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


def noised(scores: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """scores plus the noise of the token after each row; none for requests at temperature 0.

    scores float32 [B, R, n]; temperature and seed [B]; positions int64 [B, R] of the rows; ids int64 [n], their target ids.
    `choose` takes the largest; the draft takes the topk largest of its log-probabilities at the request's temperature as
    children, so that both tend to the same token.
    """
    noise = gumbel(seed[:, None, None], positions[..., None] + 1, ids)
    return torch.where(_per_row(temperature) > 0, scores + noise, scores)


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise float32, a function of (seed, position, token) alone; int64 tensors that broadcast."""
    low, high, position, token = (key.to(torch.int32) for key in (seed, seed >> 32, position, token))  # keeps the low 32 bits
    key0 = _mix(_mix(_mix(low ^ _signed(0x9E3779B9)) ^ high) ^ position)
    key1 = _mix(_mix(_mix(high ^ _signed(0xBB67AE85)) ^ low) ^ position)
    h = _mix(_mix(token ^ key0).add_(key1))
    small = (h >> 30) == 0
    x = _shift(~h, 1).float().add_(0.5).mul_(2.0**-31)
    exponent, f = _split(x)
    f = torch.where(small, h.float().add_(0.5).mul_(-(2.0**-32)), f)
    return _log(*_split(_log(exponent.masked_fill_(small, 0), f).neg_())).neg_()


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


def _signed(constant):
    """The int32 with the bits of this 32-bit constant."""
    return constant - (1 << 32) if constant >> 31 else constant


def _shift(x, bits):
    """Logical shift right of an int32 tensor."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x):
    x = _shift(x, 16).bitwise_xor_(x).mul_(0x7FEB352D)
    x = _shift(x, 15).bitwise_xor_(x).mul_(_signed(0x846CA68B))
    return _shift(x, 16).bitwise_xor_(x)


def _split(x):
    """x = (1 + f) * 2**e with 1 + f from sqrt(1/2) to sqrt(2): (e int32, f float32), both exact."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return exponent, (bits - (exponent << 23)).view(torch.float32).sub_(1.0)


def _log(exponent, f):
    value = f * Q[0]
    for coefficient in Q[1:]:
        value.add_(coefficient).mul_(f)
    return value.add_(exponent.float().mul_(LOG2))
