"""The fused kernels of a layer against float64 definitions: on CUDA as they are, elsewhere under Triton's interpreter."""
import sys

import pytest
import torch

from minispec.kernels import fused_linear as fused
from minispec.kernels.fused_linear import Config, fused_linear, fused_linear_ref

from .conftest import assert_close

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = DEVICE == "cpu"      # the interpreter cuts bf16 instead of rounding
TIGHT = {torch.float32: 1e-6, torch.bfloat16: 3e-2 if INTERPRETED else 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    for module in (fused,):
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
