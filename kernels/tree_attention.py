"""Attention of tree rows over a paged cache: any heads, any page order, one mask rule for prefill, chain and tree.

Who sees what (cache index, counted in tokens of one request; the page table turns it into slots):

    0 ............ base-1 | base ........ base+63
    committed tokens      | this forward's rows (the tail)

A row sees every index below its `prefix`, and index base + j where bit j of its ancestor word is set (itself included).
A tree row has prefix = base; a prefill row i needs no word: prefix = base + i + 1.
"""
from dataclasses import dataclass, replace
from functools import cached_property

import torch

SCORES = 2**26      # elements of the score matrix at most, 256 MB: a long prefill goes by blocks of rows


@dataclass(frozen=True)
class View:
    """table int64 [B, pages]; prefix, words int64 [B, R]; base int64 [B]; extent: no row sees a cache index >= extent."""
    table: torch.Tensor
    page_size: int
    prefix: torch.Tensor
    base: torch.Tensor
    words: torch.Tensor
    extent: int

    def only(self, rows):
        """The same view for a choice of rows: int64 [B, r]."""
        return replace(self, prefix=self.prefix.gather(1, rows), words=self.words.gather(1, rows))

    @cached_property
    def index(self):
        """The slot of every cache index: int64 [B, extent]."""
        pages = self.table[:, :-(-self.extent // self.page_size)]
        offsets = torch.arange(self.page_size, device=pages.device)
        return (pages[..., None] * self.page_size + offsets).flatten(1)[:, :self.extent]

    @cached_property
    def visible(self):
        """bool [B, R, extent]"""
        at = torch.arange(self.extent, device=self.base.device)
        bit = at - self.base[:, None]                                                                  # [B, extent]
        tail = (self.words[..., None] >> bit.clamp(0, 63)[:, None]) & (((bit >= 0) & (bit < 64))[:, None])
        return (at < self.prefix[..., None]) | tail.bool()

    @cached_property
    def bias(self):
        """0 where visible, -inf elsewhere: fp32 [B, 1, R, 1, extent]."""
        return torch.zeros(self.visible.shape, device=self.base.device).masked_fill_(~self.visible, -torch.inf)[:, None, :, None]

    @cached_property
    def unseen(self):
        """Cache entries that no row sees: they may hold anything, NaN too, and 0 * NaN must not reach a sum.

        bool [B, extent, 1, 1], or None when there are none (asked on the CPU only: on CUDA the question would stop the queue).
        """
        unseen = ~self.visible.any(1)[..., None, None]
        return unseen if unseen.is_cuda or unseen.any() else None


def tree_attention(q, cache, view, scale, values):
    """softmax(scale * q k) v with fp32 scores and accumulation.

    q [B, R, H, dk]; cache [slots, KV, width], keys its first dk columns, values its columns `values` (a slice; the two may overlap: MLA
    keeps one latent for both); H is a multiple of KV. Returns [B, R, H, dv] in the cache's dtype. Every row must see at least one entry.
    """
    batch, rows, heads, dk = q.shape
    kv_heads = cache.shape[1]
    entries = cache.index_select(0, view.index.flatten()).unflatten(0, view.index.shape)               # [B, S, KV, width]
    entries = entries if view.unseen is None else entries.masked_fill_(view.unseen, 0)
    entries = entries.float().transpose(1, 2)                                                          # [B, KV, S, width]
    keys, lifted = entries[..., :dk].transpose(2, 3), entries[..., values]
    q = q.float().unflatten(2, (kv_heads, heads // kv_heads)).transpose(1, 2)                          # [B, KV, R, G, dk]
    out = []
    step = max(1, SCORES // (batch * heads * view.extent))
    for at in range(0, rows, step):
        part = q[:, :, at:at + step]
        scores = torch.matmul(part.flatten(2, 3), keys).unflatten(2, part.shape[2:4]) * scale
        weights = torch.softmax(scores + view.bias[:, :, at:at + step], -1)
        out.append(torch.matmul(weights.flatten(2, 3), lifted).unflatten(2, part.shape[2:4]))
    return (out[0] if len(out) == 1 else torch.cat(out, 2)).transpose(1, 2).flatten(2, 3).to(cache.dtype)
