"""A language-model head and the best of its logits in two launches; the logits themselves are never written.

    1. one program a tile of the vocabulary and block of rows: logits = head @ x; a row's top-k of logit / T + noise, max, sum of exp
    2. one program a row: the best of all tiles' candidates, their log-probabilities, and the map to target ids

A candidate is one int64 that sorts as (score, lower id first): the float's bits, made to sort as an integer, then the inverted id.
The vocabulary lies on the long side of the matrix product, so a few rows fill a tensor-core tile; a logit is one fp32 accumulator
over the depth in order, whatever the number of rows.
"""
import torch

from minispec.kernels.jit import INTERPRET, follow, jit, pdl, power_of_two, tl, use_triton
from minispec.kernels.linear import linear
from minispec.kernels.noise import keyed_noise, noised

LOWEST = -(2**63)
LEAST = tl.constexpr(LOWEST)        # in kernels


def _launch(kernel, hidden, head, *tensors, **constants):
    """Run `kernel` over tiles of VOCAB ids (enough to fill the GPU) and blocks of ROWS rows, DEPTH of the hidden width a step."""
    (vocab, width), rows = head.shape, hidden.shape[:-1].numel()
    block, wide = min(max(power_of_two(rows), 16), 64), head.dtype == torch.float32
    depth, warps, stages = (32, 4, 3) if wide else {16: (128, 4, 3), 32: (64, 4, 4), 64: (64, 8, 6)}[block]
    tile, blocks = _tile(head), -(-rows // block)
    if rows:
        kernel[-(-vocab // tile) * blocks,](
            hidden.reshape(rows, width).contiguous(), head.contiguous(), rows, vocab, width, blocks, *tensors, CAST=INTERPRET, ROWS=block,
            VOCAB=tile, DEPTH=depth, **constants, **pdl(hidden), num_warps=warps, num_stages=stages, enable_fp_fusion=False)


def _tile(head):
    return 64 if head.dtype == torch.float32 else 128 if len(head) >= 2**14 else 32


def head_topk(hidden, head, ids, topk, sampling, positions, strict=False, part=False):
    """The topk of logit / T + noise of every row, in descending order; of equal scores the lowest id first.

    hidden [B, R, h]; head [V, h]; ids int64 [V] to target ids, or None; positions int64 [B, R] of the rows.
    Returns target ids int64 [B, R, topk], log-probabilities fp32 [B, R, topk] at the request's temperature (at most 0, -inf for NaN) and
    bool [B, R]: whether the normaliser was finite; when `strict`, also no logit was -inf. `part`: candidates, their logits and the logarithm of
    the sum of exp instead, for shard_topk.
    """
    (batch, per, _), mapped = hidden.shape, ids is not None
    rows, tiles, shape = batch * per, -(-len(head) // _tile(head)), (batch, per, topk)
    key = torch.empty(rows, tiles, topk, dtype=torch.int64, device=head.device)
    logit, sums = torch.empty(key.shape, device=head.device), torch.empty(2, rows, tiles, device=head.device)
    tokens, logp = torch.empty(shape, dtype=torch.int64, device=head.device), torch.empty(shape, device=head.device)
    finite = torch.empty(batch, per, dtype=torch.float32 if part else torch.bool, device=head.device)
    ids = ids if mapped else tokens
    _launch(_tiles, hidden, head, ids, positions, sampling.temperature, sampling.seed, key, logit, sums, *positions.stride(), per,
            TOPK=topk, SAMPLED=not sampling.all_greedy, MAPPED=mapped, STRICT=strict)
    entries = power_of_two(tiles * topk)
    if rows:
        _merge[rows,](key, logit, sums, ids, tokens, logp, finite, rows, tiles, TOPK=topk, PAD=power_of_two(topk),
                      TILES=power_of_two(tiles), ENTRIES=entries, MAPPED=mapped, PART=part, **pdl(key), num_warps=min(max(entries // 256, 1), 16))
    return tokens, logp, finite


def shard_topk(hidden, head, first, ids, topk, sampling, positions, strict=False):
    """What one shard of the vocabulary, rows `first` and on, says: int64 [B, R, 2 topk + 1], the best candidates, naming rows of the whole
    head, their logits at the temperature, and the logarithm of the sum of exp, these as the bits of fp32. ids int64: target ids of its rows."""
    if use_triton(hidden):
        key, logit, total = head_topk(hidden, head, ids, topk, sampling, positions, strict, part=True)
        key = key.clamp(min=LOWEST + 2**32) - first
    else:
        logits = linear(hidden, head).float()
        if not sampling.all_greedy:
            logits = logits / torch.where(sampling.temperature > 0, sampling.temperature, 1.0)[:, None, None]
        scores = logits if sampling.all_greedy else noised(logits, sampling.temperature, sampling.seed, positions, ids)
        bits = (scores.masked_fill(scores.isnan(), -torch.inf) + 0.0).view(torch.int32)
        key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) + (0xFFFFFFFF - first - torch.arange(len(head), device=head.device))
        key = key.topk(min(topk, len(head))).values
        logit = logits.gather(-1, 0xFFFFFFFF - first - (key & 0xFFFFFFFF))
        key, logit = (torch.nn.functional.pad(x, (0, topk - key.shape[-1]), value=low) for x, low in ((key, LOWEST), (logit, 0.0)))
        broken = logits.isnan() | (logits == torch.inf) | strict * (logits == -torch.inf)
        total = logits.logsumexp(-1).masked_fill(broken.any(-1), torch.nan)
    return torch.cat([key, logit.view(torch.int32).long(), total.view(torch.int32).long()[..., None]], -1)


def merge_topk(parts, ids, topk):
    """head_topk's result from every shard's shard_topk, one after another along the last axis; ids: of the whole head, or None."""
    parts = parts.unflatten(-1, (-1, 2 * topk + 1))
    logit, total = (x.to(torch.int32).view(torch.float32) for x in (parts[..., topk:-1].flatten(-2), parts[..., -1]))
    key, best = parts[..., :topk].flatten(-2).topk(topk)
    rows, total = 0xFFFFFFFF - (key & 0xFFFFFFFF), total.logsumexp(-1)
    logp = (logit.gather(-1, best) - total[..., None]).clamp(max=0).nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    # a collective that another rank's death breaks off leaves any bits: an index outside would end the CUDA context, and with it a notebook
    return rows if ids is None else ids[rows.clamp(max=len(ids) - 1)], logp, total.isfinite()


def head_logits(hidden, head):
    """hidden [..., h] -> fp32 [..., V], never rounded to a narrower type: the same numbers that head_topk ranks."""
    out = torch.empty(*hidden.shape[:-1], len(head), device=head.device)
    _launch(_logits, hidden, head, out)
    return out


@jit
def _product(p_x, p_head, rows, vocab, width, blocks, CAST: tl.constexpr, ROWS: tl.constexpr, VOCAB: tl.constexpr, DEPTH: tl.constexpr,
             PDL: tl.constexpr):
    """(i_row [ROWS], i_v [VOCAB], logits fp32 [VOCAB, ROWS]) of this program; rows and ids past the end hold anything."""
    follow(PDL)
    i_v = tl.program_id(0) // blocks * VOCAB + tl.arange(0, VOCAB)         # blocks of one tile run side by side: it is in L2
    i_row = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    i_depth = tl.arange(0, DEPTH)
    p_w = p_head + tl.minimum(i_v, vocab - 1).to(tl.int64)[:, None] * width + i_depth[None, :]
    p_h = p_x + tl.minimum(i_row, rows - 1).to(tl.int64)[None, :] * width + i_depth[:, None]
    logits = tl.zeros([VOCAB, ROWS], dtype=tl.float32)
    for at in range(0, width, DEPTH):
        left = i_depth < width - at
        w = tl.load(p_w + at, mask=left[None, :], other=0.0)
        h = tl.load(p_h + at, mask=left[:, None] & (i_row < rows)[None, :], other=0.0)
        if CAST:
            w, h = w.to(tl.float32), h.to(tl.float32)
        logits = tl.dot(w, h, logits, input_precision="ieee")
    return i_row, i_v, logits


@jit
def _logits(p_x, p_head, rows, vocab, width, blocks, p_out, CAST: tl.constexpr, ROWS: tl.constexpr, VOCAB: tl.constexpr,
            DEPTH: tl.constexpr, PDL: tl.constexpr):
    i_row, i_v, logits = _product(p_x, p_head, rows, vocab, width, blocks, CAST, ROWS, VOCAB, DEPTH, PDL)
    tl.store(p_out + i_row.to(tl.int64)[None, :] * vocab + i_v[:, None], logits, mask=(i_v < vocab)[:, None] & (i_row < rows)[None, :])


@jit
def _tiles(p_x, p_head, rows, vocab, width, blocks, p_ids, p_positions, p_temperature, p_seed, p_key, p_logit, p_sums, batch_stride,
           row_stride, per, TOPK: tl.constexpr, SAMPLED: tl.constexpr, MAPPED: tl.constexpr, STRICT: tl.constexpr, CAST: tl.constexpr,
           ROWS: tl.constexpr, VOCAB: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    i_row, i_v, logits = _product(p_x, p_head, rows, vocab, width, blocks, CAST, ROWS, VOCAB, DEPTH, PDL)
    i_tile, tiles = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    inside, real = (i_v < vocab)[:, None], i_row < rows
    scores = logits
    if SAMPLED:
        i_request = i_row // per
        temperature = tl.load(p_temperature + i_request, mask=real, other=0.0)
        sampled = (temperature > 0)[None, :]
        logits *= tl.div_rn(1.0, tl.where(temperature > 0, temperature, 1.0))[None, :]
        seed = tl.load(p_seed + i_request, mask=real, other=0)
        position = tl.load(p_positions + i_request * batch_stride + i_row % per * row_stride, mask=real, other=0)
        token = tl.load(p_ids + i_v, mask=i_v < vocab, other=0) if MAPPED else i_v.to(tl.int64)
        scores = tl.where(sampled, logits + keyed_noise(seed[None, :], position[None, :] + 1, token[:, None]), logits)
    top = tl.max(tl.where(inside, logits, float("-inf")), 0)
    terms = tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)[None, :])
    if STRICT:
        terms = tl.where(logits == float("-inf"), float("nan"), terms)
    i_row = i_row.to(tl.int64)
    tl.store(p_sums + i_row * tiles + i_tile, top, mask=real)
    tl.store(p_sums + (rows + i_row) * tiles + i_tile, tl.sum(tl.where(inside, terms, 0.0), 0), mask=real)
    bits = (tl.where(scores == scores, scores, float("-inf")) + 0.0).to(tl.int32, bitcast=True)     # -0 + 0 is 0: they tie
    order = tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), -(2**31))
    key = (order.to(tl.int64) << 32) | (0xFFFFFFFF - i_v.to(tl.int64))[:, None]
    for k in tl.static_range(TOPK):
        best = tl.max(key, 0)
        hit = key == best[None, :]
        at = (i_row * tiles + i_tile) * TOPK + k
        tl.store(p_key + at, best, mask=real)
        tl.store(p_logit + at[None, :] + tl.zeros_like(key), logits, mask=hit & real[None, :])
        key = tl.where(hit, LEAST, key)


@jit
def _merge(p_key, p_logit, p_sums, p_ids, p_token, p_logp, p_finite, rows, tiles, TOPK: tl.constexpr, PAD: tl.constexpr,
           TILES: tl.constexpr, ENTRIES: tl.constexpr, MAPPED: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_row = tl.program_id(0).to(tl.int64)
    i_tile, i_entry, i_k = tl.arange(0, TILES), tl.arange(0, ENTRIES), tl.arange(0, PAD)
    key = tl.load(p_key + i_row * tiles * TOPK + i_entry, mask=i_entry < tiles * TOPK, other=LEAST)
    logit = tl.load(p_logit + i_row * tiles * TOPK + i_entry, mask=i_entry < tiles * TOPK, other=0.0)
    top = tl.load(p_sums + i_row * tiles + i_tile, mask=i_tile < tiles, other=float("-inf"))
    total = tl.load(p_sums + (rows + i_row) * tiles + i_tile, mask=i_tile < tiles, other=0.0)
    most = tl.max(top, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    total = tl.sum(total * tl.exp(top - most), 0)
    if PART:
        tl.store(p_finite + i_row, most + tl.log(total))
        logp = logit
    else:
        tl.store(p_finite + i_row, (total == total) & (total < float("inf")))
        logp = logit - most - tl.log(total)
        logp = tl.where(logp == logp, tl.minimum(logp, 0.0), float("-inf"))
    chosen = tl.zeros([PAD], dtype=tl.int64)
    for k in tl.static_range(TOPK):
        best = tl.max(key, 0)
        chosen = tl.where(i_k == k, best, chosen)
        tl.store(p_logp + i_row * TOPK + k + tl.zeros_like(key), logp, mask=key == best)
        key = tl.where(key == best, LEAST, key)
    ids = chosen
    if not PART:
        ids = 0xFFFFFFFF - (chosen & 0xFFFFFFFF)
        if MAPPED:
            ids = tl.load(p_ids + ids, mask=i_k < TOPK, other=0)
    tl.store(p_token + i_row * TOPK + i_k, ids, mask=i_k < TOPK)
