"""The pieces that target and draft share: rotary embedding, SwiGLU and the output of latent attention (MLA)."""
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from minispec.kernels.fused_linear import fused_linear
from minispec.kernels.linear import linear
from minispec.kernels.prefill import prefill_attention
from minispec.kernels.project import latent_front, latent_lift, latent_queries
from minispec.kernels.tree_attention import tree_attention


def mlp(x, p, norm, eps, ranks, exact=False):
    """x + SwiGLU(norm x): down(silu(gate x) * up x); gate rows come first in gate_up [2I, h]."""
    inner = fused_linear(x, p.gate_up, norm, eps, swiglu=True, exact=exact)
    return ranks.sum(fused_linear(inner, p.down, residual=ranks.once(x), exact=exact))


@dataclass(frozen=True)
class Angles:
    """Rotary embedding at positions int64 [B, R], contiguous: x * cos + x[partner] * sin, the sign of the rotation inside sin.

    cos, sin fp32 [length, dim]; partner int64 [dim]: the channel that a channel is rotated with; interleaved: pairs are neighbours.
    """
    cos: torch.Tensor
    sin: torch.Tensor
    partner: torch.Tensor
    interleaved: bool
    positions: torch.Tensor

    @cached_property
    def gathered(self):
        """(cos, sin) fp32 [B, R, 1, dim], once a forward for all layers and heads."""
        return self.cos[self.positions].unsqueeze(2), self.sin[self.positions].unsqueeze(2)

    def rotate(self, x):
        """x [B, R, heads, dim] -> the same, rotated in fp32."""
        cos, sin = self.gathered
        return torch.addcmul(x * cos, x.index_select(-1, self.partner), sin).to(x.dtype)


class Rotary:
    """Tables of the rotary embedding in the form of Angles, one for both layouts.

    rope: config.Rope; the tables hold `length` positions, fp32 [length, dim]. They are sized by the longest position that the
    engine can reach, never by the model's own max_position_embeddings (reads past a short table are silent elsewhere).
    """

    def __init__(self, rope, length, device):
        angle = torch.outer(torch.arange(length, dtype=torch.float32), rope.inverse_frequencies().float())
        cos, sin, channel = angle.cos() * rope.multiplier, angle.sin() * rope.multiplier, torch.arange(rope.dim)
        self.interleaved = rope.style == "interleaved"
        first, second = (channel[::2], channel[1::2]) if self.interleaved else channel.chunk(2)

        def laid(a, b):                     # what belongs to the first and the second channel of each pair
            return (torch.stack([a, b], -1).flatten(-2) if self.interleaved else torch.cat([a, b], -1)).to(device)
        self.cos, self.sin, self.partner = laid(cos, cos), laid(-sin, sin), laid(second, first)

    def at(self, positions):
        """The Angles of positions int64 [B, R]."""
        return Angles(self.cos, self.sin, self.partner, self.interleaved, positions.contiguous())


def embed(tokens, table, vocab, ranks):
    """Rows of an embedding of `vocab` rows, of which `table` holds this rank's."""
    if ranks.size == 1:
        return F.embedding(tokens, table)
    local = tokens - ranks.span(vocab)[0]
    found = F.embedding(local.clamp(0, len(table) - 1), table)
    return ranks.sum(found.masked_fill_(((local < 0) | (local >= len(table)))[..., None], 0))


def latent_inputs(p: SimpleNamespace, a, config, ranks):
    """What latent_front reads before the angles, from a = qkv_a x, whole where ranks share its rows."""
    if ranks.shard_latent:
        nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        own = 0 if config.q_lora_rank else len(p.kv_b) * (nope + rope)
        a = torch.cat([a[..., :own], ranks.join(a[..., own:], (config.q_lora_rank or 0) + rank + rope)], -1)
    return a, getattr(p, "q_norm", None), getattr(p, "q_b", None), p.kv_norm, p.kv_b, config.qk_nope_head_dim, config.latent_norm_eps


