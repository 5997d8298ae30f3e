"""Attention of tree rows over a paged cache: any heads, any page order; view.py says who sees what.

On the GPU two launches (one where the context is short): `_attend` gives each program one tile of (row x head) and one split of the
context, and leaves a partial softmax; `_merge` adds the partials of a row. The host fixes the grid by `extent`, an upper bound; what a
program does follows the lengths that it reads from device memory.
"""
from functools import lru_cache
from typing import NamedTuple

import torch

from minispec.kernels.jit import follow, jit, power_of_two, tl, use_triton
from minispec.kernels.jit import pdl as overlap
from minispec.kernels.view import EXACT, View, _entries, _pairs, _seen, _span  # noqa: F401

SCORES = 2**26      # elements of the reference's score matrix at most, 256 MB: a long prefill goes by blocks of rows


def tree_attention_ref(q, cache, view, scale, values, config=None, merge=True):
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
    out = (out[0] if len(out) == 1 else torch.cat(out, 2)).transpose(1, 2).flatten(2, 3).to(cache.dtype)
    return out if merge else (out[None], None)


class Config(NamedTuple):
    """M: (row x head) pairs of a tile; N: tokens of a step; splits of the context; stages of Triton's pipeline, 0: the kernel of hopper.py;
    pdl: the merge is launched before the tiles end: 1 when they begin, 2 (hopper.py) when they store."""
    M: int
    N: int
    splits: int
    warps: int
    stages: int
    pdl: int = 1


