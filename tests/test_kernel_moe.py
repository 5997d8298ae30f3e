"""The Triton kernels of the router and of the experts: on CUDA as they are, elsewhere under Triton's interpreter."""
import math
import sys

import pytest
import torch
from safetensors.torch import load_file

from minispec.config import TargetConfig
from minispec.errors import MinispecError
from minispec.kernels import moe as moe_file
from minispec.kernels import route as route_file
from minispec.kernels.moe import dequantize, moe, moe_ref
from minispec.kernels.route import route
from minispec.layers import allocate
from minispec.target import Target
from minispec.weights import load
from minispec.weights.packed import keep_packed
from minispec.weights.quant import repack_int4, unpack_int4

from . import tiny
from .conftest import assert_close
from .test_kernels import routed_loop
from .test_quant import pack_int4

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    for module in (moe_file, route_file):
        monkeypatch.setattr(module, "use_triton", lambda x: True)


def stored(kind, dtype, g, experts, n, k, parts=1):
    """A random stored matrix [experts, n, k]: plain, int4 or fp8 (its rows in `parts`, tiled apart)."""
    w = torch.randn(experts, n, k, generator=g) / k**0.5
    if kind == "plain":
        return w.to(DEVICE, dtype)
    if kind == "int4":
        scale = (torch.rand(experts * n, k // 32, generator=g) * 0.3 + 0.1).bfloat16() / k**0.5
        packed = pack_int4(w.flatten(0, 1), scale).unflatten(0, (experts, n)), scale.view(experts, n, k // 32)
        both = zip(*(repack_int4(*one, 64 if k % 128 else 128) for one in zip(*packed)))
        return tuple(torch.stack(part).to(DEVICE) for part in both)
    scale = torch.rand(experts, parts * -(-n // parts // 128), -(-k // 128), generator=g) + 0.5
    return w.to(DEVICE, torch.float8_e4m3fn), scale.to(DEVICE)


def loop(x, w13, w2, ids, weights):
    """The definition in float64."""
    w13 = dequantize(w13, torch.float64, x.shape[1], 2)
    w2 = dequantize(w2, torch.float64, w13.shape[1] // 2)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for n in range(len(x)):
        for e, w in zip(ids[n].tolist(), weights[n].double()):
            gate, up = (w13[e] @ x[n].double()).chunk(2)
            out[n] += w * (w2[e] @ (gate / (1 + (-gate).exp()) * up))
    return out


def case(kind, rows, hidden, inter, experts, topk, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    w13, w2 = stored(kind, dtype, g, experts, 2 * inter, hidden, 2), stored(kind, dtype, g, experts, hidden, inter)
    x, ids = torch.randn(rows, hidden, generator=g), torch.rand(rows, experts, generator=g).topk(topk).indices
    return x.to(DEVICE, dtype), w13, w2, ids.to(DEVICE), torch.rand(rows, topk, generator=g).to(DEVICE)


@pytest.mark.parametrize("kind, rows, hidden, inter, experts, topk", [
    ("plain", 1, 24, 11, 5, 2), ("plain", 7, 50, 37, 16, 3), ("plain", 16, 24, 11, 97, 5), ("int4", 11, 64, 32, 9, 6),
    ("plain", 17, 24, 11, 5, 2), ("plain", 61, 40, 19, 7, 3),
    ("int4", 1, 384, 192, 6, 4), ("int4", 7, 96, 32, 16, 4), ("int4", 16, 64, 160, 5, 2), ("int4", 37, 96, 64, 5, 2),
    ("fp8", 1, 256, 128, 4, 2), ("fp8", 5, 136, 72, 6, 2), ("fp8", 19, 256, 160, 4, 2), ("plain", 0, 24, 11, 5, 2)])
def test_moe(kind, rows, hidden, inter, experts, topk):
    inputs = case(kind, rows, hidden, inter, experts, topk)
    assert_close("moe", loop(*inputs), moe(*inputs), 3e-6)


@pytest.mark.parametrize("kind", ["plain", "int4", "fp8"])
@pytest.mark.parametrize("rows", [3, 20])
def test_moe_in_bf16_with_a_base(kind, rows):
    inputs = case(kind, rows, 128, 64, 6, 2, torch.bfloat16)
    base = torch.randn(rows, 128, device=DEVICE).bfloat16()
    out = moe(*inputs, base)
    assert out.dtype == torch.bfloat16
    assert_close("moe", loop(*inputs) + base.double(), out, 6e-3)
    assert_close("reference", loop(*inputs) + base.double(), moe_ref(*inputs, base), 1e-2)


@pytest.mark.parametrize("kind, rows, width", [("plain", 1, 33), ("plain", 7, 128), ("plain", 16, 129), ("int4", 5, 96), ("int4", 9, 520),
                                               ("fp8", 3, 200), ("plain", 17, 40), ("plain", 0, 8)])
def test_with_a_shared_expert(kind, rows, width):
    """In the same launch where its matrix is read in one step, else, or for many rows, before."""
    inputs, g = case(kind, rows, 128, 64, 6, 2), torch.Generator().manual_seed(1)
    base, inner, down = (torch.randn(*shape, generator=g).to(DEVICE) for shape in ((rows, 128), (rows, width), (128, width)))
    expected = loop(*inputs) + base.double() + inner.double() @ down.double().T
    for run in (moe, moe_ref):
        assert_close(kind, expected, run(*inputs, base, (inner, down)), 3e-6)


@pytest.mark.parametrize("experts", [2, 63, 64, 65])
def test_experts_that_are_not_here(experts):
    """Each as number `experts`, in any place, of a row even all."""
    x, w13, w2, ids, weights = case("plain", 9, 24, 16, experts, 1)
    ids = torch.stack([ids[:, 0], torch.full_like(ids[:, 0], experts), (ids[:, 0] + 1) % experts], 1)
    ids[3], ids[4, 0] = experts, experts
    weights = torch.rand(9, 3, device=DEVICE)
    away = torch.cat([w13, w13.new_zeros(1, *w13.shape[1:])]), torch.cat([w2, w2.new_zeros(1, *w2.shape[1:])])
    for run in (moe, moe_ref):
        assert_close("moe", loop(x, *away, ids, weights), run(x, w13, w2, ids, weights), 3e-6)


@pytest.mark.parametrize("rows, dtype", [(7, torch.float32)] + [(16, torch.bfloat16)] * (DEVICE == "cuda"))
def test_a_row_does_not_depend_on_the_others(rows, dtype):
    x, w13, w2, ids, weights = case("int4", rows, 96, 64, 7, 3, dtype)
    together = moe(x, w13, w2, ids, weights)
    for row in range(rows):
        assert torch.equal(together[row:row + 1], moe(x[row:row + 1], w13, w2, ids[row:row + 1], weights[row:row + 1]))


def test_all_rows_take_one_set_and_repeated_ids_count_once():
    x, w13, w2, ids, weights = case("plain", 12, 32, 16, 9, 3)
    ids = ids[:1].expand(12, 3).contiguous()
    assert_close("moe", loop(x, w13, w2, ids, weights), moe(x, w13, w2, ids, weights), 1e-6)


@pytest.mark.parametrize("scoring, experts, groups, topk_groups, group_top, topk, normalise, with_bias", [
    ("sigmoid", 16, 1, 1, 2, 4, True, True), ("sigmoid", 24, 4, 2, 2, 5, False, True), ("softmax", 16, 1, 1, 1, 4, False, False),
    ("softmax", 24, 8, 3, 1, 3, True, False), ("sigmoid", 97, 1, 1, 2, 8, True, True)])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_route(scoring, experts, groups, topk_groups, group_top, topk, normalise, with_bias, rows):
    g = torch.Generator().manual_seed(rows)
    x, router = torch.randn(rows, 200, generator=g), torch.randn(experts, 200, generator=g) * 0.1
    bias = torch.randn(experts, generator=g) * 0.3 if with_bias else None
    options = dict(scoring=scoring, topk=topk, groups=groups, topk_groups=topk_groups, group_top=group_top, normalise=normalise, scaling=2.5)
    ids, weights = route(x.to(DEVICE), router.to(DEVICE), None if bias is None else bias.to(DEVICE), **options)
    expected_ids, expected_weights = routed_loop(x, router, bias, **options)
    assert ids.tolist() == expected_ids
    for got, want in zip(weights.flatten().tolist(), sum(expected_weights, [])):
        assert math.isclose(got, want, rel_tol=1e-5)


def test_route_of_nan_gives_ids_in_range():
    ids, _ = route(torch.full((2, 8), float("nan"), device=DEVICE), torch.ones(5, 8, device=DEVICE), None, scoring="sigmoid", topk=3, groups=1,
                   topk_groups=1, group_top=1, normalise=True, scaling=1.0)
    assert all(sorted(set(row)) == sorted(row) and 0 <= min(row) and max(row) < 5 for row in ids.tolist())


def test_int4_units():
    g = torch.Generator().manual_seed(0)
    scale = (torch.rand(6, 3, generator=g) + 0.1).bfloat16()
    packed = pack_int4(torch.randn(6, 96, generator=g), scale)
    for block in (64, 128):     # 96 inputs: the last block is not full
        units, scales = repack_int4(packed, scale, block)
        assert units.dtype == torch.int16 and units.shape == (-(-96 // block), 6, block // 4)
        assert torch.equal(dequantize((units[None], scales[None]), torch.float32, 96)[0], unpack_int4(packed, scale))


@pytest.mark.parametrize("storage, kept", [("int4", torch.int16), ("fp8", torch.float8_e4m3fn), ("bf16", None)])
def test_experts_in_their_stored_form(checkpoints, storage, kept):
    """The same weights, kept packed and dequantised; then one layer of experts from both."""
    path = checkpoints.target(storage=storage, hidden_size=160, moe_intermediate_size=160, num_hidden_layers=4, n_routed_experts=4)
    config = TargetConfig.read(path)
    plans = keep_packed(load.open_target(path, config)), load.open_target(path, config)
    packed, plain = (Target(config, plan.shapes, torch.float32, torch.device(DEVICE), 8, plan.dtypes) for plan in plans)
    for plan, target in zip(plans, (packed, plain)):
        load.fill(plan, target.parameters)
    layer, other = packed.layers[-1], plain.layers[-1]
    if kept is None:
        assert not plans[0].dtypes and layer.w13.dtype == torch.float32
        return
    assert layer.w13.dtype == layer.w2.dtype == kept
    assert torch.equal(dequantize((layer.w13, layer.w13_scale), torch.float32, 160, 2), other.w13)
    assert torch.equal(dequantize((layer.w2, layer.w2_scale), torch.float32, 160), other.w2)
    for one in (layer, other):      # on the CPU matrices lie transposed, which suits MKL (layers.allocate); the kernels want rows
        vars(one).update({name: value.contiguous() for name, value in vars(one).items()})
    x = torch.randn(1, 5, 160, device=DEVICE)
    assert_close("experts", plain.experts(other, x), packed.experts(layer, x), 1e-5)


def test_packed_experts_that_hold_nan_are_refused(checkpoints, tmp_path):
    path = checkpoints.target(storage="int4", num_hidden_layers=4, n_routed_experts=4)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if ".experts." in name and name.endswith("_scale"))
    tensors[name][0, 0] = float("nan")
    tiny.save(tmp_path, tensors)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    config = TargetConfig.read(tmp_path)
    plan = keep_packed(load.open_target(tmp_path, config))
    with pytest.raises(MinispecError, match="holds NaN"):
        load.fill(plan, allocate(plan.shapes, torch.bfloat16, torch.device("cpu"), plan.dtypes))


@pytest.mark.parametrize("kind, rows", [("plain", 1), ("plain", 6), ("int4", 5), ("fp8", 16), ("plain", 40), ("int4", 21), ("fp8", 25)])
def test_experts_that_are_elsewhere(kind, rows):
    """The parts of ranks that hold 2, 3 and 1 experts of 6 sum to the whole; a rank whose experts nobody takes gives the base, or zero."""
    x, w13, w2, ids, weights = case(kind, rows, 128, 64, 6, 2)
    whole, total = loop(x, w13, w2, ids, weights), 0

    def cut(w, first, last):
        return tuple(part[first:last].contiguous() for part in w) if isinstance(w, tuple) else w[first:last].contiguous()
    for run in (moe, moe_ref):
        total = 0
        for first, last in ((0, 2), (2, 5), (5, 6)):
            local = torch.where((ids < first) | (ids >= last), last - first, ids - first)
            total = total + run(x, cut(w13, first, last), cut(w2, first, last), local, weights)
            nobody, base = torch.full_like(ids, last - first), torch.randn_like(x)
            assert torch.equal(run(x, cut(w13, first, last), cut(w2, first, last), nobody, weights, base), base)
            assert not run(x, cut(w13, first, last), cut(w2, first, last), nobody, weights).any()
        assert_close("moe", whole, total, 3e-6)
