"""The Triton attention kernels against the definition in float64: on a GPU where there is one, else under Triton's interpreter."""
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minispec.kernels import tree_attention as module
from minispec.kernels.jit import INTERPRET
from minispec.kernels.tree_attention import Config, configure, tree_attention, tree_attention_ref

from . import gluon
from .conftest import assert_close
from .test_kernels import attention_case, attention_loop

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not GPU and not INTERPRET, reason="no GPU, and TRITON_INTERPRET=1 is not set")
MLA = dict(heads=6, kv_heads=1, width=12, dk=12, values=slice(0, 8))
GQA = dict(heads=6, kv_heads=2, width=16, dk=8, values=slice(8, 16))
WIDE = dict(heads=64, kv_heads=1, width=576, dk=576, values=slice(0, 512))
TIGHT = {torch.float32: 1e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def on(monkeypatch):
    monkeypatch.setattr(module, "use_triton", lambda x: True)


def moved(inputs, dtype=torch.float32, **fields):
    q, cache, view, scale, values = inputs
    device = "cuda" if GPU else "cpu"
    tensors = {name: getattr(view, name).to(device) for name in ("table", "prefix", "base", "words")}
    return q.to(device, dtype), cache.to(device, dtype), replace(view, **tensors, **fields), scale, values


def check(case, config=None, dtype=torch.float32, **fields):
    inputs = moved(attention_case(0, **case), dtype, **fields)
    out = tree_attention(*inputs, config=config)
    expected = attention_loop(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs))
    assert out.dtype == dtype and out.is_contiguous()
    assert_close("attention", expected, out.cpu().float(), TIGHT[dtype])
    return inputs, out


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case", [
    dict(batch=1, rows=1, page_size=4, base=[0], chain=False, **MLA),
    dict(batch=3, rows=7, page_size=4, base=[1, 37, 7], chain=False, **MLA),
    dict(batch=2, rows=5, page_size=3, base=[41, 2], chain=False, **GQA),
    dict(batch=1, rows=64, page_size=16, base=[17], chain=False, heads=2, kv_heads=1, width=6, dk=6, values=slice(0, 4)),
    dict(batch=1, rows=67, page_size=16, base=[5], chain=True, heads=2, kv_heads=2, width=8, dk=4, values=slice(4, 8)),
    dict(batch=1, rows=3, page_size=16, base=[70], chain=False, heads=19, kv_heads=1, width=37, dk=37, values=slice(0, 32)),
    dict(batch=1, rows=2, page_size=5, base=[9], chain=False, heads=2, kv_heads=1, width=24, dk=24, values=slice(0, 24)),
    dict(batch=1, rows=2, page_size=5, base=[9], chain=False, heads=2, kv_heads=1, width=24, dk=16, values=slice(4, 23)),
    dict(batch=1, rows=3, page_size=16, base=[70], chain=False, heads=3, kv_heads=3, width=14, dk=7, values=slice(7, 14)),
], ids=["one row", "mla trees", "gqa trees", "64 rows", "prefill", "more heads than a tile", "keys are the values", "values overlap", "odd"])
def test_against_the_definition(case, exact):
    check(case, None if GPU else Config(16, 16, 1 if exact or case["rows"] > 64 else 3, 4, 1), exact=exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("case, splits, N", [
    (dict(batch=2, rows=1, heads=6, base=[0, 300]), 1, 64), (dict(batch=2, rows=7, heads=20, base=[1, 290]), 3, 32),
    (dict(batch=1, rows=64, heads=2, base=[70]), 2, 64), (dict(batch=2, rows=67, heads=2, base=[0, 5], chain=True), 1, 32),
    (dict(batch=1, rows=3, heads=70, base=[150]), 9, 32)], ids=["one row", "trees", "64 rows", "prefill", "more heads than a tile"])
def test_the_hopper_kernel(case, splits, N, exact, monkeypatch):
    """Its text over numpy on the CPU: indices, masks, splits and the order of copies and products, not the layouts."""
    case = dict(chain=False, kv_heads=1, width=80, dk=80, values=slice(0, 16), page_size=4) | case
    if GPU:
        case |= dict(width=576, dk=576, values=slice(0, 512))
    else:
        hopper = gluon.load(Path(module.__file__).with_name("hopper.py"))
        monkeypatch.setattr(module, "_machine", lambda device: (132, hopper.launch(hopper.attend)))
        monkeypatch.setattr(module, "EXACT", 128)
    splits = -(-(max(case["base"]) + case["rows"]) // module.EXACT) if exact else splits
    check(case, Config(64, N, splits, 4, 0), torch.bfloat16 if GPU else torch.float32, exact=exact)


@pytest.mark.skipif(not GPU, reason="the interpreter computes in fp32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [MLA, GQA])
def test_half_precision(kind, dtype):
    check(dict(batch=2, rows=5, page_size=16, base=[50, 3], chain=False, **kind), Config(16, 32, 2, 4, 2), dtype)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
def test_any_number_of_splits(splits):
    """More splits than there are steps too: the merge leaves out the ones that never ran, whose memory holds NaN."""
    check(dict(batch=2, rows=4, page_size=4, base=[90, 6], chain=False, **MLA), Config(16, 16, splits, 4, 1))


def test_extent_is_only_a_bound():
    """In a CUDA graph the extent is its bucket's: lengths are read on the device, and the table holds any page beyond them."""
    inputs = attention_case(3, batch=2, rows=4, page_size=4, base=[21, 6], chain=False, **MLA)
    view = replace(inputs[2], table=torch.cat([inputs[2].table, torch.full((2, 90), -1)], 1), extent=360)
    inputs = moved((*inputs[:2], view, *inputs[3:]))
    for config in (None, Config(16, 16, 7, 4, 1)):
        assert_close("attention", attention_loop(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs)),
                     tree_attention(*inputs, config=config).cpu(), 1e-6)


def test_strides_of_the_inputs_and_rows_that_see_nothing():
    q, cache, view, scale, values = attention_case(5, batch=2, rows=3, page_size=4, base=[9, 9], chain=False, **MLA)
    q = torch.stack([q, q], 3).transpose(1, 3)[:, 0].transpose(1, 2)                                   # [B, R, H, dk], rows and heads swapped
    view = replace(view, prefix=view.prefix[:, :1].expand(2, 3), base=view.base[:1].expand(2))
    inputs = moved((q, cache, view, scale, values))
    assert_close("strided", tree_attention_ref(*inputs).cpu(), tree_attention(*inputs).cpu(), 1e-6)
    nothing = replace(inputs[2], prefix=torch.zeros_like(inputs[2].prefix), words=torch.zeros_like(inputs[2].words))
    for config in (None, Config(16, 16, 2, 4, 1)):
        assert not tree_attention(*inputs[:2], nothing, *inputs[3:], config=config).any()


@pytest.mark.parametrize("kind", [MLA, GQA, WIDE], ids=["mla", "gqa", "wide"])
def test_exact_is_independent_of_the_other_rows_and_of_the_place_in_the_tail(kind, monkeypatch):
    """A row of a tree equals, bit for bit, the same row alone, and the row that plain decoding computes with its path committed."""
    if kind is WIDE and not GPU:
        pytest.skip("the kernel of hopper.py runs on a GPU")
    if not GPU:
        monkeypatch.setattr(module, "EXACT", 32)                                                       # a few splits in a short context
    rows, base = (9, 2040) if GPU else (5, 60)
    inputs = attention_case(7, batch=1, rows=rows, page_size=4, base=[base], chain=False, **kind)
    q, cache, view, scale, values = moved(inputs, torch.bfloat16 if kind is WIDE else torch.float32, exact=True)
    config = None if GPU else Config(16, 16, 3, 4, 1)
    together = tree_attention(q, cache, view, scale, values, config=config)
    for row in range(rows):
        alone = replace(view, prefix=view.prefix[:, row:row + 1], words=view.words[:, row:row + 1])
        assert torch.equal(together[:, row:row + 1], tree_attention(q[:, row:row + 1], cache, alone, scale, values, config=config))
        word = view.words[0, row].item()
        ancestors = [j for j in range(rows) if word >> j & 1]
        committed = cache.clone()
        index = lambda at: view.table[0, at // view.page_size] * view.page_size + at % view.page_size  # noqa: E731
        for to, j in enumerate(ancestors):
            committed[index(base + to)] = cache[index(base + j)]
        length = base + len(ancestors)
        plain = replace(alone, prefix=torch.full_like(alone.prefix, length), words=torch.zeros_like(alone.words), extent=length + 40)
        assert torch.equal(together[:, row:row + 1], tree_attention(q[:, row:row + 1], committed, plain, scale, values, config=config))


def test_configure_covers_the_context():
    """Whatever the shape: tiles that the hardware takes, and splits that are few enough to be worth their merge."""
    for batch, rows, heads, extent, exact in itertools.product((1, 4), (1, 7, 64, 256), (6, 8, 64, 128), (1, 300, 8200, 131136), (False, True)):
        c = configure(batch, rows, heads, 1, 576, 512, extent, exact, 2, 132)
        assert c.M in (16, 32, 64) and 1 <= c.splits <= max(132, -(-extent // module.EXACT))