def configure(batch, rows, heads, kv_heads, dk, dv, extent, exact, itemsize, processors, hopper=False):
    """The Config of a call: its shape, bytes of an element, and whether hopper.py takes it. With exact only the splits follow the shape."""
    pairs = heads // kv_heads * (1 if exact else rows)                                                 # that share their keys
    wide = max(dk, dv) > 256
    if hopper:
        M, N, warps, stages = 64, 64 if exact or pairs > 64 else 32, 4, 0       # one tile waits for memory: four buffers
    elif itemsize > 2:
        M, N, warps, stages = 16, 16 if wide else 32, 8 if wide else 4, 1
    else:
        M, N, warps, stages = max(16, min(64, power_of_two(pairs))), 64, 8 if wide else 4, 2 if wide else 3
    tiles = -(-pairs // M) * batch * kv_heads       # of a split: one wave, of two steps or more where there are many partials to merge
    step = (1 if pairs <= 16 else 2) * 64 if hopper else 2 * N
    splits = max(1, min(-(-extent // step), processors * (1 if wide else 2) // tiles))
    return Config(M, N, -(-extent // EXACT) if exact else splits, warps, stages)


@lru_cache
def _machine(device):
    """Multiprocessors of a GPU, and the kernel of hopper.py where it is one (else None)."""
    if device.type != "cuda":
        return 132, None
    properties, attend = torch.cuda.get_device_properties(device), None
    if (properties.major, properties.minor) == (9, 0):
        from minispec.kernels.hopper import attend
    return properties.multi_processor_count, attend


def tree_attention(q, cache, view, scale, values, config=None, merge=True):
    """`tree_attention_ref` by Triton kernels where there is a GPU. A row that sees nothing gives zeros there (NaN in the reference).

    merge False: (part [S, B, R, H, dv], lse fp32 [S, B, R, H] or None) for kernels/project.py's latent_lift to merge; S may be 1.
    """
    if not use_triton(q):
        return tree_attention_ref(q, cache, view, scale, values, config, merge)
    batch, rows, heads, dk = q.shape
    _, kv_heads, width = cache.shape
    first, last, _ = values.indices(width)
    dv, group, total, joint = last - first, heads // kv_heads, batch * rows * heads, first == 0 and last <= dk
    key, rest = (dv, dk - dv) if joint else (dk, 0)
    q, base, table = q.to(cache.dtype).contiguous(), view.base.contiguous(), view.table
    table = table if table.stride(1) == 1 else table.contiguous()
    processors, hopper = _machine(q.device)
    fits = (hopper and joint and key in (256, 512) and rest == 64 and cache.element_size() == 2 and width % 16 == 0
            and cache.data_ptr() % 16 == 0 == q.data_ptr() % 16)
    c = config or configure(batch, rows, heads, kv_heads, dk, dv, view.extent, view.exact, cache.element_size(), processors, fits)
    out = torch.empty(batch, rows, heads, dv, dtype=cache.dtype, device=q.device)
    part = torch.empty(c.splits, total, dv, dtype=torch.float32, device=q.device) if c.splits > 1 else out
    lse = torch.empty(c.splits, total, dtype=torch.float32, device=q.device) if c.splits > 1 else out
    pdl = c.pdl and overlap(q)["PDL"] and (c.pdl if c.splits > 1 or c.stages else 0)
    shared = (view.prefix, view.words, base, *view.prefix.stride(), *view.words.stride(), rows)
    arguments = (q, cache, table, view.path if view.exact else view.words, part, lse, *shared, scale * 1.4426950408889634, total,
                 *cache.stride()[:2], table.stride(0))
    sizes = dict(HEADS=heads, G=group, DV=dv, M=c.M, N=c.N, LENGTH=EXACT if view.exact else 0, PDL=pdl)
    more = dict(DK=key, DR=rest, PAGE=view.page_size, SINGLE=c.splits == 1, num_warps=c.warps)
    grid = rows * -(-group // c.M) if view.exact else -(-rows * group // c.M), c.splits, batch * kv_heads
    if c.stages:
        _attend[grid](*arguments, **sizes, **more, V0=first, JOINT=joint, BK=max(16, power_of_two(key)),
                      BR=rest and max(16, power_of_two(rest)), BV=max(16, power_of_two(dv)), num_stages=c.stages,
                      **({"launch_pdl": True} if pdl else {}))
    else:
        hopper[grid](*arguments, **sizes, **more)
    if not merge and c.stages and c.splits > 1:
        return part.view(c.splits, *out.shape), lse.view(c.splits, *out.shape[:-1])
    if c.splits > 1:
        chunk = 32 if view.exact else min(256, power_of_two(c.splits))
        columns = min(max(16, power_of_two(dv)), 8192 // chunk)
        _merge[total, -(-dv // columns)](part, lse, out, *shared, c.splits, total, **sizes, BD=columns, CHUNK=chunk, num_warps=4,
                                         **({"launch_pdl": True} if pdl else {}))
    return out if merge else (out[None], None)


@jit
def _attend(p_q, p_cache, p_table, p_path, p_part, p_lse, p_prefix, p_words, p_base, s_pb, s_pr, s_wb, s_wr, rows, scale, total,
            s_slot, s_kv, s_table, DK: tl.constexpr, DR: tl.constexpr, PAGE: tl.constexpr, SINGLE: tl.constexpr, PDL: tl.constexpr,
            HEADS: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, N: tl.constexpr, LENGTH: tl.constexpr,
            V0: tl.constexpr, JOINT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr):
    """One split of the context for one tile: the softmax over the split alone, and the base-2 logarithm of its denominator.
    JOINT: keys are DK columns that are the values too, then DR more; else keys are DK columns and the values lie apart, from column V0."""
    i_tile, i_split, i_z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i_b, i_kv = i_z // (HEADS // G), i_z % (HEADS // G)
    follow(PDL)
    row, head, live, prefix, word = _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, tl.arange(0, M), G, M, LENGTH)
    union, base, top, end, length = _span(prefix, word, p_base + i_b, tl.arange(0, 64), tl.num_programs(1), N, LENGTH)
    start, stop = i_split * length, tl.minimum(i_split * length + length, end)
    i = (i_b * rows + row).to(tl.int64) * HEADS + i_kv * G + head
    if not SINGLE:
        if start >= stop:
            tl.store(p_lse + i + i_split.to(tl.int64) * total, tl.full((M,), float("-inf"), tl.float32), mask=live)
            return
    n, d, e, v = tl.arange(0, N), tl.arange(0, BK), tl.arange(0, BR if BR else 16), tl.arange(0, BV)
    p_q += i * (DK + DR)
    p_cache += i_kv * s_kv
    p_table += i_b.to(tl.int64) * s_table
    if LENGTH:
        p_path += (i_b * rows + i_tile // ((G + M - 1) // M)) * 64
    q = tl.load(p_q[:, None] + d[None, :], mask=live[:, None] & (d < DK)[None, :], other=0)
    if BR:
        q_rest = tl.load(p_q[:, None] + (DK + e)[None, :], mask=live[:, None] & (e < DR)[None, :], other=0)
    highest, weight, acc = tl.full((M,), -1e30, tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, BV), tl.float32)
    for at in tl.range(start, stop, N):
        entry, known = _entries(p_table, p_path, at, n, union, top, base, stop, s_slot, PAGE, LENGTH)
        if LENGTH:
            visible = known[None, :]
        else:
            visible = ((_seen(word, prefix, base, at)[:, None] >> n.to(tl.uint64)[None, :]) & 1) != 0
        p_entry = p_cache + entry
        k = tl.load(p_entry[:, None] + d[None, :], mask=known[:, None] & (d < DK)[None, :], other=0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BR:
            k_rest = tl.load(p_entry[:, None] + (DK + e)[None, :], mask=known[:, None] & (e < DR)[None, :], other=0)
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
        score = tl.where(visible, score * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1))
        p, fade = tl.exp2(score - higher[:, None]), tl.exp2(highest - higher)
        weight = weight * fade + tl.sum(p, 1)
        if not JOINT:
            k = tl.load(p_entry[:, None] + (V0 + v)[None, :], mask=known[:, None] & (v < DV)[None, :], other=0)
        acc = tl.dot(p.to(k.dtype), k, acc * fade[:, None], input_precision="ieee")
        highest = higher
    acc = acc * tl.where(weight > 0, 1 / weight, 0.0)[:, None]
    if not SINGLE:
        i += i_split.to(tl.int64) * total
        tl.store(p_lse + i, tl.where(weight > 0, highest + tl.log2(weight), float("-inf")), mask=live)
    tl.store(p_part + i[:, None] * DV + v[None, :], acc.to(p_part.dtype.element_ty), mask=live[:, None] & (v < DV)[None, :])


@jit
def _merge(p_part, p_lse, p_out, p_prefix, p_words, p_base, s_pb, s_pr, s_wb, s_wr, rows, splits, total, BD: tl.constexpr,
           CHUNK: tl.constexpr, PDL: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, M: tl.constexpr,
           N: tl.constexpr, LENGTH: tl.constexpr):
    """The splits of one row and head, weighed by their denominators, in ascending order: empty splits at the end change no bit."""
    i, d = tl.program_id(0), tl.program_id(1) * BD + tl.arange(0, BD)
    i_b, i_row, i_head = i // (rows * HEADS), i // HEADS % rows, i % HEADS % G
    i_tile = i_row * ((G + M - 1) // M) + i_head // M if LENGTH else (i_row * G + i_head) // M
    _, _, _, prefix, word = _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, tl.arange(0, M), G, M, LENGTH)
    _, _, _, end, length = _span(prefix, word, p_base + i_b, tl.arange(0, 64), splits, N, LENGTH)
    used = (end + length - 1) // length
    if PDL:
        tl.extra.cuda.gdc_wait()
    highest, weight, acc = -1e30, 0.0, tl.zeros((BD,), tl.float32)
    for at in range(0, used, CHUNK):
        split = at + tl.arange(0, CHUNK)
        p = split.to(tl.int64) * total + i
        lse = tl.load(p_lse + p, mask=split < used, other=float("-inf"))
        part = tl.load(p_part + p[:, None] * DV + d[None, :], mask=(split < used)[:, None] & (d < DV)[None, :], other=0)
        higher = tl.maximum(highest, tl.max(lse, 0))
        fade, w = tl.exp2(highest - higher), tl.exp2(lse - higher)
        acc, weight, highest = acc * fade + tl.sum(w[:, None] * part, 0), weight * fade + tl.sum(w, 0), higher
    tl.store(p_out + i.to(tl.int64) * DV + d, (acc / tl.maximum(weight, 1e-30)).to(p_out.dtype.element_ty), mask=d < DV)
