"""The EAGLE-3 draft: one decoder layer on [embedding, hidden], and the tree it grows (arXiv 2503.01840; the dynamic tree of 2406.16858)."""
from types import SimpleNamespace

import torch

from minispec.kernels.draft_logits import draft_logits
from minispec.kernels.fused_linear import fused_linear, rms_norm
from minispec.kernels.project import heads_front, latent_front
from minispec.kernels.tree_attention import tree_attention
from minispec.layers import Rotary, allocate, mla_attend, mlp
from minispec.tree import Tree, select


def kv_shape(config):
    """(KV heads, width) of a token in the draft's cache."""
    return (1, config.kv_lora_rank + config.qk_rope_head_dim) if config.attention == "mla" else (config.num_key_value_heads, 2 * config.head_dim)


class Draft:
    """shapes: DraftPlan.shapes; ids: int64 [draft vocab] target id of every draft id, or None for the full vocabulary; embed, head: the
    target's, for drafts without their own; length: positions in the rotary table."""

    def __init__(self, config, shapes, ids, embed, head, dtype, device, length):
        self.config = config
        self.parameters = allocate(shapes, dtype, device)
        self.p = SimpleNamespace(**{"embed": embed, "head": head, **self.parameters})
        self.ids = None if ids is None else ids.to(device)
        self.rotary = Rotary(config.rope, length, device)

    def fuse(self, states, index=None):
        """States of the target [B, R, A * target hidden] -> [B, R, h]; index int64 [B, R]: which rows. For rows that come from the target,
        and for no others."""
        c, p = self.config, self.p
        if c.fc_norm:
            states = states if index is None else states.flatten(0, -2)[index]
            parts = states.unflatten(-1, (len(c.capture), c.target_hidden_size))
            states = torch.cat([rms_norm(part, weight, c.rms_norm_eps) for part, weight in zip(parts.unbind(-2), p.fc_norm)], -1)
            index = None
        return fused_linear(states, p.fc, p.input_norm if c.norm_before_fc else None, c.rms_norm_eps, index=index)

    def project(self, hidden, rows, cache):
        """First half of the layer: writes the rows' KV. hidden [B, R, h], fused or recycled -> (q [B, R, H, dk], residual [B, R, h])."""
        c, p, eps = self.config, self.p, self.config.rms_norm_eps
        residual, norm2 = hidden, p.hidden_norm
        if c.norm_before_residual:
            residual, norm2 = rms_norm(hidden, p.hidden_norm, eps), None
        x, angles = dict(index=rows.tokens, second=residual, norm2=norm2), self.rotary.at(rows.positions)
        if c.attention == "mla":
            a = fused_linear(p.embed, p.qkv_a, p.embed_norm, eps, **x)
            q = latent_front(a, getattr(p, "q_norm", None), getattr(p, "q_b", None), p.kv_norm, p.kv_b, c.qk_nope_head_dim, c.latent_norm_eps,
                             angles, rows.slots, cache)
        else:
            norms = (p.q_norm, p.k_norm) if c.qk_norm else (None, None)
            q = heads_front(p.embed, p.qkv, p.embed_norm, eps, **x, q_norm=norms[0], k_norm=norms[1], angles=angles, slots=rows.slots,
                            cache=cache, heads=c.num_attention_heads)
        return q, residual

    def attend(self, q, residual, view, cache, take=None):
        """Second half: attention, MLP, final norm. take int64 [B, r]: row numbers of the residual, where q holds a choice of rows.
        Returns (normed state for the head, state to recycle), both [B, R, h]."""
        c, p, eps = self.config, self.p, self.config.rms_norm_eps
        if c.attention == "mla":
            x = mla_attend(p, q, residual, cache, view, c, take)
        else:
            heads = tree_attention(q, cache, view, c.softmax_scale, slice(c.head_dim, 2 * c.head_dim)).flatten(2)
            x = fused_linear(heads, p.o, residual=residual, take=take)
        x = mlp(x, p, p.mlp_norm, eps)
        normed = rms_norm(x, p.norm, eps)
        return normed, normed if c.norm_output else x

    def extend(self, batch, cache, states, tokens, count):
        """Write the draft KV of the positions length - count ... length - 1 from true states, each with the token after it.

        states [B, R, A * target hidden], tokens int64 [B, R], count int64 [B]; rows from count on are padding.
        Returns q [B, R, H, dk], residual [B, R, h] and the rows, for whoever wants an output.
        """
        at = torch.arange(tokens.shape[1], device=tokens.device)
        valid = at < count[:, None]
        index = torch.where(valid, (batch.length - count)[:, None] + at, 0)
        rows = batch.rows(tokens, index, index, prefix=index + 1, words=torch.zeros_like(index), valid=valid, extent=batch.longest)
        return *self.project(self.fuse(states), rows, cache), rows

    def grow(self, batch, cache, unread, shape):
        """The tree of one round: extend with what the target made true, then up to shape.steps (1 or more) levels of guesses.

        unread: (states, next tokens, count) from the hidden buffer. Only the last true row needs an output: one layer's KV depends on
        no attention. Guessed rows write KV at cache indices length, length + 1, ...: the next extend overwrites them, so nothing
        recycled survives a round. Their ancestry lives in the words: bit t of a word = cache entry length + t.
        """
        q, residual, rows = self.extend(batch, cache, *unread)
        last = (unread[2] - 1).clamp(min=0)[:, None]      # an idle place of a captured round has none
        normed, recycled = self.attend(q.take_along_dim(last[..., None, None], 1), residual.take_along_dim(last[..., None], 1),
                                       rows.view.only(last), cache)
        tokens, logp = self.children(normed, batch, 1, shape)
        pool = Pool(tokens.flatten(1), logp.flatten(1))
        frontier, scores = torch.arange(shape.topk, device=tokens.device).expand_as(pool.tokens), pool.scores
        words, recycled = torch.zeros_like(frontier), recycled.expand(-1, shape.topk, -1)
        for depth in range(2, shape.steps + 1):
            if pool.settled(scores, shape.nodes):
                break
            entry = (depth - 2) * shape.topk + torch.arange(shape.topk, device=tokens.device)
            words = words | (1 << entry)
            positions = (batch.length + depth - 2)[:, None].expand_as(frontier)
            rows = batch.rows(pool.tokens.gather(1, frontier), positions, (batch.length[:, None] + entry),
                              prefix=batch.length[:, None].expand_as(frontier), words=words, extent=batch.longest + (depth - 1) * shape.topk)
            normed, recycled = self.attend(*self.project(recycled, rows, cache), rows.view, cache)
            tokens, logp = self.children(normed, batch, depth, shape)
            scores = (scores[..., None] + logp).flatten(1)
            base = pool.append(tokens.flatten(1), scores, frontier[..., None].expand(-1, -1, shape.topk).flatten(1), depth)
            scores, best = scores.topk(shape.topk, -1)
            parent = best // shape.topk
            frontier, words = base + best, words.gather(1, parent)
            recycled = recycled.take_along_dim(parent[..., None], 1)
        return pool.tree(batch, shape)

    def children(self, normed, batch, depth, shape):
        """The topk children, at `depth`, of every row [B, K, h]: target ids and log-probabilities [B, K, topk]."""
        parents = (batch.length + depth - 1)[:, None].expand(normed.shape[:2])
        return draft_logits(normed, self.p.head, self.ids, shape.topk, batch.sampling, parents)


