"""The keyed noise is the documented function, bit for bit, and is Gumbel noise, independent between neighbouring keys.

Every chance test has fixed seeds, so it cannot fail by chance from one run to the next; the bounds are those that a right
implementation passes with odds of a million to one in each comparison.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from minispec.kernels.noise import gumbel

PINNED = [3.054292917251587, -0.41777926683425903, -0.7381134629249573]  # any other value changes what every seed means
SIGMA = 4.89  # two-sided odds of 1e-6
Q = [0.9999999403953552, -0.5000036358833313, 0.33335059881210327, -0.24969908595085144, 0.19900165498256683,
     -0.17250829935073853, 0.1622258424758911, -0.10106899589300156]


def chi_square(counts, expected):
    """Fails where Pearson's statistic passes its 1 - 1e-6 quantile (Wilson and Hilferty)."""
    counts, expected = np.asarray(counts, float), np.asarray(expected, float)
    assert counts[expected == 0].sum() == 0, "drew what has no probability"
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert expected.min() >= 5 and abs(counts.sum() - expected.sum()) < 1e-3 * counts.sum()
    df = len(counts) - 1
    if df:
        bound = df * (1 - 2 / (9 * df) + 4.7534 * math.sqrt(2 / (9 * df))) ** 3
        assert ((counts - expected) ** 2 / expected).sum() < bound


def mix(x):
    x = x ^ x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x = x ^ x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def unmix(x):
    x = x ^ x >> 16
    x = x * pow(0x846CA68B, -1, 1 << 32) & 0xFFFFFFFF
    x = x ^ x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, 1 << 32) & 0xFFFFFFFF
    return x ^ x >> 16


def keys(seed, position):
    low, high = seed & 0xFFFFFFFF, seed >> 32
    return mix(mix(mix(low ^ 0x9E3779B9) ^ high) ^ position), mix(mix(mix(high ^ 0xBB67AE85) ^ low) ^ position)


def scalar_log(x=None, f=None):
    one = np.float32
    e = 0
    if f is None:
        bits = int(one(x).view(np.int32))
        e = (bits - 0x3F3504F3) >> 23
        f = np.int32(bits - (e << 23)).view(one) - one(1)
    value = one(Q[-1]) * f
    for c in Q[-2::-1]:
        value = (value + one(c)) * f
    return value + one(e) * one(math.log(2))


def scalar_gumbel(h):
    """The docstring of kernels/noise.py once more, one number at a time."""
    one = np.float32
    if h < 1 << 30:
        inner = scalar_log(f=-((one(h) + one(0.5)) * one(2.0**-32)))
    else:
        inner = scalar_log(x=(one((2**32 - 1 - h) >> 1) + one(0.5)) * one(2.0**-31))
    return -scalar_log(x=-inner)


def token_of(h, seed, position):
    """The token to which the hash gives h."""
    key0, key1 = keys(seed, position)
    return unmix((unmix(h) + 2**32 - key1) & 0xFFFFFFFF) ^ key0


EDGES = [0, 1, 2, 2**23, 2**24 + 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1,
         int(2**32 * (1 - math.exp(-1))), int(2**32 * (1 - math.sqrt(0.5)))]


