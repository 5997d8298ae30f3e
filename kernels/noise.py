"""Gumbel noise keyed by (seed, position, token id): one function, bit for bit, on CPU and GPU.

All integers are 32-bit and wrap; mix(x) is the finaliser `lowbias32` of Chris Wellons:
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

import torch
from torch import Tensor

from minispec.kernels.jit import jit, tl

LOG2 = 0.69314718246459960938  # float32(log(2))
SQRT_HALF_BITS = 0x3F3504F3  # float32(sqrt(1/2))
# log(1 + f) / f on sqrt(1/2) - 1 .. sqrt(2) - 1, fitted for the least relative error (1.7e-7), highest power first
Q = (-0.10106899589300156, 0.1622258424758911, -0.17250829935073853, 0.19900165498256683, -0.24969908595085144,
     0.33335059881210327, -0.5000036358833313, 0.9999999403953552)
Q_, LOG2_, SQRT_HALF_BITS_ = tl.constexpr(Q), tl.constexpr(LOG2), tl.constexpr(SQRT_HALF_BITS)  # the same, for Triton


def noised(scores: Tensor, temperature: Tensor, seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """scores plus the noise of the token after each row; none for requests at temperature 0.

    scores float32 [B, R, n]; temperature and seed [B]; positions int64 [B, R] of the rows; ids int64 [n], each column's target id.
    `choose` takes the largest; the draft takes the topk largest of its own as children, so that both tend to the same token.
    """
    noise = gumbel(seed[:, None, None], positions[..., None] + 1, ids)
    return torch.where(temperature[:, None, None] > 0, scores + noise, scores)


def gumbel(seed: Tensor, position: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise float32, a function of (seed, position, token) alone; int64 tensors that broadcast."""
    low, high, position, token = (key.to(torch.int32) for key in (seed, seed >> 32, position, token))  # keeps the low 32 bits
    key0 = _mix(_mix(_mix(low ^ (0x9E3779B9 - 2**32)) ^ high) ^ position)
    key1 = _mix(_mix(_mix(high ^ (0xBB67AE85 - 2**32)) ^ low) ^ position)
    h = _mix(_mix(token ^ key0).add_(key1))
    small = (h >> 30) == 0
    x = _shift(~h, 1).float().add_(0.5).mul_(2.0**-31)
    exponent, f = _split(x)
    f = torch.where(small, h.float().add_(0.5).mul_(-(2.0**-32)), f)
    return _log(*_split(_log(exponent.masked_fill_(small, 0), f).neg_())).neg_()


def _shift(x, bits):
    """Logical shift right of an int32 tensor."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _mix(x):
    x = _shift(x, 16).bitwise_xor_(x).mul_(0x7FEB352D)
    x = _shift(x, 15).bitwise_xor_(x).mul_(0x846CA68B - 2**32)
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


@jit
def keyed_noise(seed, position, token):
    """gumbel, of tiles that broadcast: seed and position int64. A kernel that calls it must be launched with enable_fp_fusion=False."""
    low, high, position = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    key0 = mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ position)
    key1 = mix(mix(mix(high ^ 0xBB67AE85) ^ low) ^ position)
    h = mix(mix(token.to(tl.uint32) ^ key0) + key1)
    small = (h >> 30) == 0
    x = ((h ^ 0xFFFFFFFF) >> 1).to(tl.float32) + 0.5
    exponent, f = split(x * 4.656612873077393e-10)
    f = tl.where(small, (h.to(tl.float32) + 0.5) * -2.3283064365386963e-10, f)
    exponent, f = split(log(tl.where(small, 0, exponent), f) * -1.0)
    return log(exponent, f) * -1.0          # not 0 - x, which has another zero


@jit
def mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@jit
def split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - SQRT_HALF_BITS_) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0


@jit
def log(exponent, f):
    value = f * Q_[0]
    for i in tl.static_range(1, 8):
        value = (value + Q_[i]) * f
    return value + exponent.to(tl.float32) * LOG2_
