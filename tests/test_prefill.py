"""Attention of a prompt's chunk: the definition in float64, torch's attention, and flash-attn's calling convention."""
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from minispec import Engine, SamplingParams
from minispec.kernels import prefill
from minispec.kernels.prefill import flash, prefill_attention, prefill_attention_ref
from minispec.layers import expands

from .conftest import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def case(rows, entries, heads=3, dk=24, dv=16, dtype=torch.float32, batch=2):
    g = torch.Generator().manual_seed(rows)
    return [torch.randn(batch, n, heads, d, generator=g).to(DEVICE, dtype) for n, d in ((rows, dk), (entries, dk), (entries, dv))]


@pytest.mark.parametrize("rows, entries", [(1, 1), (1, 13), (7, 7), (5, 31), (64, 67)])
@pytest.mark.parametrize("dv", [16, 24])
def test_prefill_attention(rows, entries, dv):
    q, k, v = case(rows, entries, dv=dv)
    wanted = torch.zeros(*q.shape[:3], dv, dtype=torch.float64, device=DEVICE)
    for row in range(rows):
        seen = entries - rows + row + 1
        weights = (torch.einsum("bhd,bshd->bhs", q[:, row].double(), k[:, :seen].double()) * 0.3).softmax(-1)
        wanted[:, row] = torch.einsum("bhs,bshd->bhd", weights, v[:, :seen].double())
    assert_close("torch", wanted, prefill_attention(q, k, v, 0.3), 1e-6)
    assert_close("reference", wanted, prefill_attention_ref(q, k, v, 0.3), 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    q, k, v = case(37, 101, dk=192, dv=128, dtype=dtype)
    assert_close("half", prefill_attention_ref(q.double(), k.double(), v.double(), 0.07), prefill_attention(q, k, v, 0.07), 6e-3)


@pytest.mark.parametrize("name, uneven", [("flash_attn.cute", True), ("flash_attn_interface", True), ("flash_attn", False)])
def test_flash_attn_where_installed(name, uneven, monkeypatch):
    """The newest that is found; only FlashAttention-2 gets values as wide as keys. Each returns a tuple or a tensor."""
    def flash_attn_func(q, k, v, softmax_scale, causal):
        assert causal and (uneven or k.shape == v.shape)
        out = prefill_attention_ref(q, k, v, softmax_scale)
        return (out, None) if uneven else out

    module = ModuleType(name)
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(prefill, "find_spec", lambda found: object() if name.startswith(found) else None)
    flash.cache_clear()
    try:
        function, wide = flash()
        assert function is flash_attn_func and wide == uneven
        monkeypatch.setattr(prefill, "flash", lambda: (flash_attn_func, uneven))
        q, k, v = case(5, 9, dtype=torch.bfloat16)
        fake = type("Fake", (torch.Tensor,), {"is_cuda": property(lambda self: True)})
        assert_close("flash", prefill_attention_ref(q, k, v, 0.3), prefill_attention(q.as_subclass(fake), k, v, 0.3), 1e-6)
    finally:
        flash.cache_clear()


def test_a_long_chunk_in_the_target(target, monkeypatch):
    """Keys and values of every head and the absorbed form are one function: logits, states, and what later rows read from the cache."""
    ids = [(7 * i * i + 3 * i) % 500 for i in range(90)]
    found, calls = [], []
    for lifted in (False, True):
        monkeypatch.setattr("minispec.target.expands", lambda view, rows, width: lifted and view.chain and calls.append(rows) is None)
        with Engine(target, "none", dtype="float32", capture=(0, 3, 8), chunk=37) as engine:
            score = engine.score(ids)
            found.append((score.logits, score.states, engine.generate(ids, SamplingParams(max_tokens=12, ignore_eos=True)).ids))
    assert set(calls) == {37, 16}
    assert_close("logits", found[0][0], found[1][0], 1e-5)
    assert_close("states", found[0][1], found[1][1], 1e-5)
    assert found[0][2] == found[1][2]


def test_when_a_chunk_is_expanded():
    view = SimpleNamespace(chain=True, base=SimpleNamespace(is_cuda=True), exact=False, extent=8192)
    assert expands(view, 512, 16384) and not expands(view, 511, 16384) and not expands(view, 512, 2**20)
    for change in (dict(chain=False), dict(exact=True), dict(base=SimpleNamespace(is_cuda=False))):
        assert not expands(SimpleNamespace(**vars(view) | change), 512, 16384)


def test_without_flash_attn(monkeypatch):
    monkeypatch.setattr(prefill, "find_spec", lambda found: None)
    flash.cache_clear()
    assert flash() is None
    flash.cache_clear()