@given(some.sampled_from(EDGES) | some.integers(0, 2**32 - 1), some.integers(0, 2**63 - 1), some.integers(0, 2**31 - 1))
@settings(max_examples=300, deadline=None)
def test_noise_is_the_documented_function(h, seed, position):
    token = token_of(h, seed, position)
    value = gumbel(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    assert value.item() == float(scalar_gumbel(h))


def test_noise_is_pinned():
    """Three values, so that no rewrite changes what a seed means."""
    value = gumbel(torch.tensor([0, 1, 2**63 - 1]), torch.tensor([1, 1000, 131072]), torch.tensor([0, 4095, 163839]))
    assert value.tolist() == PINNED


def test_noise_is_accurate_and_bounded():
    near = np.arange(2**12)
    h = np.concatenate([np.arange(0, 2**32, 997), near, 2**30 - 2048 + near, 2**32 - 1 - near])
    token = token_of(h.astype(np.uint64), 7, 9).astype(np.int64)
    value = gumbel(torch.tensor([7]), torch.tensor([9]), torch.from_numpy(token)).double().numpy()
    # the exact function of the same number: above 2**30 the last bit of h is dropped
    below = np.where(h < 2**30, -np.log1p(-(h + 0.5) / 2**32), -np.log(((2**32 - 1 - h) // 2 + 0.5) / 2**31))
    error = np.abs(value + np.log(below))
    assert error.max() < 2.2e-6 and error[np.abs(value) < 8].max() < 1e-6
    assert np.isfinite(value).all() and 22.8 < value.max() < 22.9 and -3.15 < value.min() < -3.0


def uniform(seed, position, token):
    return torch.exp(-torch.exp(-gumbel(seed, position, token).double()))


SEEDS = [0, 1, 2, 1 << 32, (1 << 32) + 1, 12345, 2**63 - 1]


def test_noise_is_gumbel():
    """2**18 values a seed: 256 equal bins; mean and variance within SIGMA of Euler's constant and pi**2 / 6."""
    for seed in SEEDS:
        value = gumbel(torch.tensor(seed), torch.arange(64)[:, None], torch.arange(4096))
        assert value.unique().numel() > 0.97 * value.numel() and (value.amax(1) > 5).all()
        n = value.numel()
        bins = (torch.exp(-torch.exp(-value.double())) * 256).long().flatten()
        chi_square(np.bincount(bins, minlength=256), np.full(256, n / 256))
        value = value.double()
        assert abs(value.mean() - 0.5772156649) < SIGMA * math.sqrt(math.pi**2 / 6 / n)
        assert abs(value.var() - math.pi**2 / 6) < SIGMA * math.sqrt((22 * math.pi**4 / 180 - math.pi**4 / 36) / n)


def test_the_tail_is_exact():
    """Where winners come from: of 2**22 values, those above 6, 8, 10, 12 are as many as a Gumbel has, within SIGMA."""
    value = gumbel(torch.tensor(5), torch.arange(64)[:, None], torch.arange(65536))
    for at in (6, 8, 10, 12):
        expected = value.numel() * -math.expm1(-math.exp(-at))
        assert abs((value > at).sum().item() - expected) < SIGMA * math.sqrt(expected) + 1


@pytest.mark.parametrize("other", ["position", "token", "seed low", "seed high", "position and token"])
def test_neighbours_are_independent(other):
    """Pairs of values of neighbouring keys: correlation 0 and 16 x 16 equal cells, also 2, 16 and 1024 apart."""
    position, token, seed = torch.arange(64)[:, None], torch.arange(4096), torch.tensor(99)
    for step in (1, 2, 16, 1024):
        a = uniform(seed, position, token)
        b = {"position": lambda: uniform(seed, position + step, token), "token": lambda: uniform(seed, position, token + step),
             "seed low": lambda: uniform(seed + step, position, token),
             "seed high": lambda: uniform(seed + (step << 32), position, token),
             "position and token": lambda: uniform(seed, position + step, token + step)}[other]()
        n = a.numel()
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < SIGMA / math.sqrt(n)
        cells = ((a * 16).long() * 16 + (b * 16).long()).flatten()
        chi_square(np.bincount(cells, minlength=256), np.full(256, n / 256))


def test_winners_of_neighbours_are_independent():
    """The argmax over 16 ids at positions p and p + 1, and for seeds s and s + 1: 256 equal cells each, 2**16 pairs."""
    first = gumbel(torch.tensor(3), torch.arange(2**16 + 1)[:, None], torch.arange(16)).argmax(-1)
    other = gumbel(torch.tensor(4), torch.arange(2**16 + 1)[:, None], torch.arange(16)).argmax(-1)
    for a, b in ((first[:-1], first[1:]), (first, other)):
        chi_square(np.bincount((a * 16 + b).numpy(), minlength=256), np.full(256, len(a) / 256))
