"""The fused kernels of a layer against float64 definitions: on CUDA as they are, elsewhere under Triton's interpreter."""
import sys

import pytest
import torch

from minispec.kernels import fused_linear as fused
from minispec.kernels import project
from minispec.kernels.fused_linear import Config, fused_linear, fused_linear_ref

from minispec.kernels.project import heads_front, heads_front_ref, latent_front, latent_front_ref, latent_lift
from minispec.config import Rope
from minispec.layers import Rotary

from .conftest import assert_close

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"      # the interpreter cuts bf16 instead of rounding
TIGHT = {torch.float32: 1e-6, torch.bfloat16: 3e-2 if INTERPRETED else 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    for module in (fused, project):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


def draw(g, *shape, dtype=torch.float32, scale=1.0):
    return (torch.randn(*shape, generator=g) * scale).to(DEVICE, dtype)


def norm64(x, weight, eps):
    return x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@pytest.mark.parametrize("rows, columns, depth", [(1, 33, 24), (7, 50, 97), (17, 16, 384), (0, 9, 8), (3, 20, 1100)])
@pytest.mark.parametrize("options", [(), ("norm",), ("index", "norm"), ("residual",), ("residual", "take"), ("swiglu", "norm"),
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
    second = draw(g, rows, depth - width, dtype=dtype) if "second" in options else None
    norms = [draw(g, size, dtype=dtype) if name in options else None for name, size in (("norm", width), ("norm2", depth - width))]
    residual = draw(g, rows + 2, columns, dtype=dtype) if "residual" in options else None
    take = torch.randint(0, rows + 2, (rows,), generator=g).to(DEVICE) if "take" in options else None
    residual = residual if take is not None or residual is None else residual[:rows]
    named = dict(index=index if "index" in options else None, second=second, norm2=norms[1], residual=residual, take=take,
                 swiglu="swiglu" in options)
    full = (x[index] if "index" in options else x).double()
    full = full if norms[0] is None else norm64(full, norms[0], eps)
    if second is not None:
        full = torch.cat([full, second.double() if norms[1] is None else norm64(second, norms[1], eps)], -1)
    expected = full @ weight.double().T
    if "swiglu" in options:
        gate, up = expected.chunk(2, -1)
        expected = gate / (1 + (-gate).exp()) * up
    expected = expected if residual is None else expected + (residual if take is None else residual[take]).double()
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
    return project.Angles(angles.cos, angles.sin, angles.partner, angles.interleaved, angles.positions[0])


@pytest.mark.parametrize("rows, heads, kv_heads, depth, hidden, qk, dtype", [
    (1, 6, 2, 64, 48, False, torch.float32), (7, 3, 1, 20, 24, True, torch.float32), (18, 2, 2, 8, 20, False, torch.float32),
    (0, 2, 1, 8, 16, False, torch.float32), (5, 4, 2, 16, 40, True, torch.bfloat16)])
@pytest.mark.parametrize("style, fused_up_to", [("half", 2**22), ("interleaved", 0)])
def test_heads_front(rows, heads, kv_heads, depth, hidden, qk, dtype, style, fused_up_to, monkeypatch):
    monkeypatch.setattr(project, "SMALL", fused_up_to)
    g, eps = torch.Generator().manual_seed(rows), 1e-3
    embed, second = draw(g, 30, hidden, dtype=dtype), draw(g, 1, rows, hidden, dtype=dtype)
    index, norms = torch.randint(0, 30, (1, rows), generator=g).to(DEVICE), [draw(g, hidden, dtype=dtype) for _ in range(2)]
    weight = draw(g, (heads + 2 * kv_heads) * depth, 2 * hidden, dtype=dtype, scale=hidden**-0.5)
    q_norm, k_norm = (draw(g, depth, dtype=dtype) for _ in range(2)) if qk else (None, None)
    angles, slots = places(g, rows, style, depth)
    named = dict(index=index, second=second, norm2=norms[1], q_norm=q_norm, k_norm=k_norm, angles=angles, slots=slots, heads=heads)
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
