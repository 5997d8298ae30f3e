"""What speculation emits under temperature, top-k, top-p and min-p against the target's exact distribution, in fp64.

Two tests. *Conditional*: each emitted token falls, among the outcomes at its place, at a point of the distribution function that
is uniform if and only if the token was drawn from that distribution (randomised probability transform): one chi-square over all
tokens of all contexts, once with the outcomes ranked by probability (too greedy or too flat shows) and once by id. *Joint*: the
first tokens of many seeds against the enumerated distribution. The seeds are fixed, so the outcome is too; any other choice of
seeds fails a right engine with probability 1e-4 (ODDS) a chi-square. That a wrong distribution fails is tested as well.
"""
import pytest
import torch
from scipy.stats import chi2

from minispec import Engine, SamplingParams

from . import naive, oracle

ODDS = 1e-4
TARGET = dict(vocab_size=16, num_hidden_layers=6, n_routed_experts=4, branch=0.6)
PARAMS = {
    "temperature": dict(temperature=2.0),
    "one": dict(temperature=1.0),
    "top_k": dict(temperature=2.5, top_k=4),
    "top_p": dict(temperature=2.0, top_p=0.8),
    "min_p": dict(temperature=2.5, min_p=0.15),
    "all": dict(temperature=2.5, top_k=9, top_p=0.9, min_p=0.05),
}


def distribution(logits, temperature, top_k=0, top_p=1.0, min_p=0.0):
    """logits fp64 [n, V] -> probabilities: softmax at T, the k largest, the fewest that hold top_p of those, then min_p."""
    p = (logits / temperature).softmax(-1)
    order = p.argsort(-1, descending=True)
    ranked = p.gather(-1, order)
    if top_k:
        ranked[:, top_k:] = 0
    ranked = ranked / ranked.sum(-1, keepdim=True)
    ranked[(ranked.cumsum(-1) - ranked) >= top_p] = 0
    ranked[ranked < min_p * ranked[:, :1]] = 0
    return torch.zeros_like(p).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


def uniform_chance(p, tokens, generator):
    """The chance of points at least this uneven, for outcomes ranked by probability and by id. p [n, V], tokens [n]."""
    worst = 1.0
    for order in (p.argsort(-1, descending=True), torch.arange(p.shape[1]).expand_as(p)):
        ranked = p.gather(-1, order)
        place = (order == tokens[:, None]).int().argmax(-1, keepdim=True)
        below = (ranked.cumsum(-1) - ranked).gather(-1, place)[:, 0]
        point = below + torch.rand(len(tokens), generator=generator, dtype=torch.float64) * ranked.gather(-1, place)[:, 0]
        counts = torch.histc(point, 20, 0, 1)
        expected = len(tokens) / 20
        worst = min(worst, chi2.sf(((counts - expected) ** 2 / expected).sum().item(), 19))
    return worst


@pytest.fixture(scope="module")
def pair(checkpoints):
    target = checkpoints.target(**TARGET)
    return target, checkpoints.fitted(target, dialect="specforge", capture=(2, 3, 4)), naive.Target(target)


@pytest.mark.parametrize("shape", [dict(draft_steps=3, topk=1), dict(draft_steps=3, topk=3, nodes=8)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", PARAMS)
def test_conditional(name, shape, pair):
    target_dir, draft_dir, target = pair
    prompts = [[seed % 16, 3, seed // 16] for seed in range(24)]
    params = [SamplingParams(max_tokens=100, ignore_eos=True, seed=1000 + seed, **PARAMS[name]) for seed in range(24)]
    with Engine(target_dir, draft_dir, max_batch=24, **shape) as engine:
        outputs = engine.generate(prompts, params)
    oracle.assert_mixed(outputs, 3)
    ids = torch.tensor([out.prompt_ids + out.ids for out in outputs])
    logits = target.forward(ids)[0][:, 2:-1].flatten(0, 1)
    tokens, p = ids[:, 3:].flatten(), distribution(logits, **PARAMS[name])
    assert (p.gather(1, tokens[:, None]) > 0).all(), "a token outside the kept set was emitted"
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1).mean()
    assert entropy > 0.3, "too peaked to test anything"
    generator = torch.Generator().manual_seed(0)
    assert uniform_chance(p, tokens, generator) > ODDS
    wrong = distribution(logits, PARAMS[name]["temperature"] * 1.3, top_k=15)
    assert uniform_chance(wrong, tokens, generator) < ODDS, "the test has no power"


@pytest.mark.parametrize("samples", [800, pytest.param(20_000, marks=pytest.mark.slow)])
def test_joint(samples, pair):
    """The second and third token after one prompt: both come out of the first verified block."""
    target_dir, draft_dir, target = pair
    params = [SamplingParams(max_tokens=3, ignore_eos=True, seed=seed, temperature=2.0, top_k=12) for seed in range(samples)]
    with Engine(target_dir, draft_dir, max_batch=64, draft_steps=2, topk=2, nodes=4) as engine:
        outputs = engine.generate([[5, 9]] * samples, params)
    assert 0 < sum(sum(out.accepted) for out in outputs) < 2 * samples

    def exact(contexts):
        return distribution(target.forward(contexts)[0][:, -1], 2.0, top_k=12)
    alphabet = torch.arange(16)
    first = exact(torch.tensor([[5, 9]]))[0]
    second = exact(torch.cat([torch.tensor([[5, 9]] * 16), alphabet[:, None]], 1))
    pairs = torch.cartesian_prod(alphabet, alphabet)
    third = exact(torch.cat([torch.tensor([[5, 9]] * 256), pairs], 1)).view(16, 16, 16)
    joint = torch.einsum("a,ab,abc->bc", first, second, third).flatten()
    counts = torch.bincount(torch.tensor([out.ids[1] * 16 + out.ids[2] for out in outputs]), minlength=256).double()
    rare = joint * samples < 5      # one cell for all that are too rare for the approximation
    expected = torch.cat([joint[~rare], joint[rare].sum()[None]]) * samples
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    assert chi2.sf(((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum().item(), len(expected) - 1) > ODDS