class Pool:
    """Every candidate of a tree, level by level: tokens, scores (cumulative log-probability), parents (pool index, -1 root), depth."""

    def __init__(self, tokens, scores):
        self.tokens, self.scores = tokens, scores
        self.parents, self.depth = torch.full_like(tokens, -1), torch.ones_like(tokens)

    def append(self, tokens, scores, parents, depth):
        base = self.tokens.shape[1]
        self.tokens, self.scores = torch.cat([self.tokens, tokens], 1), torch.cat([self.scores, scores], 1)
        self.parents = torch.cat([self.parents, parents], 1)
        self.depth = torch.cat([self.depth, torch.full_like(tokens, depth)], 1)
        return base

    def settled(self, frontier, nodes):
        """No child of the frontier can enter the best `nodes`: its score is at most its parent's, and ties go to the earlier entry.

        frontier fp32 [B, K]: the scores of the nodes to expand. Asked on the CPU only, where looking costs nothing; on CUDA it would stop the queue.
        """
        if self.scores.is_cuda or self.scores.shape[1] < nodes:
            return False
        worst = self.scores.topk(nodes, -1).values[:, -1]
        return bool((frontier.amax(-1) <= worst).all())

    def tree(self, batch, shape):
        chosen, parents = select(self.scores, self.parents, shape.nodes)
        return Tree.build(batch, self.tokens.gather(1, chosen), parents, self.depth.gather(1, chosen), shape.topk == 1)
