"""The Triton kernels of the heads, of acceptance and of the cache move: on CUDA as they are, elsewhere under Triton's interpreter."""
import sys
from dataclasses import replace

import pytest
import torch

from minispec.kernels import accept, choose, draft_logits, head, noise
from minispec.kernels.choose import Sampling
from minispec.kernels.jit import jit, tl
from minispec.params import SamplingParams

from .conftest import assert_close

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    for module in (accept, choose, draft_logits):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


def case(seed, batch, rows, width, vocab, temperatures, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(batch, rows, width, generator=g), torch.randn(vocab, width, generator=g) * 3 / width**0.5
    params = [SamplingParams(temperature=t, seed=i) for i, t in zip(range(2**62, 2**62 + batch), temperatures)]
    sampling = Sampling.build(params, [[1]] * batch, [[]] * batch, vocab, DEVICE)
    positions = torch.randint(0, 2**20, (batch, rows), generator=g)
    ids = torch.randperm(2 * vocab, generator=g)[:vocab]
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), sampling, positions.to(DEVICE), ids.to(DEVICE)


def exact(hidden, weight, sampling, positions, ids, greedy=False):
    """Log-probabilities at the temperature and the same with noise, in float64: [B, R, V] each."""
    temperature = torch.where(sampling.temperature > 0, sampling.temperature, 1).double()[:, None, None]
    logp = (hidden.double() @ weight.double().T / temperature).log_softmax(-1)
    noisy = logp + noise.gumbel(sampling.seed[:, None, None], positions[..., None] + 1, ids).double()
    return logp, torch.where(sampling.temperature[:, None, None] > 0, noisy, logp)


