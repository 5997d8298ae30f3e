"""After the target's choice: which rows it agrees with, and the move that makes their cache entries permanent."""
import torch

from minispec.kernels.jit import follow, jit, pdl, power_of_two, tl, use_triton


def accept(tokens, parents, valid, words, choice, logprobs, finite):
    """A row is accepted when it and all its ancestors equal the target's choice after their parents.

    tokens, parents, words, choice int64 [B, R]; valid, finite bool [B, R]; logprobs fp32 [B, R] or None. Row 0 is the root; bit j of a
    row's word says that row j is the row itself or an ancestor. Siblings are distinct, so the accepted rows form one path, and parents
    come first, so it ascends in row numbers.
    Returns the accepted rows and then the others int64 [B, R]; how many are accepted int64 [B], 0 where a valid row's logits are not
    finite; and choice and logprobs in that order.
    """
    if not use_triton(tokens):
        return accept_ref(tokens, parents, valid, words, choice, logprobs, finite)
    batch, size = tokens.shape
    inputs = [x.contiguous() for x in (tokens, parents, valid, words, choice, choice if logprobs is None else logprobs, finite)]
    rows, count, following, logs = (torch.empty_like(x) for x in (inputs[0], inputs[0][:, 0], *inputs[4:6]))
    if batch:
        _accept[batch,](*inputs, rows, count, following, logs, size, LOGPROBS=logprobs is not None, ROWS=power_of_two(size), num_warps=1,
                        **pdl(tokens))
    return rows, count, following, None if logprobs is None else logs


def accept_ref(tokens, parents, valid, words, choice, logprobs, finite):
    match = torch.ones_like(valid)
    match[:, 1:] = (tokens == choice.gather(1, parents))[:, 1:] & valid[:, 1:]
    bit = 1 << torch.arange(tokens.shape[1], device=tokens.device)
    accepted = words & ~(match * bit).sum(1, keepdim=True) == 0
    rows = torch.sort(~accepted, dim=-1, stable=True).indices
    count = accepted.sum(-1) * (finite | ~valid).all(-1)
    return rows, count, choice.gather(1, rows), None if logprobs is None else logprobs.gather(1, rows)


def publish(count, tokens, valid, state, ring):
    """In place: what a captured round tells the host goes into the slot `turn` of a ring, and `state` moves on.

    count int64 [B], tokens int64 [B, R]: of `accept`; valid bool [B, R]; state int64 [6, B]: length, pending, room, seat, alive (0: the
    request stays put), turn; ring int64 [slots, B, R + 2], pinned memory of the host: count, tokens, how many rows were verified.
    """
    if not use_triton(tokens):
        return publish_ref(count, tokens, valid, state, ring)
    batch, size = tokens.shape
    if batch:
        _publish[batch,](count, tokens, valid, state, ring, len(ring), batch, size, R=power_of_two(size), num_warps=1, **pdl(tokens))


def publish_ref(count, tokens, valid, state, ring):
    length, pending, room, _, alive, turn = state
    moved = count * alive
    pending.copy_(tokens.gather(1, (moved - 1).clamp(min=0)[:, None])[:, 0])
    length.add_(moved)
    room.sub_(moved)
    ring[turn % len(ring), torch.arange(len(count))] = torch.cat([count[:, None], tokens, valid.sum(1, keepdim=True)], 1)
    turn.add_(1)


