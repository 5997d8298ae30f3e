"""The pieces that target and draft share: norm, rotary embedding, SwiGLU and latent attention (MLA)."""
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from minispec.kernels.fused_linear import rms_norm
from minispec.kernels.linear import linear, rowwise
from minispec.kernels.tree_attention import tree_attention


def mlp(x, gate_up, down):
    """SwiGLU: down(silu(gate x) * up x); gate rows come first in gate_up [2I, h]."""
    gate, up = linear(x, gate_up).chunk(2, -1)
    return linear(F.silu(gate) * up, down)


class Rotary:
    """Rotary embedding as one formula for both layouts: x * cos + x[partner] * sin, the sign of the rotation inside sin.

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

    def at(self, positions):
        """positions [B, R] -> (cos, sin) fp32 [B, R, 1, dim], gathered once a forward for all layers and heads."""
        return self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2)

    def __call__(self, x, angles):
        """x [B, R, heads, dim] -> the same, rotated in fp32."""
        cos, sin = angles
        return torch.addcmul(x * cos, x.index_select(-1, self.partner), sin).to(x.dtype)


def mla_project(p: SimpleNamespace, x, cache, rows, angles, config, rotary):
    """Queries and cached latents of multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    x [B, R, width] -> q [B, R, H, kv_lora + rope]; writes each row's latent and rotated key to cache [slots, 1, kv_lora + rope] at rows.slots.
    score = scale * (UK^T q_nope . c + q_rope . k_rope): the per-head key projection UK moves from the cache to the query.
    """
    heads, nope, rope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
    exact = rows.view.exact
    q, latent, k_rope = rowwise(lambda x: linear(x, p.qkv_a), x, exact).split([p.qkv_a.shape[0] - rank - rope, rank, rope], -1)
    if config.q_lora_rank:
        q = rowwise(lambda q: linear(q, p.q_b), rms_norm(q, p.q_norm, config.latent_norm_eps), exact)
    q_nope, q_rope = q.unflatten(-1, (heads, nope + rope)).split([nope, rope], -1)
    latent = rms_norm(latent, p.kv_norm, config.latent_norm_eps).unsqueeze(2)
    cache[rows.slots] = torch.cat([latent, rotary(k_rope.unsqueeze(2), angles)], -1)
    q_latent = rowwise(lambda q: torch.matmul(q.transpose(1, 2), p.kv_b[:, :nope]).transpose(1, 2), q_nope, exact)     # [B, R, H, rank]
    return torch.cat([q_latent, rotary(q_rope, angles)], -1)


def mla_attend(p: SimpleNamespace, q, cache, view, config):
    """q [B, R, H, kv_lora + rope] -> [B, R, hidden]: the value of a cached token is its latent, lifted per head by UV after the sum."""
    out = tree_attention(q, cache, view, config.softmax_scale, slice(0, config.kv_lora_rank))
    def lift(out):
        out = torch.matmul(out.transpose(1, 2), p.kv_b[:, config.qk_nope_head_dim:].transpose(1, 2))   # [B, H, R, v]
        return linear(out.transpose(1, 2).flatten(2), p.o)
    return rowwise(lift, out, view.exact)


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
