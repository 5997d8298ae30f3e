"""Causal attention over a prompt's chunk with keys and values of every head at hand: flash-attn where it is installed, else torch's own."""
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.nn.functional as F


@lru_cache
def flash():
    """(flash_attn_func, whether keys and values may differ in width) of FlashAttention-4, 3 or 2, the first that is installed; else None."""
    for package, module, uneven in (("flash_attn", "flash_attn.cute", True), ("flash_attn_interface", "flash_attn_interface", True),
                                    ("flash_attn", "flash_attn", False)):
        if find_spec(package) and find_spec(module):
            return import_module(module).flash_attn_func, uneven
    return None


def prefill_attention(q, k, v, scale):
    """softmax(scale * q k) v, row i of the last R seeing the entries up to its own.

    q [B, R, H, dk]; k [B, S, H, dk], v [B, S, H, dv], S >= R, dv <= dk. Returns [B, R, H, dv] in q's dtype. flash-attn (FlashAttention-4
    and 3: 192 and 128 wide on Hopper) needs fp16 or bf16 on CUDA.
    """
    width, found = v.shape[-1], flash() if q.is_cuda and q.element_size() == 2 else None
    if width < k.shape[-1] and not (found and found[1]):
        v = F.pad(v, (0, k.shape[-1] - width))
    if found:
        out = found[0](q, k, v, softmax_scale=scale, causal=True)
        out = out[0] if isinstance(out, tuple) else out
    else:
        from torch.nn.attention.bias import causal_lower_right      # here: it imports torch._dynamo, most of a second

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]), scale=scale).transpose(1, 2)
    return out[..., :width]


def prefill_attention_ref(q, k, v, scale):
    """The same by the definition."""
    scores = torch.einsum("brhd,bshd->bhrs", q.float(), k.float()) * scale
    at = torch.arange(k.shape[1], device=q.device)
    hidden = at > at[-q.shape[1]:, None]
    return torch.einsum("bhrs,bshd->brhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v.float()).to(q.dtype)