@jit
def _noise(p_seed, p_position, p_token, p_out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed, position = tl.load(p_seed + i, mask=i < n, other=0), tl.load(p_position + i, mask=i < n, other=0)
    tl.store(p_out + i, noise.keyed_noise(seed, position, tl.load(p_token + i, mask=i < n, other=0)), mask=i < n)


def test_noise_is_bit_equal():
    """Triton's noise and torch's, on the GPU and on the CPU. bench/kernels.py compares ten million values on a GPU."""
    g, n = torch.Generator().manual_seed(0), 5000
    seeds = torch.cat([torch.tensor([2**63 - 1, 0, 5]), torch.randint(0, 2**63 - 1, (n - 3,), generator=g)])
    positions, tokens = torch.randint(0, 2**31 - 1, (n,), generator=g), torch.randint(0, 2**31, (n,), generator=g)
    keys, out = [x.to(DEVICE) for x in (seeds, positions, tokens)], torch.zeros(n, device=DEVICE)
    _noise[-(-n // 1024),](*keys, out, n, 1024, enable_fp_fusion=False)
    for found in (out, noise.gumbel(*keys)):
        assert torch.equal(found.cpu().view(torch.int32), noise.gumbel(seeds, positions, tokens).view(torch.int32))


CASES = [(1, 1, 40, 37, [0.0]), (1, 3, 31, 257, [0.7]), (3, 7, 24, 100, [0.0, 1.3, 0.4]), (2, 17, 65, 97, [0.0, 0.0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch, rows, width, vocab, temperatures", CASES)
@pytest.mark.parametrize("topk, mapped", [(1, False), (4, True), (16, True)])
def test_draft_logits(batch, rows, width, vocab, temperatures, topk, mapped, dtype):
    hidden, weight, sampling, positions, ids = case(rows, batch, rows, width, vocab, temperatures, dtype)
    ids = ids if mapped else None
    tokens, logp = draft_logits.draft_logits(hidden, weight, ids, topk, sampling, positions)
    target = torch.arange(vocab, device=DEVICE) if ids is None else ids
    expected, noisy = exact(hidden, weight, sampling, positions, target)
    best = noisy.topk(topk, -1)
    at = (tokens[..., None] == target).int().argmax(-1)
    assert torch.equal(target[at], tokens) and all(len(set(row)) == topk for row in tokens.flatten(0, 1).tolist())
    assert ((noisy.gather(-1, at) - best.values).abs() < 1e-5).all(), "not the best in order, up to ties"
    assert_close("logp", expected.gather(-1, at), logp, 1e-6)
    reference = draft_logits.draft_logits_ref(hidden.float(), weight.float(), ids, topk, sampling, positions)
    assert (tokens == reference[0]).float().mean() > 0.99 and (logp - reference[1]).abs().max() < 1e-4


@pytest.mark.parametrize("batch, rows, width, vocab, temperatures", CASES)
def test_choose(batch, rows, width, vocab, temperatures):
    hidden, weight, sampling, positions, _ = case(rows, batch, rows, width, vocab, temperatures, torch.bfloat16)
    expected, noisy = exact(hidden, weight, sampling, positions, torch.arange(vocab, device=DEVICE))
    for logprobs in (False, True):
        ids, logs, finite = choose.choose(hidden, weight, positions, replace(sampling, wants_logprobs=logprobs))
        assert finite.all() and (noisy.amax(-1) - noisy.gather(-1, ids[..., None])[..., 0]).max() < 1e-5
        reference = choose.choose_ref(hidden.float(), weight.float(), positions, replace(sampling, wants_logprobs=logprobs))
        assert torch.equal(ids, reference[0]) and (logs is None) == (not logprobs)
        if logprobs:
            assert_close("logprobs", expected.gather(-1, ids[..., None])[..., 0], logs, 1e-6)


def test_rows_do_not_depend_on_their_number():
    """The same accumulation whatever block of rows a row lies in: bit-equal logits on CUDA (the interpreter sums as numpy likes)."""
    hidden, weight, sampling, positions, ids = case(1, 1, 40, 33, 83, [0.8], torch.bfloat16)
    logits, tokens = head.head_logits(hidden, weight), draft_logits.draft_logits(hidden, weight, ids, 3, sampling, positions)[0]
    assert_close("logits", hidden.double() @ weight.double().T, logits, 1e-6)
    for row in (0, 16, 39):
        one = slice(row, row + 1)
        assert torch.equal(draft_logits.draft_logits(hidden[:, one], weight, ids, 3, sampling, positions[:, one])[0], tokens[:, one])
        alone = head.head_logits(hidden[:, one], weight)
        assert torch.equal(alone, logits[:, one]) if DEVICE == "cuda" else (alone - logits[:, one]).abs().max() < 1e-5


def test_filters_go_by_written_logits():
    hidden, weight, _, positions, _ = case(2, 2, 3, 24, 100, [1.0, 0.5])
    params = [SamplingParams(temperature=1.0, seed=3, top_k=5), SamplingParams(logit_bias={7: 3.0}, logprobs=True)]
    sampling = Sampling.build(params, [[1]] * 2, [[]] * 2, 100, DEVICE)
    found, reference = choose.choose(hidden, weight, positions, sampling), choose.choose_ref(hidden, weight, positions, sampling)
    assert torch.equal(found[0], reference[0]) and torch.equal(found[2], reference[2]) and (found[1] - reference[1]).abs().max() < 1e-5


def test_ties_take_the_lowest_id():
    """Also between 0 and -0, and between tiles of the vocabulary."""
    sampling, positions = Sampling.build([SamplingParams()], [[]], [[]], 200, DEVICE), torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    weight = torch.full((200, 8), -1.0, device=DEVICE)
    for same in ([150, 31, 77], [199, 5], [64, 63]):
        weight[same] = 0.0
        ids, _, _ = choose.choose(torch.ones(1, 1, 8, device=DEVICE), weight, positions, sampling)
        weight[same] = -1.0
        assert ids.item() == min(same)
    tokens, _ = draft_logits.draft_logits(torch.ones(1, 1, 8, device=DEVICE), weight, None, 6, sampling, positions)
    assert tokens.flatten().tolist() == list(range(6))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite(value):
    """A row with one bad logit: choose says so, and the draft's ids stay distinct, log-probabilities at most 0; other rows are as before."""
    hidden, weight, sampling, positions, ids = case(4, 1, 3, 8, 90, [0.9])
    hidden[0, :, 0] = torch.tensor([0.0, 1.0, 0.0])
    clean = choose.choose(hidden, weight, positions, sampling)[0]
    weight[70, 0] = value
    rows = hidden[:, 1:2], weight, ids, 4, sampling, positions[:, 1:2]
    tokens, logp = draft_logits.draft_logits(*rows)
    assert len(set(tokens.flatten().tolist())) == 4 and torch.equal(logp.isneginf(), draft_logits.draft_logits_ref(*rows)[1].isneginf())
    found = choose.choose(hidden[:, 1:2], weight, positions[:, 1:2], sampling)
    assert not found[2].any() and 0 <= found[0].item() < 90
    weight[70, 0] = 1.0
    assert torch.equal(choose.choose(hidden, weight, positions, sampling)[0][:, ::2], clean[:, ::2])
    hidden[:] = float("nan")
    tokens, logp = draft_logits.draft_logits(hidden, weight, ids, 16, sampling, positions)
    assert all(len(set(row)) == 16 for row in tokens[0].tolist()) and logp.isneginf().all()
    assert not choose.choose(hidden, weight, positions, sampling)[2].any()


def test_no_rows():
    hidden, weight, sampling, positions, ids = case(5, 0, 2, 8, 40, [])
    assert draft_logits.draft_logits(hidden, weight, ids, 3, sampling, positions)[0].shape == (0, 2, 3)
    assert choose.choose(hidden, weight, positions, sampling)[0].shape == (0, 2)


def trees(seed, batch, rows):
    """Random parent-first trees whose tokens often equal the target's choice after the parent."""
    g = torch.Generator().manual_seed(seed)
    parents, words = torch.zeros(batch, rows, dtype=torch.int64), torch.ones(batch, rows, dtype=torch.int64)
    choice, tokens = torch.randint(0, 3, (batch, rows), generator=g), torch.randint(0, 3, (batch, rows), generator=g)
    for b in range(batch):
        for r in range(1, rows):
            parents[b, r] = torch.randint(max(0, r - 3), r, (), generator=g)
            words[b, r] = words[b, parents[b, r]] | (1 << r if r < 63 else -2**63)
            brothers = [tokens[b, s].item() for s in range(1, r) if parents[b, s] == parents[b, r]]
            tokens[b, r] = min({0, 1, 2, 3 + r} - set(brothers)) if r % 2 else choice[b, parents[b, r]]
            if tokens[b, r].item() in brothers:
                tokens[b, r] = 100 + r
    valid = torch.rand(batch, rows, generator=g) < 0.95
    finite = torch.rand(batch, rows, generator=g) < 0.999
    return tokens, parents, valid, words, choice, torch.randn(batch, rows, generator=g), finite


@pytest.mark.parametrize("batch, rows", [(1, 1), (4, 2), (5, 7), (2, 64), (3, 31)])
def test_accept(batch, rows):
    inputs = trees(rows, batch, rows)
    for logprobs in (True, False):
        args = [x.to(DEVICE) for x in inputs]
        args[5] = args[5] if logprobs else None
        found, expected = accept.accept(*args), accept.accept_ref(*args)
        for name, a, b in zip(("rows", "count", "tokens", "logprobs"), found, expected):
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b)), name
    tokens, parents, valid, _, choice, _, finite = (x.tolist() for x in inputs)
    for b in range(batch):
        path = [0]
        for r in range(1, rows):
            if parents[b][r] == path[-1] and valid[b][r] and tokens[b][r] == choice[b][parents[b][r]]:
                path.append(r)
        broken = any(v and not f for v, f in zip(valid[b], finite[b]))
        assert found[1][b].item() == (0 if broken else len(path)) and found[0][b, :len(path)].tolist() == path
        assert found[2][b, :len(path)].tolist() == [choice[b][r] for r in path]


@pytest.mark.parametrize("batch, rows, width, page_size", [(1, 1, 5, 4), (3, 7, 13, 4), (2, 16, 160, 16), (2, 64, 33, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_move(batch, rows, width, page_size, dtype):
    """Paths whose old and new places overlap; entries that nobody moves keep their bits, NaN included."""
    g = torch.Generator().manual_seed(rows)
    pages = -(-(9 + rows) // page_size)
    table = (torch.randperm(batch * pages, generator=g) + 1).view(batch, pages)
    cache = torch.randn(3, (batch * pages + 1) * page_size, 1, width, generator=g).to(dtype)
    length = torch.randint(0, 9, (batch,), generator=g)
    count = torch.randint(0, rows + 1, (batch,), generator=g)
    chosen = [torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(rows - 1, generator=g)[:max(c - 1, 0)].sort().values + 1])
              for c in count.tolist()]
    paths = torch.stack([torch.cat([c, torch.zeros(rows - len(c), dtype=torch.int64)]) for c in chosen])
    expected = cache.clone()
    for b in range(batch):
        slot = [table[b, i // page_size] * page_size + i % page_size for i in range(length[b] + rows)]
        for j in range(count[b]):
            expected[:, slot[length[b] + j]] = cache[:, slot[length[b] + paths[b, j]]]
    nan = ~torch.isin(torch.arange(cache.shape[1]), torch.tensor([table[b, i // page_size] * page_size + i % page_size for b in range(batch)
                                                                  for i in range(length[b] + rows)]))
    expected[:, nan], cache[:, nan] = float("nan"), float("nan")
    moved, reference = cache.to(DEVICE), cache.clone()
    accept.move(moved, table.to(DEVICE), page_size, length.to(DEVICE), paths.to(DEVICE), count.to(DEVICE))
    accept.move_ref(reference, table, page_size, length, paths, count)
    assert torch.equal(moved.cpu().nan_to_num(7), expected.nan_to_num(7)) and torch.equal(reference.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [0.8, 0.0]])
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "whole"])
def test_shards_of_a_head(kernel, temperatures, mapped, monkeypatch):
    """Over shards of any size, also of fewer rows than topk: what the whole head says, in order, ties to the lowest row included."""
    monkeypatch.setattr(head, "use_triton", lambda x: kernel)
    hidden, weight, sampling, positions, ids = case(5, 2, 3, 24, 100, temperatures)
    hidden, weight = (hidden * 4).round() / 4, (weight * 4).round() / 4         # sums without rounding: ties are ties in any order
    weight[[3, 31, 60, 98]] = weight[60] * 4        # in three shards, and often the best
    ids = ids if mapped else None
    expected = draft_logits.draft_logits(hidden, weight, ids, 5, sampling, positions)
    greedy = choose.choose(hidden, weight, positions, replace(sampling, wants_logprobs=True))
    for cuts in ((0, 50, 100), (0, 34, 68, 97, 100)):
        spans = list(zip(cuts, cuts[1:]))

        def merged(ids, topk, strict):
            named = torch.arange(100, device=DEVICE) if ids is None else ids
            parts = [head.shard_topk(hidden, weight[a:b], a, named[a:b], topk, sampling, positions, strict) for a, b in spans]
            return head.merge_topk(torch.cat(parts, -1), ids, topk)
        tokens, logp, finite = merged(ids, 5, False)
        assert torch.equal(tokens, expected[0]) and finite.all()
        assert_close("logp", expected[1], logp, 1e-6)
        tokens, logp, _ = merged(None, 1, True)
        assert torch.equal(tokens[..., 0], greedy[0])
        assert_close("logprobs", greedy[1], logp[..., 0], 1e-5)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_shard_that_is_not_finite(kernel, value, monkeypatch):
    """One bad logit in one shard: the row is not finite, and a draft's ids stay distinct."""
    monkeypatch.setattr(head, "use_triton", lambda x: kernel)
    hidden, weight, sampling, positions, _ = case(5, 2, 3, 24, 100, [0.0, 0.0])
    hidden[:, 1, 0], weight[:, 0], weight[70, 0] = 1.0, 0.0, value
    for topk, strict in ((1, True), (3, False)):
        parts = [head.shard_topk(hidden[:, 1:2], weight[a:b], a, None, topk, sampling, positions[:, 1:2], strict) for a, b in ((0, 60), (60, 100))]
        tokens, logp, finite = head.merge_topk(torch.cat(parts, -1), None, topk)
        assert all(len(set(row)) == topk for row in tokens.flatten(0, 1).tolist()) and (logp <= 0).all()
        if strict:
            assert not finite.any()
