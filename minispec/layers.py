"""The pieces that target and draft share: rotary embedding, SwiGLU and the output of latent attention (MLA)."""
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from minispec.kernels.fused_linear import fused_linear
from minispec.kernels.project import Angles, latent_front, latent_lift
from minispec.kernels.tree_attention import tree_attention


def mlp(x, p, norm, eps, ranks, exact=False):
    """x + SwiGLU(norm x): down(silu(gate x) * up x); gate rows come first in gate_up [2I, h]."""
    inner = fused_linear(x, p.gate_up, norm, eps, swiglu=True, exact=exact)
    return ranks.sum(fused_linear(inner, p.down, residual=ranks.once(x), exact=exact))


class Rotary:
    """Tables of the rotary embedding in the form of kernels.project.Angles, one for both layouts.

    rope: config.Rope; the tables hold `length` positions, fp32 [length, dim]. They are sized by the longest position that the
    engine can reach, never by the model's own max_position_embeddings (reads past a short table are silent elsewhere).
    """

    def __init__(self, rope, length, device):
        angle = torch.outer(torch.arange(length, dtype=torch.float32), rope.inverse_frequencies().float())
        pair = torch.arange(rope.dim).view(-1, 2) if rope.style == "interleaved" else torch.arange(rope.dim).view(2, -1).T
        first, second = pair[:, 0], pair[:, 1]
        cos, sin, partner = torch.empty(length, rope.dim), torch.empty(length, rope.dim), torch.empty(rope.dim, dtype=torch.int64)
        cos[:, first] = cos[:, second] = angle.cos() * rope.multiplier
        sin[:, second] = angle.sin() * rope.multiplier
        sin[:, first] = -sin[:, second]
        partner[first], partner[second] = second, first
        self.cos, self.sin, self.partner = cos.to(device), sin.to(device), partner.to(device)
        self.interleaved = rope.style == "interleaved"

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


def latent_project(p: SimpleNamespace, a, cache, slots, angles, config, ranks, exact=False):
    """Queries of latent attention from a = qkv_a x, for the heads of this rank, which kv_b holds; writes the cache. See latent_front."""
    if ranks.shard_latent:
        nope, rope, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        own = 0 if config.q_lora_rank else len(p.kv_b) * (nope + rope)
        a = torch.cat([a[..., :own], ranks.join(a[..., own:], (config.q_lora_rank or 0) + rank + rope)], -1)
    return latent_front(a, getattr(p, "q_norm", None), getattr(p, "q_b", None), p.kv_norm, p.kv_b, config.qk_nope_head_dim,
                        config.latent_norm_eps, angles, slots, cache, exact)


def mla_attend(p: SimpleNamespace, q, residual, cache, view, config, ranks, take=None):
    """q [B, R, H, kv_lora + rope] -> residual + [B, R, hidden]: the value of a cached token is its latent, lifted per head by UV after the
    sum. take int64 [B, R]: row numbers of the residual."""
    part, lse = tree_attention(q, cache, view, config.softmax_scale, slice(0, config.kv_lora_rank), merge=False)
    lifted = latent_lift(part, lse, p.kv_b, config.qk_nope_head_dim, view.exact)
    return ranks.sum(fused_linear(lifted, p.o, residual=ranks.once(residual), take=take, exact=view.exact))


def namespaces(parameters, count):
    """The parameters of `layers.{i}.*` as one namespace a layer: p.qkv_a instead of parameters['layers.3.qkv_a']."""
    layers = [SimpleNamespace() for _ in range(count)]
    for name, tensor in parameters.items():
        head, _, rest = name.partition(".")
        if head == "layers":
            index, name = rest.split(".")
            setattr(layers[int(index)], name, tensor)
    return layers


def allocate(shapes, dtype, device, dtypes={}):
    """name -> shape into name -> tensor of NaN, so that a parameter no file filled cannot pass for a value; the router's in fp32.

    dtypes: of those that stay as the file stores them (weights/packed.py); NaN where that dtype has one, else 0.
    On the CPU a matrix [out, in] lies in memory as [in, out], which oneDNN reads faster (1.3x at [384, 384]); the heads, wide, do not.
    """
    def tensor(name, shape):
        kind = dtypes.get(name, torch.float32 if name.endswith((".router", ".bias")) else dtype)
        if name in dtypes:
            return torch.full(shape, float("nan") if kind.is_floating_point and kind.itemsize > 1 else 0, dtype=kind, device=device)
        if device.type == "cpu" and len(shape) > 1 and not name.endswith(("embed", "head", "w13", "kv_b")):
            return torch.full((*shape[:-2], shape[-1], shape[-2]), float("nan"), dtype=kind).mT
        return torch.full(shape, float("nan"), dtype=kind, device=device)
    return {name: tensor(name, shape) for name, shape in shapes.items()}
