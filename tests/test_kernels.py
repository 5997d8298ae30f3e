"""Every function of kernels/ against a float64 loop that follows the definition."""
import math

import pytest
import torch

from minispec.kernels import head
from minispec.kernels.choose import Sampling
from minispec.kernels.draft_logits import draft_logits
from minispec.kernels.moe import moe
from minispec.kernels.noise import gumbel
from minispec.kernels.route import route
from minispec.kernels.tree_attention import View, tree_attention
from minispec.params import SamplingParams

from .conftest import assert_close


def attention_case(seed, batch, rows, heads, kv_heads, width, dk, values, page_size, base, chain):
    """Random trees over pages in random order. Slots that no row may see are NaN."""
    g = torch.Generator().manual_seed(seed)
    pages = -(-(max(base) + rows) // page_size)
    table = (torch.randperm(batch * pages, generator=g) + 1).view(batch, pages)
    cache = torch.full(((batch * pages + 1) * page_size, kv_heads, width), float("nan"))
    words, prefix = torch.zeros(batch, rows, dtype=torch.int64), torch.zeros(batch, rows, dtype=torch.int64)
    for b in range(batch):
        for r in range(rows):
            if chain:
                prefix[b, r] = base[b] + r + 1
            else:
                prefix[b, r] = base[b]
                parent = int(torch.randint(0, r, (), generator=g)) if r else None
                words[b, r] = (1 << r if r < 63 else -2**63) | (words[b, parent] if parent is not None else 0)
        for i in range(base[b] + rows):
            cache[table[b, i // page_size] * page_size + i % page_size] = torch.randn(kv_heads, width, generator=g)
    view = View(table, page_size, prefix, torch.tensor(base), words, max(base) + rows)
    return torch.randn(batch, rows, heads, dk, generator=g), cache, view, 0.37, values


def attention_loop(q, cache, view, scale, values):
    out = torch.zeros(*q.shape[:3], len(range(cache.shape[2])[values]), dtype=torch.float64)
    group = q.shape[2] // cache.shape[1]
    for b in range(q.shape[0]):
        for r in range(q.shape[1]):
            base, word = view.base[b].item(), view.words[b, r].item() & (2**64 - 1)
            seen = list(range(view.prefix[b, r])) + [base + j for j in range(64) if word >> j & 1]
            slots = [view.table[b, i // view.page_size] * view.page_size + i % view.page_size for i in seen]
            for h in range(q.shape[2]):
                entries = cache[slots, h // group].double()
                weight = (entries[:, :q.shape[3]] @ q[b, r, h].double() * scale).softmax(0)
                out[b, r, h] = weight @ entries[:, values]
    return out


@pytest.mark.parametrize("case", [
    dict(batch=1, rows=1, heads=6, kv_heads=1, width=12, dk=12, values=slice(0, 8), page_size=4, base=[9], chain=False),
    dict(batch=3, rows=7, heads=5, kv_heads=1, width=12, dk=12, values=slice(0, 8), page_size=4, base=[1, 13, 7], chain=False),
    dict(batch=2, rows=5, heads=6, kv_heads=2, width=16, dk=8, values=slice(8, 16), page_size=3, base=[11, 2], chain=False),
    dict(batch=1, rows=64, heads=2, kv_heads=1, width=6, dk=6, values=slice(0, 4), page_size=16, base=[17], chain=False),
    dict(batch=2, rows=67, heads=2, kv_heads=2, width=8, dk=4, values=slice(4, 8), page_size=16, base=[0, 5], chain=True),
], ids=["one row", "mla trees", "gqa trees", "64 rows", "prefill"])
def test_tree_attention(case):
    inputs = attention_case(0, **case)
    assert_close("attention", attention_loop(*inputs), tree_attention(*inputs), 1e-6)


def test_tree_attention_in_row_blocks(monkeypatch):
    """Scores beyond SCORES elements are computed a block of rows at a time."""
    inputs = attention_case(1, 2, 5, 2, 1, 6, 6, slice(0, 4), 16, [3, 4], True)
    monkeypatch.setattr("minispec.kernels.tree_attention.SCORES", 2 * 2 * 9 * 2)      # two rows a block
    assert_close("attention", attention_loop(*inputs), tree_attention(*inputs), 1e-6)


def routed_loop(x, router, bias, scoring, topk, groups, topk_groups, group_top, normalise, scaling):
    ids, weights = [], []
    for row in x.double():
        score = router.double() @ row
        score = 1 / (1 + (-score).exp()) if scoring == "sigmoid" else score.softmax(0)
        select = (score + (bias.double() if bias is not None else 0)).tolist()
        size = len(select) // groups
        best = sorted(range(groups), key=lambda g: -sum(sorted(select[g * size:(g + 1) * size])[-group_top:]))[:topk_groups]
        allowed = [e for e in range(len(select)) if e // size in best]
        taken = sorted(allowed, key=lambda e: -select[e])[:topk]
        w = [score[e].item() for e in taken]
        ids.append(taken)
        weights.append([v / sum(w) * scaling if normalise else v * scaling for v in w])
    return ids, weights


@pytest.mark.parametrize("scoring, groups, topk_groups, group_top, normalise, with_bias", [
    ("sigmoid", 1, 1, 2, True, True), ("sigmoid", 4, 2, 2, True, True), ("sigmoid", 4, 1, 2, False, True),
    ("softmax", 1, 1, 1, False, False), ("softmax", 4, 2, 1, False, False), ("softmax", 8, 3, 1, True, False)])
@pytest.mark.parametrize("rows", [1, 2, 13])
def test_route_and_moe(scoring, groups, topk_groups, group_top, normalise, with_bias, rows):
    g = torch.Generator().manual_seed(rows)
    x, router = torch.randn(rows, 24, generator=g), torch.randn(16, 24, generator=g) * 0.3
    bias = torch.randn(16, generator=g) * 0.3 if with_bias else None
    options = dict(scoring=scoring, topk=4 if groups < 8 else 3, groups=groups, topk_groups=topk_groups, group_top=group_top,
                   normalise=normalise, scaling=2.5)
    ids, weights = route(x, router, bias, **options)
    expected_ids, expected_weights = routed_loop(x, router, bias, **options)
    for row in range(rows):
        got = dict(zip(ids[row].tolist(), weights[row].tolist()))
        want = dict(zip(expected_ids[row], expected_weights[row]))
        assert got.keys() == want.keys()
        assert all(math.isclose(got[e], want[e], rel_tol=1e-5) for e in want)


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 17, 61])
@pytest.mark.parametrize("experts, topk", [(16, 4), (5, 2), (97, 3)])
def test_moe(rows, experts, topk):
    g = torch.Generator().manual_seed(rows)
    x, w13, w2 = (torch.randn(*shape, generator=g) for shape in ((rows, 24), (experts, 22, 24), (experts, 24, 11)))
    ids = torch.rand(rows, experts, generator=g).topk(topk).indices
    weights = torch.rand(rows, topk, generator=g)
    expected = torch.zeros(rows, 24, dtype=torch.float64)
    for n in range(rows):
        for e, w in zip(ids[n].tolist(), weights[n].double()):
            gate, up = (w13[e].double() @ x[n].double()).chunk(2)
            expected[n] += w * (w2[e].double() @ (gate / (1 + (-gate).exp()) * up))
    assert_close("moe", expected, moe(x, w13, w2, ids, weights), 1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("mapped", [True, False])
def test_draft_logits(temperature, mapped):
    g = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(2, 3, 8, generator=g), torch.randn(37, 8, generator=g)
    ids = torch.randperm(1000, generator=g)[:37] if mapped else None
    params = [SamplingParams(temperature=temperature, seed=5), SamplingParams(temperature=temperature, seed=6)]
    sampling, positions = Sampling.build(params, [[1], [1]], [[], []], 1000), torch.tensor([[4, 4, 5], [9, 9, 9]])
    tokens, logp = draft_logits(hidden, head, ids, 4, sampling, positions)
    for b in range(2):
        for k in range(3):
            expected = (head.double() @ hidden[b, k].double() / (temperature or 1)).log_softmax(0)
            target = [i if ids is None else ids[i].item() for i in range(37)]
            noise = [gumbel(torch.tensor(5 + b), positions[b, k] + 1, torch.tensor(t)).item() if temperature else 0.0 for t in target]
            best = sorted(range(37), key=lambda i: -(expected[i].item() + noise[i]))[:4]
            assert tokens[b, k].tolist() == [target[i] for i in best]
            assert_close("logp", expected[best], logp[b, k], 1e-6)


def test_draft_logits_of_nan_are_distinct_and_never_above_zero():
    sampling = Sampling.build([SamplingParams()], [[1]], [[]], 50)
    tokens, logp = draft_logits(torch.full((1, 1, 4), float("nan")), torch.ones(9, 4), None, 5, sampling, torch.zeros(1, 1, dtype=torch.int64))
    assert len(set(tokens.flatten().tolist())) == 5 and (logp == -torch.inf).all()


def test_keys_that_never_came_name_a_row():
    """What a collective that broke off leaves of a shard's part, any bits, sends no index astray."""
    anything = torch.randint(-2**63, 2**63 - 1, (40, 2, 2 * (2 * 3 + 1)), generator=torch.Generator().manual_seed(0))
    ids, nothing = torch.arange(5) + 70, torch.full((1, 2, 14), -1)
    for parts in (anything, nothing):
        rows, logp, finite = head.merge_topk(parts, ids, 3)
        assert torch.isin(rows, ids).all() and not (logp > 0).any()
    assert not finite.any() and (logp == -torch.inf).all()
