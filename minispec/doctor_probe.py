"""The draft in plain torch under any reading of its files, teacher-forced on text that the target wrote itself.

No cache, no tree, no kernel: a second implementation of the forward (arXiv 2503.01840), so that what the engine does can be compared with it.
"""
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from minispec.config import DraftConfig, Rope


@dataclass(frozen=True)
class Reading:
    """One way to read a draft: `config` with the three fields of it that may be read otherwise (capture in fc's order), and what no file says.

    form: of the captured states: "residual" (as it enters the layer), "normed" (by that layer's own norm), "delta" (what the layer before added),
    "shuffled" (of other rows). bypass: the layer whose state reaches the draft without fc. swapped: [hidden, embedding] instead of [embedding,
    hidden]. shift: the token beside state p is p + shift, and the one after that is foretold. split: heads are this much wider and fewer.
    vocab: "map" (d2t), "absolute" or "offset" (d2t read so instead), "order" (ascending ids), "nearest" (the target's row most like the
    draft's). embed, head: the "draft" file's or the "target"'s.
    """
    config: DraftConfig
    capture: tuple
    norm_before_residual: bool
    rope: Rope
    form: str = "residual"
    bypass: int | None = None
    swapped: bool = False
    shift: int = 1
    split: float = 1.0
    vocab: str = "map"
    embed: str = "draft"
    head: str = "draft"

    @classmethod
    def of(cls, config):
        return cls(config, config.capture, config.norm_before_residual, config.rope)


@dataclass(frozen=True)
class Text:
    """Prompts with what the target wrote after them, as one row a token: ids, place in its sequence and sequence, int64 [N].

    states fp32 [layers + 1, N, target hidden]: the residual stream entering each layer. written: not of a prompt.
    """
    ids: torch.Tensor
    position: torch.Tensor
    sequence: torch.Tensor
    written: torch.Tensor
    states: torch.Tensor

    def after(self, count):
        """(the token `count` places after each row, -1 where the sequence has ended; whether the target wrote it), both [N]."""
        at = torch.arange(len(self.ids), device=self.ids.device) + count
        inside = at < len(self.ids)
        at = at.clamp(0, len(self.ids) - 1)
        inside &= self.sequence[at] == self.sequence
        return torch.where(inside, self.ids[at], -1), inside & self.written[at]


@dataclass(frozen=True)
class Subject:
    """A draft's parameters (weights.draft's names, fp32), its ids int64 [draft vocab] or None; the target's embed, head, norms [layers + 1, h]."""
    p: dict
    ids: torch.Tensor | None
    embed: torch.Tensor
    head: torch.Tensor
    norms: torch.Tensor
    text: Text
    eps: float

    def captured(self, layer, form):
        x = self.text.states[layer]
        if form == "shuffled":
            return x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)]
        normed = F.rms_norm(x, x.shape[-1:], self.norms[layer], self.eps)
        return normed if form == "normed" else x - self.text.states[layer - 1] if form == "delta" and layer else x

    def fused(self, r):
        """[N, h]: what the layer reads on rows of the target."""
        if r.bypass is not None:
            return self.captured(r.bypass, "normed" if r.bypass == len(self.norms) - 1 else r.form)
        parts, c = [self.captured(layer, r.form) for layer in r.capture], r.config
        if c.fc_norm:
            parts = [rms(part, weight, c) for part, weight in zip(parts, self.p["fc_norm"])]
        x = torch.cat(parts, -1)
        return F.linear(rms(x, self.p["input_norm"], c) if c.norm_before_fc else x, self.p["fc"])

    def steps(self, r, rows, count=1, recycle=None):
        """Yields, for depth 1 ... count, the draft's logits [len(rows), draft vocab] for token p + 1 + depth of the rows p, true tokens given.

        recycle: the state before ("pre") or after ("post") the final norm, by default as the config says. Depth d of row p sees the true
        rows up to p and its own rows of the depths before, as in test-time training and in serving.
        """
        c, p, text = split(replace(r.config, rope=r.rope), r.split), self.p, self.text
        embed = p["embed"] if r.embed == "draft" and "embed" in p else self.embed
        head = p["head"] if r.head == "draft" and "head" in p else self.head if self.ids is None else self.head[self.ids]
        recycle = recycle or ("post" if c.norm_output else "pre")
        mask = (text.sequence[rows][:, None] == text.sequence) & (text.position[rows][:, None] >= text.position)
        g, position, past = self.fused(r), text.position, []
        for depth in range(count):
            tokens = text.after(depth + r.shift)[0].clamp(min=0)
            normed, e = rms(g, p["hidden_norm"], c), rms(F.embedding(tokens[rows] if depth else tokens, embed), p["embed_norm"], c)
            x = torch.cat([normed, e] if r.swapped else [e, normed], -1)
            q, k, v = (latent if c.attention == "mla" else grouped)(p, x, position + depth, c)
            past.append((k, v))
            if depth == 0:                              # the other rows are seen, not asked
                q, g, normed, position = q[rows], g[rows], normed[rows], position[rows]
            x = (normed if r.norm_before_residual else g) + F.linear(attend(q, past, mask, c.softmax_scale).flatten(1), p["o"])
            gate, up = F.linear(rms(x, p["mlp_norm"], c), p["gate_up"]).chunk(2, -1)
            y = x + F.linear(F.silu(gate) * up, p["down"])
            z = rms(y, p["norm"], c)
            yield F.linear(z, head)
            g = z if recycle == "post" else y


