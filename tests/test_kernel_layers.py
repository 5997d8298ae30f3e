"""The fused kernels of a layer against float64 definitions: on CUDA as they are, elsewhere under Triton's interpreter."""
import sys

import pytest
import torch

from minispec.kernels import fused_linear as fused
from minispec.kernels import accept, buffer, draft_logits, choose, moe, project, prune, route, tree, tree_attention
from minispec.kernels.fused_linear import Config, fused_linear, fused_linear_ref

from minispec.kernels.project import heads_front, heads_front_ref, latent_front, latent_front_ref, latent_lift
from minispec.config import Rope
from minispec.layers import Angles, Rotary
from minispec import Engine, SamplingParams

from .conftest import assert_close
from .test_kernels import routed_loop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"      # the interpreter cuts bf16 instead of rounding
TIGHT = {torch.float32: 1e-6, torch.bfloat16: 3e-2 if INTERPRETED else 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    for module in (fused, project, accept, buffer, draft_logits, choose, moe, prune, route, tree, tree_attention):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


def draw(g, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=g) * scale).to(DEVICE, dtype)


def norm64(x, weight, eps):
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("rows, columns, depth", [(1, 33, 24), (7, 50, 97), (17, 16, 384), (0, 9, 8), (3, 20, 1100)])
@pytest.mark.parametrize("options", [(), ("norm",), ("index", "norm"), ("residual",), ("residual", "take"), ("norm", "second", "take"), ("swiglu", "norm"),
                                     ("index", "norm", "second", "norm2"), ("norm", "second"), ("second", "norm2")], ids="-".join)
def test_fused_linear(rows, columns, depth, options):
    check(rows, columns, depth, options, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [None, Config(16, 32, 4, 1)])
def test_fused_linear_in_narrow_types(dtype, config):
    for options in (("norm", "swiglu"), ("index", "norm", "second", "norm2"), ("residual", "take"), ("norm",)):
        check(5, 40, 200, options, dtype, config)


def check(rows, columns, depth, options, dtype, config=None):
    g, eps = torch.Generator().manual_seed(rows), 1e-3
    weight = draw(g, columns * (1 + ("swiglu" in options)), depth, dtype=dtype, scale=depth**-0.5)
    width = depth // 3 if "second" in options else depth
    table = torch.full((rows + 4, width + 3), float("nan"), device=DEVICE, dtype=dtype)[:, :width]      # rows apart, NaN between
    table.copy_(draw(g, rows + 4, width, dtype=dtype))
    index = torch.randint(0, rows + 4, (rows,), generator=g).to(DEVICE)
    x = table if "index" in options else table[:rows]
    take = torch.randint(0, rows + 2, (rows,), generator=g).to(DEVICE) if "take" in options else None
    others = rows + 2 if take is not None else rows
    second = draw(g, others, depth - width, dtype=dtype) if "second" in options else None
    norms = [draw(g, size, dtype=dtype) if name in options else None for name, size in (("norm", width), ("norm2", depth - width))]
    residual = draw(g, others, columns, dtype=dtype) if "residual" in options else None
    named = dict(index=index if "index" in options else None, second=second, norm2=norms[1], residual=residual, take=take,
                 swiglu="swiglu" in options)
    full = (x[index] if "index" in options else x).double()
    full = full if norms[0] is None else norm64(full, norms[0], eps)
    second, residual = (t if t is None or take is None else t[take] for t in (second, residual))
    if second is not None:
        full = torch.cat([full, second.double() if norms[1] is None else norm64(second, norms[1], eps)], -1)
    expected = full @ weight.double().T
    if "swiglu" in options:
        gate, up = expected.chunk(2, -1)
        expected = gate / (1 + (-gate).exp()) * up
    expected = expected if residual is None else expected + residual.double()
    out = fused_linear(x, weight, norms[0], eps, **named, config=config)
    assert out.dtype == dtype
    assert_close(f"kernel {options}", expected, out, TIGHT[dtype])
    assert_close(f"reference {options}", expected, fused_linear_ref(x, weight, norms[0], eps, **named), TIGHT[dtype] * 2)


@pytest.mark.parametrize("dtype", [torch.float32] + [torch.bfloat16] * (DEVICE == "cuda"))
def test_a_rows_bits_do_not_depend_on_the_others(dtype):
    g = torch.Generator().manual_seed(1)
    x, weight, norm = draw(g, 2, 19, 200, dtype=dtype), draw(g, 48, 200, dtype=dtype), draw(g, 200, dtype=dtype)
    together = fused_linear(x, weight, norm, 1e-6, exact=True)
    for row in range(0, 19, 6):
        assert torch.equal(together[1:, row:row + 1], fused_linear(x[1:, row:row + 1], weight, norm, 1e-6, exact=True))


