"""The EAGLE-3 draft: one decoder layer on [embedding, hidden], and the tree it grows (arXiv 2503.01840; the dynamic tree of 2406.16858)."""
from types import SimpleNamespace

import torch

from minispec.batch import Rows
from minispec.choice import draft_logits
from minispec.kernels.fused_linear import fused_linear, rms_norm
from minispec.kernels.growth import Growth
from minispec.kernels.project import heads_front
from minispec.kernels.tree import Pool, level
from minispec.kernels.tree_attention import tree_attention
from minispec.kernels.view import View
from minispec.layers import Rotary, allocate, embed, latent_project, mla_attend, mlp
from minispec.ranks import ALONE


def kv_shape(config, ranks=ALONE):
    """(KV heads, width) of a token in a rank's draft cache."""
    if config.attention == "mla":
        return 1, config.kv_lora_rank + config.qk_rope_head_dim
    return max(1, config.num_key_value_heads // ranks.size), 2 * config.head_dim


class Draft:
    """shapes: DraftPlan.shapes; ids: int64 [draft vocab] target id of every draft id, or None for the full vocabulary; embed, head: the
    target's, for drafts without their own; length: positions in the rotary table. ranks: who share the layer, fc by its output rows."""

    def __init__(self, config, shapes, ids, embed, head, dtype, device, length, ranks=ALONE):
        self.config, self.ranks = config, ranks
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
        fused = fused_linear(states, p.fc, p.input_norm if c.norm_before_fc else None, c.rms_norm_eps, index=index)
        return self.ranks.join(fused, c.hidden_size)

    def project(self, hidden, rows, cache, take=None):
        """First half of the layer: writes the rows' KV. hidden [B, R, h], fused or recycled, or with take int64 [B, R] its row numbers, flat.
        Returns q [B, R, H, dk] and the residual, of all rows of hidden."""
        c, p, eps = self.config, self.p, self.config.rms_norm_eps
        residual, norm2 = hidden, p.hidden_norm
        if c.norm_before_residual:
            residual, norm2 = rms_norm(hidden, p.hidden_norm, eps), None
        alone = self.ranks.size == 1        # then a program gathers the embedding that it reads
        first = p.embed if alone else embed(rows.tokens, p.embed, c.vocab_size, self.ranks)
        x, angles = dict(index=rows.tokens if alone else None, second=residual, norm2=norm2, take=take), self.rotary.at(rows.positions)
        if c.attention == "mla":
            q = latent_project(p, fused_linear(first, p.qkv_a, p.embed_norm, eps, **x), cache, rows.slots, angles, c, self.ranks)
        else:
            norms = (p.q_norm, p.k_norm) if c.qk_norm else (None, None)
            q = heads_front(first, p.qkv, p.embed_norm, eps, **x, q_norm=norms[0], k_norm=norms[1], angles=angles, slots=rows.slots,
                            cache=cache, heads=c.num_attention_heads // self.ranks.size)
        return q, residual

    def attend(self, q, residual, view, cache, take=None):
        """Second half: attention, MLP, final norm. take int64 [B, r]: row numbers of the residual, where q holds a choice of rows.
        Returns (normed state for the head, state to recycle), both [B, R, h]."""
        c, p, eps = self.config, self.p, self.config.rms_norm_eps
        if c.attention == "mla":
            x = mla_attend(p, q, residual, cache, view, c, self.ranks, take)
        else:
            heads = tree_attention(q, cache, view, c.softmax_scale, slice(c.head_dim, 2 * c.head_dim)).flatten(2)
            x = self.ranks.sum(fused_linear(heads, p.o, residual=self.ranks.once(residual), take=take))
        x = mlp(x, p, p.mlp_norm, eps, self.ranks)
        normed = rms_norm(x, p.norm, eps)
        return normed, normed if c.norm_output else x

    def extend(self, batch, cache, states, tokens, count):
        """Write the draft KV of the positions length - count ... length - 1 from true states, each with the token after it.

        states [B, R, A * target hidden], tokens int64 [B, R], count int64 [B]; rows from count on are padding.
        """
        at = torch.arange(tokens.shape[1], device=tokens.device)
        valid = at < count[:, None]
        index = torch.where(valid, (batch.length - count)[:, None] + at, 0)
        rows = batch.rows(tokens, index, index, prefix=index + 1, words=torch.zeros_like(index), valid=valid, extent=batch.longest)
        self.project(self.fuse(states), rows, cache)

    def read(self, batch, cache, hidden):
        """Extend with the states that wait in the HiddenBuffer `hidden`: (q, residual) of their rows, the view's words, the last row each."""
        index, tokens, positions, slots, prefix, words, take = hidden.take(batch)
        rows = Rows(tokens, positions, slots, self.view(batch, prefix, words, batch.longest))
        return *self.project(self.fuse(hidden.states, index), rows, cache), words, take

    def grow(self, batch, cache, hidden, shape, budget=None):
        """The tree of one round: extend with what the target made true, then up to shape.steps (1 or more) levels of guesses: a Pool, or a Growth.

        hidden: the HiddenBuffer; budget: adapt.Budget, which may ask for less or end the tree earlier. Only the last true row needs
        an output: one layer's KV depends on no attention. Guessed rows write KV at cache indices length, length + 1, ...: the next extension
        overwrites them, so nothing recycled survives a round. Their ancestry lives in the words: bit t of a word = cache entry length + t.
        """
        length, longest, page = batch.length[:, None], batch.longest, batch.page_size
        q, residual, words, take = self.read(batch, cache, hidden)
        q = q.flatten(0, 1)[take]
        steps, topk = (budget or shape).steps, shape.topk
        growth = Growth(budget, batch, shape.scratch) if budget and budget.factors else None
        pool, frontier = growth or Pool.empty(len(take), steps, topk, take.device), None
        above, view = length, self.view(batch, length, words[:, :1], longest)
        for depth in range(1, steps + 1):
            normed, recycled = self.attend(q, residual, view, cache, take)
            tokens, logp = self.children(normed, batch, above, topk)
            frontier = growth.add(tokens, logp) if growth else level(tokens, logp, frontier, pool, depth, batch.length, batch.table, page)
            now = growth or pool.filled(depth, topk)
            if depth == steps or not frontier or not budget and now.settled(frontier.scores, shape.nodes):
                return now
            above, take = frontier.above, frontier.take
            view = self.view(batch, length.expand_as(take), frontier.words, longest + (growth.rows if growth else depth * topk))
            q, residual = self.project(recycled, Rows(frontier.tokens, frontier.positions, frontier.slots, view), cache, take)

    def view(self, batch, prefix, words, extent):
        return View(batch.table, batch.page_size, prefix, batch.length, words, extent)

    def children(self, normed, batch, above, topk):
        """The topk children of every row [B, K, h], whose tokens stand at `above` int64 [B, K]: target ids and log-probabilities [B, K, topk]."""
        return draft_logits(normed, self.p.head, self.ids, topk, batch.sampling, above, self.config.draft_vocab_size, self.ranks)