def split(c, factor):
    """A Llama head's config with heads `factor` times as wide and as many fewer: the same tensors, read in another way."""
    sizes = {name: int(getattr(c, name) / factor) for name in ("num_attention_heads", "num_key_value_heads")}
    dim = int(c.head_dim * factor)
    return c if factor == 1 else replace(c, **sizes, head_dim=dim, rope=replace(c.rope, dim=dim))


def rms(x, weight, c):
    return F.rms_norm(x, x.shape[-1:], weight, c.rms_norm_eps)


def rotate(x, position, rope):
    """x [N, heads, dim], turned in pairs (j, j + dim/2), or (2j, 2j + 1) where the style is interleaved."""
    angle = torch.outer(position.float(), rope.inverse_frequencies().to(x.device))[:, None]
    cos, sin = angle.cos() * rope.multiplier, angle.sin() * rope.multiplier
    a, b = x.chunk(2, -1) if rope.style == "half" else (x[..., ::2], x[..., 1::2])
    a, b = a * cos - b * sin, b * cos + a * sin
    return torch.cat([a, b], -1) if rope.style == "half" else torch.stack([a, b], -1).flatten(-2)


def grouped(p, x, position, c):
    """Llama's attention: q, k, v [N, heads, head_dim]."""
    heads, shared, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    q, k, v = F.linear(x, p["qkv"]).unflatten(-1, (-1, dim)).split([heads, shared, shared], 1)
    if c.qk_norm:
        q, k = rms(q, p["q_norm"], c), rms(k, p["k_norm"], c)
    k, v = (t.repeat_interleave(heads // shared, 1) for t in (rotate(k, position, c.rope), v))
    return rotate(q, position, c.rope), k, v


def latent(p, x, position, c):
    """Latent attention, not absorbed: q, k [N, heads, nope + rope], v [N, heads, v_head_dim]."""
    nope, rope, rank = c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
    q, low, turned = F.linear(x, p["qkv_a"]).split([len(p["qkv_a"]) - rank - rope, rank, rope], -1)
    if c.q_lora_rank:
        q = F.linear(F.rms_norm(q, q.shape[-1:], p["q_norm"], c.latent_norm_eps), p["q_b"])
    q, turned = q.unflatten(-1, (-1, nope + rope)), rotate(turned[:, None], position, c.rope)
    low = F.rms_norm(low, low.shape[-1:], p["kv_norm"], c.latent_norm_eps)
    k, v = torch.einsum("nr,hdr->nhd", low, p["kv_b"]).split([nope, c.v_head_dim], -1)
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], position, c.rope)], -1)
    return q, torch.cat([k, turned.expand(*k.shape[:-1], rope)], -1), v


def attend(q, past, mask, scale):
    """q [R, heads, dim]: depth 1 of all rows under `mask` [R, N], later depths each for its own row. -> [R, heads, width]."""
    (first, values), later = past[0], past[1:]
    scores = torch.einsum("nhd,mhd->hnm", q, first).masked_fill(~mask, -math.inf)
    own = [(q * k).sum(-1).T[..., None] for k, _ in later]
    weights = (torch.cat([scores, *own], -1) * scale).softmax(-1)
    out = torch.einsum("hnm,mhd->nhd", weights[..., :len(first)], values)
    for place, (_, v) in enumerate(later, len(first)):
        out = out + weights[..., place].T[..., None] * v
    return out
