"""From a layer's input to what its attention reads: queries, and keys and values written to the cache; and back from latents to values.

    latent_front    the second half of MLA's projections: q_b, absorption of UK, rotation of queries and key, norm of the latent, cache write
    latent_lift     after attention: the splits merged, then lifted by UV
    heads_front     projections of MHA or GQA with their norms, rotation and cache write

Angles are those of minispec/layers.py.
"""
import torch

from minispec.kernels.fused_linear import ROWS, SMALL, configure, dot_type, early, few, fused_linear, fused_linear_ref, inputs, product, rms_norm
from minispec.kernels.jit import follow, jit, pdl, power_of_two, tl, use_triton


def latent_front(a, q_norm, q_b, kv_norm, kv_b, nope, eps, angles, slots, cache, exact=False):
    """Queries and cached latents of multi-head latent attention in absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    a [B, R, Q + rank + rope], the output of qkv_a; q_norm [Q] and q_b [H * (nope + rope), Q], or None where Q holds the queries themselves;
    kv_b [H, nope + v, rank]: UK, then UV, of each head; slots int64 [B, R], contiguous: where in cache [slots, 1, rank + rope] the rows'
    normed latents and rotated keys go. Returns q [B, R, H, rank + rope]:
    score = scale * (UK^T q_nope . c + q_rope . k_rope), the per-head key projection UK moved from the cache to the query.
    """
    batch, rows, width = a.shape
    heads, per, rank = kv_b.shape
    rope, count, dtype = angles.cos.shape[-1], batch * rows, a.dtype
    if not use_triton(a) or not few(count, kv_b, exact):
        return latent_front_ref(a, q_norm, q_b, kv_norm, kv_b, nope, eps, angles, slots, cache, exact)
    first = width - rank - rope
    fused = q_b is not None and first <= 512 and rank <= 256
    q = a if fused or q_b is None else fused_linear(a[..., :first], q_b, q_norm, eps, exact=exact)
    out = torch.empty(batch, rows, heads, rank + rope, dtype=dtype, device=a.device)
    if not count:
        return out
    block = max(16, power_of_two(rank)) if rank <= 256 else 128
    tiles = -(-rank // block)
    config = configure(nope + rope, min(first, 512), a.element_size())
    _latent_front[heads * tiles + 1, -(-count // ROWS)](
        a, q, q_norm, q_b, kv_norm, kv_b, angles.cos, angles.sin, angles.positions, slots, cache, out, count, a.stride(1), q.stride(1),
        cache.stride(0), eps, H=heads, NOPE=nope, ROPE=rope, RANK=rank, PER=per, FIRST=first, FUSED=fused, PAIRS=angles.interleaved,
        NP=max(16, power_of_two(nope)), RP=max(8, power_of_two(rope // 2)), BR=block, RANKP=max(16, power_of_two(rank)),
        **inputs(config, first, first, q_norm, None, dtype), num_warps=4, num_stages=1, **pdl(a))
    return out


def latent_front_ref(a, q_norm, q_b, kv_norm, kv_b, nope, eps, angles, slots, cache, exact=False):
    q_nope, q_rope = latent_queries(a, q_norm, q_b, kv_norm, kv_b, nope, eps, angles, slots, cache)
    return torch.cat([torch.matmul(q_nope.transpose(1, 2), kv_b[:, :nope]).transpose(1, 2), q_rope], -1)


def latent_queries(a, q_norm, q_b, kv_norm, kv_b, nope, eps, angles, slots, cache):
    """The same, but for UK: (q_nope [B, R, H, nope], q_rope [B, R, H, rope])."""
    rank, rope = kv_b.shape[-1], angles.cos.shape[-1]
    q, latent, k_rope = a.split([a.shape[-1] - rank - rope, rank, rope], -1)
    if q_b is not None:
        q = fused_linear_ref(q, q_b, q_norm, eps)
    q_nope, q_rope = q.unflatten(-1, (len(kv_b), nope + rope)).split([nope, rope], -1)
    cache[slots] = torch.cat([rms_norm(latent, kv_norm, eps).unsqueeze(2), angles.rotate(k_rope.unsqueeze(2))], -1)
    return q_nope, angles.rotate(q_rope)


def latent_lift(part, lse, kv_b, nope, exact=False):
    """part [S, B, R, H, rank], lse fp32 [S, B, R, H] base 2, -inf where a split is empty, or None where S is 1: attention over splits of the
    context, each normalised by itself -> [B, R, H * v], merged and lifted per head by UV = kv_b[:, nope:], in kv_b's dtype."""
    splits, batch, rows, heads, rank = part.shape
    value, count = kv_b.shape[1] - nope, batch * rows
    if not use_triton(part) or not few(count, kv_b, exact):
        return latent_lift_ref(part, lse, kv_b, nope, exact)
    out = torch.empty(batch, rows, heads * value, dtype=kv_b.dtype, device=part.device)
    if count:
        block = min(max(16, power_of_two(value)), 32)
        _latent_lift[heads * -(-value // block), -(-count // ROWS)](
            part, lse, kv_b, out, count, splits, H=heads, NOPE=nope, V=value, RANK=rank, MERGE=lse is not None, BV=block,
            BK=min(128, max(16, power_of_two(rank))), ROWS=ROWS, DOT=dot_type(kv_b.dtype), num_warps=4, num_stages=2, **pdl(part))
    return out


def latent_lift_ref(part, lse, kv_b, nope, exact=False):
    out = part[0]
    if lse is not None:
        weight = torch.exp2(lse - lse.amax(0))[..., None]
        out = (weight * part.masked_fill(weight == 0, 0)).sum(0) / weight.sum(0)
    out = torch.matmul(out.to(kv_b.dtype).transpose(1, 2), kv_b[:, nope:].transpose(1, 2))             # [B, H, R, v]
    return out.transpose(1, 2).flatten(2)


def heads_front(x, weight, norm, eps, *, index, second, norm2, take, q_norm, k_norm, angles, slots, cache, heads, exact=False):
    """q [B, R, heads, d] of the input that fused_linear makes of x, index, second, take and the norms; keys and values go to cache
    [slots, KV, 2 d] at slots int64 [B, R], contiguous. weight [(heads + 2 KV) * d, K]; q_norm, k_norm [d], or None: a head's own norm."""
    kv_heads, depth, shape, dtype = cache.shape[1], cache.shape[2] // 2, slots.shape, x.dtype
    rows = slots.numel()
    named = dict(index=index, second=second, norm2=norm2, take=take)
    if not use_triton(x) or not few(rows, weight, exact):
        return heads_front_ref(x, weight, norm, eps, **named, q_norm=q_norm, k_norm=k_norm, angles=angles, slots=slots, cache=cache,
                               heads=heads)
    fused = weight.numel() <= SMALL
    if not fused:
        x, named = fused_linear(x, weight, norm, eps, **named, exact=exact), dict(index=None, second=None, norm2=None, take=None)
        norm = None
    out = torch.empty(*shape, heads, depth, dtype=dtype, device=cache.device)
    if not rows:
        return out
    x, second = x.flatten(0, -2), None if named["second"] is None else named["second"].flatten(0, -2)
    c = configure(*weight.shape, x.element_size())
    half = 8 if fused and q_norm is None else max(8, power_of_two(depth // 2))      # a head's norm asks for all of it
    _heads_front[(heads + 2 * kv_heads) * -(-depth // 2 // half), -(-rows // ROWS)](
        x, second, norm, named["norm2"], weight.contiguous(), named["index"], named["take"], q_norm, k_norm, angles.cos, angles.sin,
        angles.positions, slots, cache, out, rows, x.stride(0), 0 if second is None else second.stride(0), *cache.stride()[:2], eps, H=heads,
        KV=kv_heads, D=depth, DH=half, FUSED=fused, QK=q_norm is not None, PAIRS=angles.interleaved,
        INDEX=named["index"] is not None, TAKE=named["take"] is not None,
        **inputs(c, weight.shape[1], x.shape[-1], norm, named["norm2"], dtype), num_warps=c.SPLIT, num_stages=c.stages, **pdl(x))
    return out


def heads_front_ref(x, weight, norm, eps, *, index, second, norm2, take, q_norm, k_norm, angles, slots, cache, heads, exact=False):
    kv_heads, depth = cache.shape[1], cache.shape[2] // 2
    qkv = fused_linear_ref(x, weight, norm, eps, index=index, second=second, norm2=norm2, take=take)
    q, k, v = qkv.unflatten(-1, (heads + 2 * kv_heads, depth)).split([heads, kv_heads, kv_heads], 2)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    cache[slots] = torch.cat([angles.rotate(k), v], -1)
    return angles.rotate(q)


@jit
def _pair(part, DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """int32 [2 * HALF]: channels that are rotated together, HALF firsts, then their partners, of this part; past DIM / 2 the last one again."""
    i = tl.arange(0, 2 * HALF)
    j = tl.minimum(part * HALF + i % HALF, DIM // 2 - 1)
    return 2 * j + i // HALF if PAIRS else j + i // HALF * (DIM // 2)


@jit
def _halves(x, HALF: tl.constexpr, ROWS: tl.constexpr):
    """[2 * HALF, ROWS] -> the firsts and their partners, [HALF, ROWS] each."""
    return tl.split(tl.permute(tl.reshape(x, (2, HALF, ROWS)), (1, 2, 0)))


@jit
def _angles(p_cos, p_sin, p_positions, i_row, real, channel, rotates, DIM: tl.constexpr):
    """(cos, sin) fp32 [2 * HALF, ROWS], 1 and 0 where not `rotates`."""
    at = tl.load(p_positions + i_row, mask=real, other=0)[None, :] * DIM + channel[:, None]
    return tl.load(p_cos + at, mask=rotates, other=1.0), tl.load(p_sin + at, mask=rotates, other=0.0)


@jit
def _turn(x, cos, sin, HALF: tl.constexpr, ROWS: tl.constexpr):
    """x [2 * HALF, ROWS] fp32, rotated."""
    c1, c2 = _halves(cos, HALF, ROWS)
    s1, s2 = _halves(sin, HALF, ROWS)
    x1, x2 = _halves(x, HALF, ROWS)
    both = tl.join(x1 * c1 + x2 * s1, x2 * c2 + x1 * s2)
    return tl.reshape(tl.permute(both, (2, 0, 1)), (2 * HALF, ROWS))


@jit
def _latent_front(p_a, p_q, p_qnorm, p_qb, p_kvnorm, p_kvb, p_cos, p_sin, p_positions, p_slots, p_cache, p_out, rows, s_a, s_q, s_slot, eps,
                  H: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, PER: tl.constexpr, FIRST: tl.constexpr,
                  FUSED: tl.constexpr, PAIRS: tl.constexpr, NP: tl.constexpr, RP: tl.constexpr, BR: tl.constexpr, RANKP: tl.constexpr,
                  K: tl.constexpr, K1: tl.constexpr, NORM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
                  DOT: tl.constexpr, PDL: tl.constexpr):
    """A head's queries, BR columns of the latent space a program; the last program of a block of rows writes the cache."""
    T: tl.constexpr = p_out.dtype.element_ty
    TILES: tl.constexpr = (RANK + BR - 1) // BR
    i_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real, at, i_2 = i_row < rows, i_row.to(tl.int64), tl.arange(0, 2 * RP)
    channel = _pair(0, ROPE, RP, PAIRS)
    turns = (i_2 % RP < ROPE // 2)[:, None] & real[None, :]
    if tl.program_id(0) < H * TILES:
        head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
        i_n, i_c = tl.arange(0, NP), tile * BR + tl.arange(0, BR)
        uk = tl.load(p_kvb + (head * PER + i_n[None, :]).to(tl.int64) * RANK + i_c[:, None], mask=(i_n < NOPE)[None, :] & (i_c < RANK)[:, None],
                     other=0.0)
        start = head * (NOPE + ROPE)
        i_q, i_r = start + tl.minimum(i_n, NOPE - 1), start + NOPE + channel
        if FUSED:
            w_q, gain = early(p_qb, i_q, p_qnorm, p_qnorm, K, K1, NORM, BK, SPLIT)
            w_r, _ = early(p_qb, i_r, p_qnorm, p_qnorm, K, K1, 0, BK, SPLIT)
        follow(PDL)
        cos, sin = _angles(p_cos, p_sin, p_positions, at, real, channel, turns, ROPE)
        if FUSED:
            q = product(w_q, gain, p_a, p_a, p_qnorm, p_qnorm, p_qb, p_slots, p_slots, i_q, i_row, rows, s_a, s_a, eps, K, K1, NORM, BK, SPLIT,
                        ROWS, DOT, False, False)
            r = product(w_r, gain, p_a, p_a, p_qnorm, p_qnorm, p_qb, p_slots, p_slots, i_r, i_row, rows, s_a, s_a, eps, K, K1, NORM, BK, SPLIT,
                        ROWS, DOT, False, False).to(T).to(tl.float32)
        else:
            q = tl.load(p_q + at[None, :] * s_q + start + i_n[:, None], mask=(i_n < NOPE)[:, None] & real[None, :], other=0.0)
            r = tl.load(p_q + at[None, :] * s_q + start + NOPE + channel[:, None], mask=turns, other=0.0).to(tl.float32)
        latent = tl.dot(uk.to(DOT), q.to(T).to(DOT), input_precision="ieee")
        p_query = p_out + (at * H + head)[None, :] * (RANK + ROPE)
        tl.store(p_query + i_c[:, None], latent.to(T), mask=(i_c < RANK)[:, None] & real[None, :])
        r = _turn(r, cos, sin, RP, ROWS)
        tl.store(p_query + RANK + channel[:, None], r.to(T), mask=turns & (i_2 >= tile * 2 * RP)[:, None])       # the first tile's
    else:
        i_l = tl.arange(0, RANKP)
        mask, p_row = (i_l < RANK)[:, None] & real[None, :], p_a + (at[None, :] * s_a + FIRST)
        kv_gain = tl.load(p_kvnorm + i_l, mask=i_l < RANK, other=0.0).to(tl.float32)
        follow(PDL)
        cos, sin = _angles(p_cos, p_sin, p_positions, at, real, channel, turns, ROPE)
        p_entry = p_cache + tl.load(p_slots + at, mask=real, other=0)[None, :] * s_slot
        r = tl.load(p_row + RANK + channel[:, None], mask=turns, other=0.0).to(tl.float32)
        x = tl.load(p_row + i_l[:, None], mask=mask, other=0.0).to(tl.float32)
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / RANK + eps)[None, :]).to(T).to(tl.float32) * kv_gain[:, None]
        tl.store(p_entry + i_l[:, None], x.to(p_cache.dtype.element_ty), mask=mask)
        r = _turn(r, cos, sin, RP, ROWS)
        tl.store(p_entry + RANK + channel[:, None], r.to(p_cache.dtype.element_ty), mask=turns)


@jit
def _latent_lift(p_part, p_lse, p_kvb, p_out, rows, splits, H: tl.constexpr, NOPE: tl.constexpr, V: tl.constexpr, RANK: tl.constexpr,
                 MERGE: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr):
    T: tl.constexpr = p_out.dtype.element_ty
    TILES: tl.constexpr = (V + BV - 1) // BV
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    i_row, i_v, i_k = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tile * BV + tl.arange(0, BV), tl.arange(0, BK)
    real, at = i_row < rows, i_row.to(tl.int64) * H + head
    p_uv = p_kvb + (head * (NOPE + V) + NOPE + i_v[:, None]).to(tl.int64) * RANK
    uv = tl.load(p_uv + i_k[None, :], mask=(i_v < V)[:, None] & (i_k < RANK)[None, :], other=0.0)
    follow(PDL)
    total = tl.zeros([ROWS], tl.int64) + rows * H
    if MERGE:
        top, weight = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        for split in range(0, splits):
            top = tl.maximum(top, tl.load(p_lse + split * total + at, mask=real, other=float("-inf")))
        top = tl.where(top == float("-inf"), 0.0, top)
        for split in range(0, splits):
            weight += tl.exp2(tl.load(p_lse + split * total + at, mask=real, other=float("-inf")) - top)
        weight = tl.maximum(weight, 1e-30)
    acc = tl.zeros([BV, ROWS], tl.float32)
    for k in tl.static_range(0, RANK, BK):
        if k:
            uv = tl.load(p_uv + (k + i_k)[None, :], mask=(i_v < V)[:, None] & (k + i_k < RANK)[None, :], other=0.0)
        p_x, mask = p_part + at[None, :] * RANK + (k + i_k)[:, None], (k + i_k < RANK)[:, None] & real[None, :]
        if MERGE:
            x = tl.zeros([BK, ROWS], tl.float32)
            for split in range(0, splits):
                share = tl.exp2(tl.load(p_lse + split * total + at, mask=real, other=float("-inf")) - top)
                x += share[None, :] * tl.load(p_x + (split * total)[None, :] * RANK, mask=mask & (share > 0)[None, :], other=0.0)
            x = (x / weight[None, :]).to(T)
        else:
            x = tl.load(p_x, mask=mask, other=0.0).to(T)
        acc = tl.dot(uv.to(DOT), x.to(DOT), acc, input_precision="ieee")
    tl.store(p_out + i_row.to(tl.int64)[None, :] * (H * V) + head * V + i_v[:, None], acc.to(T), mask=(i_v < V)[:, None] & real[None, :])


@jit
def _heads_front(p_x, p_y, p_norm, p_norm2, p_w, p_index, p_take, p_qnorm, p_knorm, p_cos, p_sin, p_positions, p_slots, p_cache, p_out, rows,
                 s_x, s_y, s_slot, s_kv, eps, H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DH: tl.constexpr, FUSED: tl.constexpr,
                 QK: tl.constexpr, PAIRS: tl.constexpr, INDEX: tl.constexpr, TAKE: tl.constexpr, K: tl.constexpr, K1: tl.constexpr,
                 NORM: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr):
    """One head of queries, keys or values, or 2 DH channels of it, a program."""
    T: tl.constexpr = p_out.dtype.element_ty
    PARTS: tl.constexpr = (D // 2 + DH - 1) // DH
    head, part, i_row = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real, at, channel = i_row < rows, i_row.to(tl.int64), _pair(part, D, DH, PAIRS)
    mask, i_n = (part * DH + tl.arange(0, 2 * DH) % DH < D // 2)[:, None] & real[None, :], head * D + channel
    i_head = head + tl.zeros([2 * DH], tl.int32)
    query, value = (i_head < H)[:, None], (i_head >= H + KV)[:, None]
    if FUSED:
        w, gain = early(p_w, i_n, p_norm, p_norm2, K, K1, NORM, BK, SPLIT)
    follow(PDL)
    cos, sin = _angles(p_cos, p_sin, p_positions, at, real, channel, mask & ~value, D)
    slot = tl.load(p_slots + at, mask=real, other=0)
    if FUSED:
        x = product(w, gain, p_x, p_y, p_norm, p_norm2, p_w, p_index, p_take, i_n, i_row, rows, s_x, s_y, eps, K, K1, NORM, BK, SPLIT, ROWS, DOT,
                    INDEX, TAKE).to(T).to(tl.float32)
    else:
        x = tl.load(p_x + at[None, :] * s_x + head * D + channel[:, None], mask=mask, other=0.0).to(tl.float32)
    if QK:
        r = tl.rsqrt(tl.sum(tl.where(mask, x * x, 0.0), 0) / D + eps)
        g = tl.load(p_qnorm + channel, mask=i_head < H, other=0.0).to(tl.float32)
        g += tl.load(p_knorm + channel, mask=i_head >= H, other=0.0).to(tl.float32)
        normed = ((x * r[None, :]).to(T).to(tl.float32) * g[:, None]).to(T).to(tl.float32)
        x = tl.where(value, x, normed)
    x = _turn(x, cos, sin, DH, ROWS)
    tl.store(p_out + (at * H + head)[None, :] * D + channel[:, None], x.to(T), mask=mask & query)
    p_cache += slot[None, :] * s_slot + (head - H) % KV * s_kv + (head - H) // KV * D
    tl.store(p_cache + channel[:, None], x.to(p_cache.dtype.element_ty), mask=mask & ~query)
