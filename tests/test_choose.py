"""Processed logits and choices: the distribution is exact, and a choice depends on its own row and request alone.

Every chance test has fixed seeds; the bounds are those that a right implementation passes with odds of a million to one each.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from minispec.kernels.choose import Sampling, pick, process
from minispec.kernels.noise import gumbel, noised
from minispec.params import SamplingParams

from .test_noise import chi_square


def exact(logits, params, prompt=(), output=()):
    """Log-probabilities in float64, one row, by sorting and enumerating: written from the definition."""
    x = logits.double().numpy().copy()
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, value in params.logit_bias:
        x[token] += value

    def normal(x):
        return x - x.max() - np.log(np.exp(x - x.max()).sum())
    if params.temperature == 0:
        return normal(x)
    x = normal(x / params.temperature)
    order = np.argsort(-x, kind="stable")
    if params.top_k:
        x[x < x[order[min(params.top_k, len(x)) - 1]]] = -np.inf
        x = normal(x)
    if params.top_p < 1:
        mass, kept = 0.0, []
        for token in order:
            if mass >= params.top_p:
                break
            kept.append(token)
            mass += np.exp(x[token])
        x[x < x[kept].min()] = -np.inf
        x = normal(x)
    if params.min_p:
        x[np.exp(x) < params.min_p * np.exp(x.max())] = -np.inf
    return normal(x)


def build(params, vocab, prompts=None, outputs=None):
    return Sampling.build(params, prompts or [[]] * len(params), outputs or [[]] * len(params), vocab)


def close(found, wanted):
    found = found.double().numpy()
    assert (np.isneginf(found) == np.isneginf(wanted)).all()
    finite = np.isfinite(wanted)
    assert np.abs(found[finite] - wanted[finite]).max() < 2e-5


PARAMS = some.builds(
    SamplingParams, temperature=some.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]), top_k=some.sampled_from([0, 1, 3, 7, 40, 10**6]),
    top_p=some.sampled_from([1.0, 0.95, 0.6, 0.2]), min_p=some.sampled_from([0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=some.sampled_from([1.0, 1.3, 0.8]), presence_penalty=some.sampled_from([0.0, 0.7]),
    frequency_penalty=some.sampled_from([0.0, 0.4, -0.2]), logit_bias=some.sampled_from([{}, {3: 4.0, 5: -math.inf}]))


@given(some.lists(PARAMS, min_size=1, max_size=4), some.integers(0, 2**31), some.sampled_from([8, 40, 41]), some.integers(1, 4))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_processed_distribution(params, seed, vocab, rows):
    """Any mix of parameters in one batch, rows in a chain: each row as enumerated in float64, its ancestors counted.
    Derandomised: about once in 100,000 rows a sum lies within rounding of top-p and float32 may decide otherwise."""
    torch.manual_seed(seed)
    logits = torch.randn(len(params), rows, vocab) * 3
    tokens = torch.randint(vocab, (len(params), rows))
    prompts, outputs = torch.randint(vocab, (2, len(params), 6)).tolist()
    ancestors = torch.ones(rows, rows).tril().bool().expand(len(params), rows, rows)
    found = process(logits, build(params, vocab, prompts, outputs), tokens, ancestors)
    for b, one in enumerate(params):
        for r in range(rows):
            close(found[b, r], exact(logits[b, r], one, prompts[b], outputs[b] + tokens[b, :r + 1].tolist()))


def test_ties_stay_or_go_together():
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0, 1.0, -1.0]]])
    for params, kept in ((dict(top_k=2), 4), (dict(top_k=1), 1), (dict(top_k=4), 4), (dict(top_k=5), 5), (dict(top_p=0.5), 4),
                         (dict(top_p=0.3), 1), (dict(top_k=2, top_p=0.999), 4), (dict(top_p=1e-9), 1), (dict(min_p=1.0), 1)):
        found = process(logits, build([SamplingParams(temperature=1.0, **params)], 6))
        assert found.isfinite().sum() == kept, params
        assert abs(found.exp().sum() - 1) < 1e-6


@pytest.mark.parametrize("vocab", [50, 1000])
def test_against_transformers(vocab):
    """The warpers that transformers' generate applies, in its order (with the penalties first)."""
    from transformers import generation as hf
    torch.manual_seed(0)
    for seed in range(25):
        logits, ids = torch.randn(1, vocab) * 4, torch.randint(vocab, (1, 9))
        params = SamplingParams(temperature=0.8, top_k=[0, 5, 30][seed % 3], top_p=[1.0, 0.8, 0.5][seed // 3 % 3],
                                min_p=[0.0, 0.1][seed // 9 % 2], repetition_penalty=[1.0, 1.4, 0.6][seed % 3])
        chain = [hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty), hf.TemperatureLogitsWarper(params.temperature)]
        chain += [hf.TopKLogitsWarper(params.top_k)] if params.top_k else []
        chain += [hf.TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
        chain += [hf.MinPLogitsWarper(params.min_p)] if params.min_p else []
        wanted = hf.LogitsProcessorList(chain)(ids, logits.clone()).log_softmax(-1)
        found = process(logits[None], build([params], vocab, prompts=ids[:, :4].tolist(), outputs=ids[:, 4:].tolist()))
        close(found[0, 0], wanted[0].double().numpy())


N = 200_000
DRAWS = [dict(temperature=1.0), dict(temperature=0.6), dict(temperature=1.7), dict(temperature=1.0, top_k=4),
         dict(temperature=0.8, top_p=0.7), dict(temperature=1.3, min_p=0.15),
         dict(temperature=1.2, top_k=9, top_p=0.9, min_p=0.05),
         dict(temperature=1.0, repetition_penalty=1.5), dict(temperature=0.9, presence_penalty=0.8, frequency_penalty=0.5),
         dict(temperature=1.0, logit_bias={2: 2.0, 7: -math.inf}),
         dict(temperature=1.1, top_k=8, repetition_penalty=1.3, frequency_penalty=0.3, logit_bias={1: 1.0})]


def frequencies(counts, expected):
    """chi_square with all cells below 5 expected as one, which is left out where it stays below 5."""
    small = (expected < 5) & (expected > 0)
    counts, expected = np.append(counts[~small], counts[small].sum()), np.append(expected[~small], expected[small].sum())
    last = len(counts) - (expected[-1] < 5)
    chi_square(counts[:last], expected[:last] * counts[:last].sum() / expected[:last].sum())


@pytest.mark.parametrize("named", DRAWS, ids=lambda named: " ".join(named))
@pytest.mark.parametrize("keyed_by", ["position", "seed"])
def test_emitted_frequencies(named, keyed_by):
    """Two rows of a path at 200,000 places: what is chosen after the root, and after its child, is distributed as enumerated; the
    pairs as their product, so the draws are independent. The places are positions under one seed, or seeds at one position."""
    torch.manual_seed(1)
    logits = torch.randn(2, 16) * 1.5
    params = SamplingParams(seed=20, **named)
    prompt, output, path = [1, 2, 3], [2, 5, 5], [4, 9]
    places = torch.arange(0, 2 * N, 2)
    sampling = build([params], 16, [prompt], [output])  # of one request: broadcasts over the places
    if keyed_by == "seed":
        sampling, places = replace(sampling, seed=places), torch.zeros(N, dtype=torch.int64)
    ids, _ = pick(logits.expand(N, 2, 16), places[:, None] + torch.tensor([0, 1]), sampling, torch.tensor([path]).expand(N, 2),
                    torch.ones(2, 2).tril().bool().expand(N, 2, 2))
    both = [np.exp(exact(logits[row], params, prompt, output + path[:row + 1])) for row in range(2)]
    for row in range(2):
        frequencies(np.bincount(ids[:, row].numpy(), minlength=16), N * both[row])
    frequencies(np.bincount((ids[:, 0] * 16 + ids[:, 1]).numpy(), minlength=256), N * np.outer(*both).flatten())


def test_the_test_sees_a_small_error():
    """The power of the above: a probability 8 % off in one of 16 tokens is rejected."""
    p = np.full(16, 1 / 16)
    with pytest.raises(AssertionError):
        frequencies(N * p * (1 + 0.08 * (np.arange(16) == 3)), N * p)


# ---- choices


def mixed_batch(rows=5, vocab=64):
    torch.manual_seed(5)
    params = [SamplingParams(), SamplingParams(temperature=0.8, seed=1), SamplingParams(temperature=1.2, seed=2, top_k=5),
              SamplingParams(temperature=1, seed=3, top_p=0.7, logprobs=True), SamplingParams(temperature=1, seed=4, min_p=0.2),
              SamplingParams(repetition_penalty=1.8, frequency_penalty=0.4), SamplingParams(logit_bias={3: 8.0}, logprobs=True),
              SamplingParams(temperature=0.5, seed=5, presence_penalty=1.0, top_k=20, top_p=0.9, min_p=0.01)]
    size = len(params)
    logits, tokens = torch.randn(size, rows, vocab) * 3, torch.randint(vocab, (size, rows))
    prompts, outputs = torch.randint(vocab, (2, size, 7)).tolist()
    parents = [-1, 0, 0, 1, 3]
    ancestors = torch.eye(rows).bool()
    for row, parent in enumerate(parents[1:], 1):
        ancestors[row] |= ancestors[parent]
    positions = torch.arange(size)[:, None] * 10 + ancestors.sum(1)
    return params, prompts, outputs, logits, positions, tokens, ancestors.expand(size, rows, rows)


def test_company_changes_nothing():
    """Each request alone, and each row alone with its path in the output, gives the batch's ids and very log-probabilities."""
    params, prompts, outputs, logits, positions, tokens, ancestors = mixed_batch()
    vocab = logits.shape[-1]
    together, logprobs = pick(logits, positions, Sampling.build(params, prompts, outputs, vocab), tokens, ancestors)
    for b, one in enumerate(params):
        alone, own = pick(logits[b:b + 1], positions[b:b + 1], build([one], vocab, [prompts[b]], [outputs[b]]), tokens[b:b + 1],
                            ancestors[b:b + 1])
        assert torch.equal(alone[0], together[b]) and (own is None) == (not one.logprobs)
        assert own is None or torch.equal(own[0], logprobs[b])
        for r in range(logits.shape[1]):
            path = [int(tokens[b, s]) for s in range(r + 1) if ancestors[b, r, s]]
            sampling = build([one], vocab, [prompts[b]], [outputs[b] + path])
            single, own = pick(logits[b:b + 1, r:r + 1], positions[b:b + 1, r:r + 1], sampling)
            assert single.item() == together[b, r] and (own is None or own.item() == logprobs[b, r])


def test_choice_is_the_argmax_of_log_probability_plus_noise():
    """The definition of sample-and-match, with the log-probabilities of `process`; and logprobs are those."""
    params, prompts, outputs, logits, positions, tokens, ancestors = mixed_batch()
    sampling = Sampling.build(params, prompts, outputs, 64)
    ids, logprobs = pick(logits, positions, sampling, tokens, ancestors)
    scores = process(logits, sampling, tokens, ancestors)
    noise = gumbel(sampling.seed[:, None, None], positions[..., None] + 1, torch.arange(64))
    assert torch.equal(ids, torch.where(sampling.temperature[:, None, None] > 0, scores + noise, scores).argmax(-1))
    assert torch.allclose(logprobs, scores.gather(-1, ids[..., None])[..., 0], atol=2e-6)
    assert torch.equal(ids[0], logits[0].argmax(-1)) and (ids[6] == 3).any()


def test_lowest_id_wins_a_tie():
    for vocab in (5, 64, 1000, 4096):
        logits = torch.zeros(1, 3, vocab)
        logits[0, 1, [vocab - 1, vocab // 2]] = 1.0
        logits[0, 2, 2:] = 1.0
        for one in (SamplingParams(), SamplingParams(logprobs=True), SamplingParams(temperature=1.0)):
            sampling = build([one, SamplingParams()], vocab)
            ids, _ = pick(logits.expand(2, 3, vocab), torch.zeros(2, 3, dtype=torch.int64), sampling)
            assert ids[1].tolist() == [0, vocab // 2, 2]


def test_greedy_is_not_rounded_by_log_softmax():
    """Two logits one unit in the last place apart: with and without log-probabilities, alone and in company, the larger one."""
    logits = torch.full((1, 1, 300), 0.5)
    logits[0, 0, 200] = torch.nextafter(torch.tensor(0.5), torch.tensor(1.0))
    for params in ([SamplingParams()], [SamplingParams(logprobs=True)],
                   [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)],
                   [SamplingParams(), SamplingParams(repetition_penalty=2.0, logit_bias={1: 1.0})]):
        ids, _ = pick(logits.expand(len(params), 1, 300), torch.zeros(len(params), 1, dtype=torch.int64), build(params, 300))
        assert ids[0, 0] == 200


def test_a_forbidden_id_never_comes():
    """Bias -inf on the likeliest ids, also where top-k or top-p would keep nothing else, at any temperature."""
    logits = torch.arange(8.0).expand(1, 200, 8) * 5
    positions = torch.arange(200)[None]
    for named in ({}, dict(temperature=1e-6), dict(temperature=1e6), dict(temperature=1, top_k=1), dict(temperature=1, top_p=.1)):
        params = SamplingParams(logit_bias={7: -math.inf, 6: -math.inf}, logprobs=True, **named)
        ids, logprobs = pick(logits, positions, build([params], 8))
        assert (ids < 6).all() and logprobs.isfinite().all() and (logprobs <= 0).all()
        assert (ids == 5).all() or named.get("temperature") == 1e6


def test_extreme_values_stay_finite():
    logits = torch.tensor([[[3e4, -3e4, 0.0, 2e4]]])
    hard = dict(repetition_penalty=0.01, presence_penalty=-100, frequency_penalty=100, logit_bias={1: 1000, 2: -1000})
    for temperature in (0.0, 1e-6, 1e6):
        found = process(logits, build([SamplingParams(temperature=temperature, **hard)], 4, [[0, 1]], [[2] * 1000]))
        assert not found.isnan().any() and abs(found.exp().sum() - 1) < 1e-5


def test_half_precision_logits():
    torch.manual_seed(2)
    logits = torch.randn(1, 4, 50).bfloat16()
    positions = torch.arange(4)[None]
    for params in (SamplingParams(), SamplingParams(temperature=1, top_k=9, logprobs=True), SamplingParams(presence_penalty=1)):
        sampling = build([params], 50, [[1, 2]], [[3]])
        for found, wanted in zip(pick(logits, positions, sampling), pick(logits.float(), positions, sampling)):
            assert found is wanted is None or torch.equal(found, wanted)


def test_build():
    sampling = build([SamplingParams(), SamplingParams(top_k=5, top_p=0.5)], 10)
    assert sampling.all_greedy and not sampling.filters and sampling.ranked == 0 and sampling.bias is sampling.repetition is None
    assert build([SamplingParams(temperature=1, top_k=5, top_p=0.5), SamplingParams(temperature=1, top_k=3)], 10).ranked == 5
    assert build([SamplingParams(temperature=1, top_k=5), SamplingParams(temperature=1, top_p=0.3)], 10).ranked == 10
    assert build([SamplingParams(temperature=1, top_k=99)], 10).ranked == 10
    assert build([SamplingParams(temperature=1, min_p=0.3)], 10).ranked == 0
    sampling = build([SamplingParams(presence_penalty=1), SamplingParams()], 4, [[0, 0], []], [[1, 1, 3], []])
    assert sampling.output_counts.tolist() == [[0, 2, 0, 1], [0] * 4]
    assert sampling.prompt_seen.tolist() == [[True] + [False] * 3, [False] * 4]


# ---- the draft's children


def test_a_perfect_draft_proposes_what_the_target_chooses():
    """With the target's own distribution over some of the ids, the first child is the target's choice where it is there."""
    torch.manual_seed(6)
    logits, positions = torch.randn(3, 50, 40) * 2, torch.arange(50).expand(3, 50) + 7
    params = [SamplingParams(), SamplingParams(temperature=0.7, seed=8), SamplingParams(temperature=1.5, seed=9)]
    sampling = build(params, 40)
    ids, _ = pick(logits, positions, sampling)
    kept = torch.randperm(40)[:25]
    scale = torch.tensor([1.0, 0.7, 1.5])[:, None, None]
    scores = noised((logits[..., kept] / scale).log_softmax(-1), sampling.temperature, sampling.seed, positions, kept)
    assert torch.equal(scores[0], (logits[0, :, kept]).log_softmax(-1))
    reachable = (ids[..., None] == kept).any(-1)
    assert 40 < reachable.sum() < 140 and torch.equal(kept[scores.argmax(-1)][reachable], ids[reachable])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_noise_is_the_same_on_cuda():
    keys = torch.randint(2**62, (64, 1)), torch.randint(2**20, (64, 1)), torch.arange(65536)
    assert torch.equal(gumbel(*(key.cuda() for key in keys)).cpu(), gumbel(*keys))
