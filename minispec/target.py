"""The target: a DeepSeek-V3-family transformer (MLA + MoE) that returns, with its output, the residual stream entering chosen layers."""
from functools import partial

import torch

from minispec.kernels.fused_linear import fused_linear, rms_norm
from minispec.kernels.linear import linear, rowwise
from minispec.kernels.moe import moe
from minispec.kernels.route import ffn_front
from minispec.layers import Rotary, allocate, embed, expands, latent_project, mla_attend, mla_prefill, mlp, namespaces
from minispec.ranks import ALONE


class Target:
    """shapes and dtypes: weights.names.target_table, or weights.packed's; parameters: name -> tensor, NaN until weights.load fills them.
    length: positions in the tables. ranks: who share the layers; each has its heads, its part of every MLP and its rows of the vocabulary."""

    def __init__(self, config, shapes, dtype, device, length, dtypes={}, ranks=ALONE):
        self.config, self.ranks = config, ranks
        self.parameters = allocate(shapes, dtype, device, dtypes)
        self.layers = namespaces(self.parameters, config.num_hidden_layers)
        self.embed, self.norm, self.head = (self.parameters[name] for name in ("embed", "norm", "head"))
        self.rotary = Rotary(config.rope, length, device)
        self.trace = None       # trace(layer, ids [N, k]): called with what a router chose; for measurements

    def __call__(self, rows, cache, capture=()):
        """One forward over rows [B, R].

        Returns hidden [B, R, h] after the final norm and a list: for each id in `capture` the residual stream [B, R, h] entering that layer
        (0 = embedding output, n = output of the last layer before the final norm).
        """
        c, eps, exact, ranks = self.config, self.config.rms_norm_eps, rows.view.exact, self.ranks
        angles, entering = self.rotary.at(rows.positions), {}
        live = None if exact or rows.live is None else rows.live.view(-1)
        lifted = expands(rows.view, rows.tokens.shape[1], self.layers[0].kv_b[..., 0].numel())
        index = None if ranks.size > 1 or lifted or 0 in capture else rows.tokens       # then layer 0 gathers the rows that it reads
        x = embed(rows.tokens, self.embed, c.vocab_size, ranks) if index is None else self.embed
        for i, layer in enumerate(self.layers):
            if i in capture:
                entering[i] = x
            a = fused_linear(x, layer.qkv_a, layer.attn_norm, eps, index=index, exact=exact)
            if lifted:
                x = mla_prefill(layer, a, x, cache[i], rows, angles, c, ranks)
            else:
                q = latent_project(layer, a, cache[i], rows.slots, angles, c, ranks, exact)
                x, index = mla_attend(layer, q, x, cache[i], rows.view, c, ranks, index), None
            x = rowwise(partial(self.experts, layer, live=live), x, exact) if c.is_moe(i) else mlp(x, layer, layer.ffn_norm, eps, ranks, exact)
        entering[len(self.layers)] = x
        return rms_norm(x, self.norm, eps), [entering[i] for i in capture]

    def experts(self, layer, x, live=None):
        """x + routed and shared experts of its norm: [B, R, h] -> the same. live bool [B * R] or None: rows that need experts."""
        c, flat, shared = self.config, x.flatten(0, 1), bool(self.config.n_shared_experts)
        h, ids, weights, inner = ffn_front(
            flat, layer.ffn_norm, c.rms_norm_eps, layer.router, getattr(layer, "bias", None), layer.gate_up if shared else None, live=live,
            scoring=c.scoring_func, topk=c.num_experts_per_tok, groups=1 if c.topk_method == "greedy" else c.n_group, topk_groups=c.topk_group,
            group_top=2 if c.topk_method == "noaux_tc" else 1, normalise=c.norm_topk_prob, scaling=c.routed_scaling_factor)
        if self.trace:
            self.trace(layer, ids)
        if self.ranks.expert_parallel:
            ids = ids - self.ranks.experts(c.n_routed_experts)[0]
            ids = torch.where((ids < 0) | (ids >= len(layer.w2)), len(layer.w2), ids)
        w13, w2 = ((layer.w13, layer.w13_scale), (layer.w2, layer.w2_scale)) if hasattr(layer, "w13_scale") else (layer.w13, layer.w2)
        out = moe(h, w13, w2, ids, weights, self.ranks.once(flat), (inner, layer.down) if shared else None)
        return self.ranks.sum(out.to(x.dtype)).view_as(x)

    def logits(self, hidden):
        """hidden [..., h] -> fp32 [..., vocab]."""
        return self.ranks.join(linear(hidden, self.head).float(), self.config.vocab_size)