def rotate64(x, angles):
    """x [N, heads, dim] at angles.positions [N], by pairs of channels as complex numbers."""
    cos, sin, half = angles.cos.double()[angles.positions][:, None], angles.sin.double()[angles.positions][:, None], x.shape[-1] // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if angles.interleaved else (slice(0, half), slice(half, None))
    turned = torch.complex(x[..., first].double(), x[..., second].double()) * torch.complex(cos[..., first], sin[..., second])
    out = torch.empty_like(x, dtype=torch.float64)
    out[..., first], out[..., second] = turned.real, turned.imag
    return out


def places(g, rows, style, dim):
    rotary = Rotary(Rope(dim, 100.0, style), 50, DEVICE)
    return rotary.at(torch.randint(0, 50, (1, rows), generator=g).to(DEVICE)), torch.randperm(3 * rows, generator=g)[None, :rows].to(DEVICE)


@pytest.mark.parametrize("rows, heads, nope, rope, rank, value, lora, dtype", [
    (1, 3, 8, 4, 16, 7, 12, torch.float32), (7, 6, 32, 32, 128, 64, 192, torch.float32), (19, 2, 20, 6, 33, 18, 40, torch.float32),
    (5, 3, 8, 4, 16, 8, None, torch.float32), (3, 2, 16, 8, 300, 40, 24, torch.float32), (0, 2, 8, 4, 16, 8, 12, torch.float32),
    (4, 2, 16, 8, 24, 16, 600, torch.float32), (6, 6, 32, 32, 128, 64, 192, torch.bfloat16)])
@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_latent_front_and_lift(rows, heads, nope, rope, rank, value, lora, dtype, style):
    g, eps = torch.Generator().manual_seed(rows), 1e-3
    queries = heads * (nope + rope)
    a = draw(g, 1, rows, (lora or queries) + rank + rope, dtype=dtype)
    q_norm, q_b = (draw(g, lora, dtype=dtype), draw(g, queries, lora, dtype=dtype, scale=lora**-0.5)) if lora else (None, None)
    kv_norm, kv_b = draw(g, rank, dtype=dtype), draw(g, heads, nope + value, rank, dtype=dtype, scale=rank**-0.5)
    angles, slots = places(g, rows, style, rope)
    caches = [torch.full((3 * rows + 1, 1, rank + rope), float("nan"), device=DEVICE, dtype=dtype) for _ in range(3)]
    arguments = a, q_norm, q_b, kv_norm, kv_b, nope, eps, angles, slots
    q = a[0, :, :queries] if lora is None else norm64(a[0, :, :lora], q_norm, eps) @ q_b.double().T
    q = q.double().view(rows, heads, nope + rope)
    expected = torch.cat([torch.einsum("nhi,hir->nhr", q[..., :nope], kv_b[:, :nope].double()), rotate64(q[..., nope:], single(angles))], -1)
    entries = torch.cat([norm64(a[0, :, -rank - rope:-rope], kv_norm, eps), rotate64(a[0, :, None, -rope:], single(angles))[:, 0]], -1)
    caches[2][slots[0], 0] = entries.to(dtype)
    for run, cache in ((latent_front, caches[0]), (latent_front_ref, caches[1])):
        assert_close("q", expected[None], run(*arguments, cache), TIGHT[dtype] * 2)
        assert_close("cache", caches[2], cache, TIGHT[dtype])
    for splits in (1, 3):
        part, lse = draw(g, splits, 1, rows, heads, rank, dtype=torch.float32 if splits > 1 else dtype), draw(g, splits, 1, rows, heads)
        lse[2:] = -torch.inf
        part[2:] = torch.nan
        weight = (torch.exp2(lse.double()) / torch.exp2(lse.double()).sum(0))[:2, ..., None] if splits > 1 else 1
        merged = (part[:2].double() * weight).sum(0)
        lifted = torch.einsum("bnhr,hvr->bnhv", merged, kv_b[:, nope:].double()).flatten(2)
        for run in (latent_lift, project.latent_lift_ref):
            assert_close("lift", lifted, run(part, lse if splits > 1 else None, kv_b, nope), TIGHT[dtype] * 2)