def latent_project(p: SimpleNamespace, a, cache, slots, angles, config, ranks, exact=False):
    """Queries of latent attention for the heads of this rank, which kv_b holds; writes the cache. See latent_front."""
    return latent_front(*latent_inputs(p, a, config, ranks), angles, slots, cache, exact)


def mla_attend(p: SimpleNamespace, q, residual, cache, view, config, ranks, take=None):
    """q [B, R, H, kv_lora + rope] -> residual + [B, R, hidden]: the value of a cached token is its latent, lifted per head by UV after the
    sum. take int64 [B, R]: row numbers of the residual."""
    part, lse = tree_attention(q, cache, view, config.softmax_scale, slice(0, config.kv_lora_rank), merge=False)
    lifted = latent_lift(part, lse, p.kv_b, config.qk_nope_head_dim, view.exact)
    return ranks.sum(fused_linear(lifted, p.o, residual=ranks.once(residual), take=take, exact=view.exact))


def expands(view, rows, width):
    """Whether a prompt's chunk is worth keys and values of every head: of `rows` rows, `width` values a cached token.

    Absorbed, a row and token cost 1,088 products a head at Kimi-K2.5's sizes, expanded 320 and once a token 131,072: even at 170 rows, and at
    some 500 with the expanded values written and read.
    """
    return view.chain and view.base.is_cuda and not view.exact and rows >= 512 and view.extent * width < 2**30


def mla_prefill(p: SimpleNamespace, a, residual, cache, rows, angles, config, ranks):
    """mla_attend of a prompt's chunk with keys and values lifted from the latents first, for one request."""
    q = torch.cat(latent_queries(*latent_inputs(p, a, config, ranks), angles, rows.slots, cache), -1)
    rank, nope = config.kv_lora_rank, config.qk_nope_head_dim
    entries = cache.index_select(0, rows.view.index[0]).transpose(0, 1)                                # [1, S, rank + rope]
    lifted = linear(entries[..., :rank], p.kv_b.flatten(0, 1)).unflatten(-1, p.kv_b.shape[:2])         # [1, S, H, nope + v]
    keys = torch.cat([lifted[..., :nope], entries[..., None, rank:].expand(-1, -1, len(p.kv_b), -1)], -1)
    out = prefill_attention(q, keys, lifted[..., nope:], config.softmax_scale).flatten(2)
    return ranks.sum(fused_linear(out, p.o, residual=ranks.once(residual)))


def namespaces(parameters, count):
    """The parameters of `layers.{i}.*` as one namespace a layer: p.qkv_a instead of parameters['layers.3.qkv_a']."""
    layers = [SimpleNamespace() for _ in range(count)]
    for name, tensor in parameters.items():
        if name.startswith("layers."):
            _, index, name = name.split(".")
            setattr(layers[int(index)], name, tensor)
    return layers


def allocate(shapes, dtype, device, dtypes={}):
    """name -> shape into name -> tensor of NaN, so that a parameter no file filled cannot pass for a value; the router's in fp32.

    dtypes: of those that stay as the file stores them (weights/packed.py); NaN where that dtype has one, else 0.
    On the CPU a matrix [out, in] lies in memory as [in, out], which oneDNN reads faster (1.3x at [384, 384]); the heads, wide, do not.
    """
    def tensor(name, shape):
        kind = dtypes.get(name, torch.float32 if name.endswith((".router", ".bias")) else dtype)
        value = float("nan") if kind.is_floating_point and kind.itemsize > 1 else 0
        if device.type == "cpu" and len(shape) > 1 and name not in dtypes and not name.endswith(("embed", "head", "w13", "kv_b")):
            return torch.full((*shape[:-2], shape[-1], shape[-2]), value, dtype=kind).mT
        return torch.full(shape, value, dtype=kind, device=device)
    return {name: tensor(name, shape) for name, shape in shapes.items()}
