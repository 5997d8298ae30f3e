"""Stored forms against loops written from the format's definition."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minispec.weights.quant import dequantize_fp8, unpack_int4

SMALL = settings(max_examples=40, deadline=None)


def pack_int4(weight: torch.Tensor, scale: torch.Tensor, group: int = 32) -> torch.Tensor:
    """int32 [out, in / 8]: each weight as the nearest of the 16 multiples of its group's scale; `unpack_int4` inverts it."""
    out, columns = weight.shape
    groups = weight.to(torch.float32).view(out, columns // group, group)
    quants = torch.round(groups / scale.to(torch.float32).unsqueeze(-1)).clamp(-8, 7).to(torch.int64) + 8
    shifts = torch.arange(0, 32, 4, device=weight.device)
    words = (quants.view(out, columns // 8, 8) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_by_loop(packed, scale, group):
    """Element by element: nibble i of word c is input 8c + i, stored as q + 8."""
    out, words = packed.shape
    weight = torch.zeros(out, words * 8)
    for r in range(out):
        for c in range(words * 8):
            word = packed[r, c // 8].item() & 0xFFFFFFFF
            q = (word >> 4 * (c % 8) & 0xF) - 8
            weight[r, c] = torch.tensor(float(q)) * scale[r, c // group].float()
    return weight


def test_the_published_word():
    """q = -8 .. -1 is stored as 0x76543210, q = 0 .. 7 as 0xFEDCBA98."""
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - 2**32, 0, -1]], dtype=torch.int32)
    got = unpack_int4(words, torch.ones(1, 1))
    assert got.tolist() == [[*range(-8, 0), *range(8), *[-8] * 8, *[7] * 8]]
    assert torch.equal(pack_int4(got, torch.ones(1, 1)), words)


@SMALL
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from([32, 64]), st.integers(0, 2**32))
def test_int4_equals_the_loop_and_packs_back(out, groups, group, seed):
    g = torch.Generator().manual_seed(seed)
    packed = torch.randint(-2**31, 2**31, (out, groups * group // 8), generator=g, dtype=torch.int64).to(torch.int32)
    scale = (torch.rand(out, groups, generator=g) * 0.1 + 1e-3).bfloat16()
    weight = unpack_int4(packed, scale, group)
    assert weight.dtype == torch.float32 and torch.equal(weight, unpack_by_loop(packed, scale, group))
    assert torch.equal(pack_int4(weight, scale, group), packed)


def test_int4_product_is_rounded_once():
    """q * s in fp32 and one rounding to bf16, as transformers and compressed-tensors do: 7 * 1.0078125 in bf16 is 7.0625."""
    packed = torch.full((1, 4), -1, dtype=torch.int32)
    scale = torch.tensor([[1.0078125]], dtype=torch.bfloat16)
    assert unpack_int4(packed, scale)[0, 0].item() == 7.0546875
    assert unpack_int4(packed, scale).bfloat16()[0, 0].item() == 7.0625


@SMALL
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([(16, 16), (8, 4), (1, 3)]), st.integers(0, 2**32))
def test_fp8_equals_the_loop_with_ragged_edges(out, columns, block, seed):
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(out, columns, generator=g) * 50).to(torch.float8_e4m3fn)
    scale = torch.rand(math.ceil(out / block[0]), math.ceil(columns / block[1]), generator=g)
    got = dequantize_fp8(weight, scale, block)
    expected = torch.tensor([[weight[r, c].item() * scale[r // block[0], c // block[1]].item() for c in range(columns)]
                             for r in range(out)])
    assert torch.allclose(got, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [127, 128, 129, 576])
def test_fp8_of_128(rows):
    """576 rows are four and a half tiles (kv_a of DeepSeek-V3)."""
    scale = torch.arange(1.0, math.ceil(rows / 128) + 1)[:, None]
    got = dequantize_fp8(torch.ones(rows, 3).to(torch.float8_e4m3fn), scale)
    assert got[:, 0].tolist() == [1.0 + r // 128 for r in range(rows)]