def single(angles):
    return Angles(angles.cos, angles.sin, angles.partner, angles.interleaved, angles.positions[0])


@pytest.mark.parametrize("rows, heads, kv_heads, depth, hidden, qk, dtype", [
    (1, 6, 2, 64, 48, False, torch.float32), (7, 3, 1, 20, 24, True, torch.float32), (7, 3, 1, 20, 24, False, torch.float32), (18, 2, 2, 8, 20, False, torch.float32),
    (0, 2, 1, 8, 16, False, torch.float32), (5, 4, 2, 16, 40, True, torch.bfloat16)])
@pytest.mark.parametrize("style, fused_up_to", [("half", 2**22), ("interleaved", 2**22), ("interleaved", 0)])
def test_heads_front(rows, heads, kv_heads, depth, hidden, qk, dtype, style, fused_up_to, monkeypatch):
    monkeypatch.setattr(project, "SMALL", fused_up_to)
    g, eps = torch.Generator().manual_seed(rows), 1e-3
    embed, second = draw(g, 30, hidden, dtype=dtype), draw(g, 1, rows, hidden, dtype=dtype)
    index, norms = torch.randint(0, 30, (1, rows), generator=g).to(DEVICE), [draw(g, hidden, dtype=dtype) for _ in range(2)]
    weight = draw(g, (heads + 2 * kv_heads) * depth, 2 * hidden, dtype=dtype, scale=hidden**-0.5)
    q_norm, k_norm = (draw(g, depth, dtype=dtype) for _ in range(2)) if qk else (None, None)
    angles, slots = places(g, rows, style, depth)
    named = dict(index=index, second=second, norm2=norms[1], take=None, q_norm=q_norm, k_norm=k_norm, angles=angles, slots=slots, heads=heads)
    x = torch.cat([norm64(embed[index[0]], norms[0], eps), norm64(second[0], norms[1], eps)], -1)
    q, k, v = (x @ weight.double().T).view(rows, heads + 2 * kv_heads, depth).split([heads, kv_heads, kv_heads], 1)
    q, k = (norm64(q, q_norm, eps), norm64(k, k_norm, eps)) if qk else (q, k)
    q, k = (rotate64(x, single(angles)) for x in (q, k))
    expected = torch.full((3 * rows + 1, kv_heads, 2 * depth), float("nan"), device=DEVICE, dtype=dtype)
    expected[slots[0]] = torch.cat([k, v], -1).to(dtype)
    for run in (heads_front, heads_front_ref):
        cache = torch.full_like(expected, float("nan"))
        assert_close("q", q[None], run(embed, weight, norms[0], eps, **named, cache=cache), TIGHT[dtype] * 2)
        assert_close("cache", expected, cache, TIGHT[dtype] * 2)