def move(cache, table, page_size, length, rows, count):
    """In place, in every layer: the entry of row rows[j], at cache index length + rows[j], goes to index length + j, for j < count.

    cache [layers, slots, KV heads, width]; table int64 [B, pages] page ids; length, count int64 [B]; rows int64 [B, R], ascending in its
    first `count`, so rows[j] >= j; index i of a request is slot table[i // page_size] * page_size + i % page_size.
    """
    if not use_triton(cache):
        return move_ref(cache, table, page_size, length, rows, count)
    (batch, size), layers, width = rows.shape, len(cache), cache[0, 0].numel()
    block = min(power_of_two(width), 128)
    if batch:
        _move[layers, batch, -(-width // block)](cache, table.contiguous(), length, rows.contiguous(), count, cache.stride(0),
                                                 table.shape[1], size, width, PAGE=page_size, ROWS=power_of_two(size), WIDTH=block, **pdl(cache))


def move_ref(cache, table, page_size, length, rows, count):
    to = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    kept = to < count[:, None]

    def slots(offset):
        index = torch.where(kept, length[:, None] + offset, 0)
        return torch.where(kept, table.gather(1, index // page_size) * page_size + index % page_size, 0)
    cache[:, slots(to)] = cache[:, slots(rows)]


@jit
def _accept(p_tokens, p_parents, p_valid, p_words, p_choice, p_logprobs, p_finite, p_rows, p_count, p_following, p_logs, rows,
            LOGPROBS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_row, i_batch = tl.arange(0, ROWS), tl.program_id(0)
    real, base = i_row < rows, tl.program_id(0) * rows
    at = base + i_row
    tokens, words = tl.load(p_tokens + at, mask=real, other=0), tl.load(p_words + at, mask=real, other=0)
    parents, choice = tl.load(p_parents + at, mask=real, other=0), tl.load(p_choice + at, mask=real, other=0)
    valid, finite = tl.load(p_valid + at, mask=real, other=0) != 0, tl.load(p_finite + at, mask=real, other=0) != 0
    match = real & ((i_row == 0) | (valid & (tokens == tl.load(p_choice + base + parents, mask=real, other=0))))
    bits = tl.sum(tl.where(match, tl.full([ROWS], 1, tl.int64) << i_row.to(tl.int64), 0), 0)
    accepted = real & ((words & ~bits) == 0)
    before = tl.cumsum(accepted.to(tl.int32), 0)
    count = tl.sum(accepted.to(tl.int32), 0)
    place = base + tl.where(accepted, before - 1, count + i_row - before)
    broken = tl.sum((real & valid & (finite == 0)).to(tl.int32), 0)
    tl.store(p_rows + place, i_row.to(tl.int64), mask=real)
    tl.store(p_following + place, choice, mask=real)
    tl.store(p_count + i_batch, tl.where(broken == 0, count, 0).to(tl.int64))
    if LOGPROBS:
        tl.store(p_logs + place, tl.load(p_logprobs + at, mask=real, other=0.0), mask=real)


@jit
def _publish(p_count, p_tokens, p_valid, p_state, p_ring, slots, batch, size, R: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_b, i_r = tl.program_id(0).to(tl.int64), tl.arange(0, R)
    count, turn = tl.load(p_count + i_b), tl.load(p_state + 5 * batch + i_b)
    moved = count * tl.load(p_state + 4 * batch + i_b)
    tokens = tl.load(p_tokens + i_b * size + i_r, mask=i_r < size, other=0)
    verified = tl.sum((tl.load(p_valid + i_b * size + i_r, mask=i_r < size, other=0) != 0).to(tl.int64), 0)
    p_out = p_ring + (turn % slots * batch + i_b) * (size + 2)
    tl.store(p_out + 1 + i_r, tokens, mask=i_r < size)
    tl.store(p_out, count)
    tl.store(p_out + size + 1, verified)
    tl.store(p_state + 5 * batch + i_b, turn + 1)
    tl.store(p_state + batch + i_b, tl.sum(tl.where(i_r == tl.maximum(moved - 1, 0), tokens, 0), 0))
    tl.store(p_state + i_b, tl.load(p_state + i_b) + moved)
    tl.store(p_state + 2 * batch + i_b, tl.load(p_state + 2 * batch + i_b) - moved)


@jit
def _move(p_cache, p_table, p_length, p_rows, p_count, layer_stride, pages, rows, width, PAGE: tl.constexpr, ROWS: tl.constexpr,
          WIDTH: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_layer, i_batch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_j, i_column = tl.arange(0, ROWS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    length = tl.load(p_length + i_batch)
    source = tl.load(p_rows + i_batch * rows + i_j, mask=i_j < rows, other=0)
    moves = (i_j < tl.load(p_count + i_batch)) & (source != i_j)
    source, target = length + source, length + i_j
    p_pages = p_table + i_batch * pages
    source = tl.load(p_pages + source // PAGE, mask=moves, other=0) * PAGE + source % PAGE
    target = tl.load(p_pages + target // PAGE, mask=moves, other=0) * PAGE + target % PAGE
    mask = moves[:, None] & (i_column < width)[None, :]
    p_layer = p_cache + i_layer * layer_stride + i_column[None, :]
    entries = tl.load(p_layer + source[:, None] * width, mask=mask, other=0.0)
    tl.debug_barrier()          # an entry's new place may be another's old one: all are read before any is written
    tl.store(p_layer + target[:, None] * width, entries, mask=mask)