@pytest.mark.parametrize("rows, hidden, experts, topk, groups, inter, dtype", [
    (1, 40, 5, 2, 1, 24, torch.float32), (7, 384, 16, 4, 1, 192, torch.float32), (19, 33, 24, 3, 4, 9, torch.float32),
    (2, 24, 6, 2, 2, None, torch.float32), (0, 24, 6, 2, 1, 8, torch.float32), (5, 64, 16, 4, 1, 32, torch.bfloat16)])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_ffn_front(rows, hidden, experts, topk, groups, inter, dtype, scoring):
    g, eps = torch.Generator().manual_seed(rows), 1e-3
    x, norm = draw(g, rows, hidden, dtype=dtype), draw(g, hidden, dtype=dtype)
    router, bias = draw(g, experts, hidden, scale=hidden**-0.5), draw(g, experts, scale=0.3) if scoring == "sigmoid" else None
    gate_up = None if inter is None else draw(g, 2 * inter, hidden, dtype=dtype, scale=hidden**-0.5)
    routing = dict(scoring=scoring, topk=topk, groups=groups, topk_groups=max(1, groups // 2), group_top=1 + (scoring == "sigmoid"),
                   normalise=True, scaling=2.5)
    live = torch.rand(rows, generator=g).to(DEVICE) < 0.7 if scoring == "sigmoid" else None
    h, ids, weights, inner = route.ffn_front(x, norm, eps, router, bias, gate_up, live=live, **routing)
    assert_close("norm", norm64(x, norm, eps), h, TIGHT[dtype])
    expected_ids, expected_weights = routed_loop(h.cpu().float(), router.cpu(), None if bias is None else bias.cpu(), **routing)
    assert ids.tolist() == [one if live is None or live[i] else [experts] * topk for i, one in enumerate(expected_ids)]
    assert_close("weights", torch.tensor(expected_weights, dtype=torch.float64).view(weights.shape), weights.cpu(), 1e-5)
    if inter is None:
        assert inner is None
    else:
        gate, up = (norm64(x, norm, eps) @ gate_up.double().T).chunk(2, -1)
        assert_close("shared", gate / (1 + (-gate).exp()) * up, inner, TIGHT[dtype] * 2)


@pytest.mark.parametrize("batch, steps, topk, nodes", [(1, 6, 1, 6), (2, 6, 4, 6), (3, 3, 3, 11), (1, 2, 5, 30), (1, 5, 16, 63), (2, 1, 3, 2)])
def test_a_tree_grows_as_its_reference_says(batch, steps, topk, nodes):
    """The reference is compared with walks in tests/test_tree.py and tests/test_draft.py. Scores differ, so that no order is left open."""
    g = torch.Generator().manual_seed(nodes)
    table = (torch.randperm(batch * 40, generator=g).view(batch, 40) + 1).to(DEVICE)
    length, pending = torch.randint(1, 60, (2, batch), generator=g).to(DEVICE)
    room = torch.randint(1, steps + 2, (batch,), generator=g).to(DEVICE)
    pools, before = [tree.Pool.empty(batch, steps, topk, DEVICE) for _ in range(2)], [None, None]
    for depth in range(1, steps + 1):
        rows = 1 if depth == 1 else topk
        tokens, logp = torch.randint(0, 99, (batch, rows, topk), generator=g).to(DEVICE), -draw(g, batch, rows, topk).abs()
        logp[:, 0, topk - 1] = -torch.inf
        arguments = depth, length, table, 4
        before = [run(tokens, logp, old, pool, *arguments) for run, old, pool in zip((tree.level, tree.level_ref), before, pools)]
        for name, found, expected in zip(tree.Frontier._fields, *before):
            live = before[1].scores > -torch.inf        # which of two that are impossible comes first is open
            assert torch.equal(found[live], expected[live]), (name, depth)
        before[0] = tree.Frontier(*(part.contiguous() for part in before[1]))
        for found, expected in zip(*(pool.filled(depth, topk) for pool in pools)):
            assert torch.equal(found, expected)
    arguments = nodes, topk, pending, length, room, table, 4
    laid = tree.plant(pools[0], *arguments), tree.plant_ref(pools[0], *arguments)
    for name, found, expected in zip(tree.Laid._fields, *laid):
        assert torch.equal(found, expected), name
    trusts = [torch.rand(2, steps, prune.BINS, generator=g).to(DEVICE) * 9] * 2
    price = torch.rand(batch * nodes + 1, generator=g).mul(0.1 if nodes < 30 else 0.002).cumsum(0).to(DEVICE)
    pruned = [run(one, length, trusts[0], price) for run, one in zip((prune.prune, prune.prune_ref), laid)]
    for name, found, expected in zip(tree.Laid._fields, *pruned):
        assert torch.equal(found, expected), name
    assert pruned[0].valid[:, 0].all() and (batch * nodes < 12 or 0 < pruned[0].valid[:, 1:].sum() < batch * nodes)
    rows = torch.stack([torch.randperm(nodes + 1, generator=g) for _ in range(batch)]).to(DEVICE)
    count, trusts = torch.randint(0, nodes + 2, (batch,), generator=g).to(DEVICE), [trust.clone() for trust in trusts]
    for run, one, trust in zip((prune.learn, prune.learn_ref), pruned, trusts):
        run(one, rows, count, trust)
    torch.testing.assert_close(*trusts)


def test_the_last_level_may_lie_past_every_page():
    """Its nodes get no KV: a request's pages end before them."""
    table, length = torch.tensor([[3, 1], [2, 4]], device=DEVICE), torch.tensor([3, 1], device=DEVICE)
    tokens, logp, pool = torch.arange(6, device=DEVICE).view(2, 1, 3), -torch.rand(2, 1, 3, device=DEVICE), tree.Pool.empty(2, 1, 3, DEVICE)
    for run in (tree.level, tree.level_ref):
        assert run(tokens, logp, None, pool, 1, length, table, 2).slots.tolist() == [[3, 0, 0], [5, 8, 9]]


def test_the_root_alone():
    arguments = 0, 4, *torch.tensor([[7, 8, 9], [3, 0, 5], [1, 5, 0]], device=DEVICE), torch.arange(12, device=DEVICE).view(3, 4), 2
    for found, expected in zip(tree.plant(None, *arguments), tree.plant_ref(None, *arguments)):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("batch, size, width, layers", [(1, 1, 5, 3), (3, 7, 1153, 2), (2, 4, 24, 1), (2, 3, 8, 5)])
def test_the_hidden_buffer(batch, size, width, layers):
    g = torch.Generator().manual_seed(size)
    seats = torch.randperm(batch + 2, generator=g)[:batch].to(DEVICE)
    parts, tokens = [draw(g, batch, size, width) for _ in range(layers)], torch.randint(0, 99, (batch, size), generator=g).to(DEVICE)
    rows = torch.stack([torch.randperm(size, generator=g) for _ in range(batch)]).to(DEVICE)
    table, length = (torch.randperm(batch * 9, generator=g).view(batch, 9) + 1).to(DEVICE), torch.randint(size, 28, (batch,), generator=g).to(DEVICE)
    ends = []
    for put, take in ((buffer.keep, buffer.unread), (buffer.keep_ref, buffer.unread_ref)):
        kept = torch.zeros(batch + 2, size + 1, layers * width, device=DEVICE), *torch.zeros(2, batch + 2, size + 1, device=DEVICE).long()
        kept = kept[0], kept[1], kept[2][:, 0].contiguous()
        put(parts, rows, tokens, length, seats, *kept)
        before = [x.clone() for x in kept]
        put(parts, rows[:, :1].contiguous(), tokens[:, :1].contiguous(), length + size, seats, *kept, True)
        assert torch.equal(kept[0][seats, size], torch.cat(parts, -1)[torch.arange(batch), rows[:, 0]]) and torch.equal(kept[0][seats, :size], before[0][seats, :size])
        ends.append([*kept, *take(*kept[1:], seats, length + size, size, table, 4), *take(*kept[1:], seats, length + 1, size, table, 4)])
    for found, expected in zip(*ends):
        assert torch.equal(found, expected)


def test_publish():
    g = torch.Generator().manual_seed(0)
    count, tokens = torch.tensor([0, 1, 4], device=DEVICE), torch.randint(0, 99, (3, 4), generator=g).to(DEVICE)
    state, valid = torch.randint(5, 50, (6, 3), generator=g).to(DEVICE), torch.rand(3, 4, generator=g).to(DEVICE) < 0.5
    state[4], state[5] = torch.tensor([1, 1, 0]), 6
    states, rings = [state.clone(), state.clone()], torch.full((2, 4, 3, 6), -1, device=DEVICE)
    for run, one, ring in zip((accept.publish, accept.publish_ref), states, rings):
        run(count, tokens, valid, one, ring)
        run(count, tokens.flip(0), valid, one, ring)
    assert torch.equal(*states) and torch.equal(*rings) and (rings[0, :2] == -1).all()
    assert states[0][0].tolist() == [state[0, 0], state[0, 1] + 2, state[0, 2]] and (states[0][5] == 8).all()
    for slot, found in ((2, tokens), (3, tokens.flip(0))):
        assert torch.equal(rings[0, slot], torch.cat([count[:, None], found, valid.sum(1)[:, None]], 1))
    assert states[0][1].tolist() == tokens.flip(0)[[0, 1, 2], [0, 0, 0]].tolist()


@pytest.mark.parametrize("attention", ["llama", pytest.param("mla", marks=pytest.mark.slow)])
def test_an_engine_on_the_kernels_is_the_engine(attention, checkpoints, monkeypatch):
    """Every kernel of a round at once: the same ids and accepted counts as by the references."""
    target = checkpoints.target(num_hidden_layers=7, n_routed_experts=4)
    folder, found = checkpoints.fitted(target, dialect="specforge", attention=attention, vocab=384), []
    for kernels in (True, False):
        if not kernels:
            monkeypatch.undo()
        with Engine(target, folder, device=DEVICE if kernels else "cpu", dtype="float32", max_length=64, draft_steps=2, topk=2, nodes=3) as engine:
            for tensor in [*engine.target.parameters.values(), *engine.draft.parameters.values()] * kernels:
                tensor.data = tensor.contiguous()       # as on a GPU
            out = engine.generate([9, 4], SamplingParams(max_tokens=6, ignore_eos=True))
            found.append((out.ids, out.accepted))
    assert found[0] == found[1] and 0 < sum(found[0][1]) < 2 * len(found[0][1])
