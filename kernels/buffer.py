"""The hidden-state buffer on the device: what the target leaves there, and the rows with which the draft reads it."""
import torch

from minispec.kernels.jit import follow, jit, pdl, power_of_two, tl, use_triton
from minispec.kernels.tree import slots_at, slots_of


def keep(states, rows, tokens, count, seats, buffer, following, counts, append=False):
    """In place: the states of an accepted path, in path order, the token after each, and their number, at each request's seat; append: behind
    what lies there. What the capacity does not hold may overwrite its last places (only seats that nobody reads get so far).

    states [B, R, W] of a forward's rows; rows, tokens int64 [B, r]: the path, and what follows each of its rows; count, seats int64 [B];
    buffer [seats, capacity, W], following int64 [seats, capacity], counts int64 [seats].
    """
    if not use_triton(states):
        return keep_ref(states, rows, tokens, count, seats, buffer, following, counts, append)
    batch, size = rows.shape
    width, block = states.shape[-1], min(power_of_two(states.shape[-1]), 1024)
    if batch:
        _keep[batch, size, -(-width // block)](states.contiguous(), rows, tokens, count, seats, buffer, following, counts, states.shape[1], size,
                                               width, buffer.shape[1], BLOCK=block, APPEND=append, **pdl(states))
        if append:          # after every block has read it
            counts.index_copy_(0, seats, counts[seats] + count)


def keep_ref(states, rows, tokens, count, seats, buffer, following, counts, append=False):
    if append:      # one by one: of one state, which it is, that takes a third of what advanced indexing takes
        for seat, some, path, after in zip(seats.tolist(), states, rows.tolist(), tokens.tolist()):
            for row, token, at in zip(path, after, range(counts.tolist()[seat], buffer.shape[1])):
                buffer[seat, at], following[seat, at] = some[row], token
        counts.index_add_(0, seats, count)
    else:
        buffer[seats, :rows.shape[1]] = states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))
        following[seats, :rows.shape[1]], counts[seats] = tokens, count


def unread(following, count, seats, length, size, table, page_size):
    """The rows with which the draft reads what the target made true: those of the positions length - count ... length - 1 of each request.

    following int64 [seats, capacity] and count int64 [seats]: the hidden buffer's next tokens, and how many wait; seats, length int64 [B].
    Returns int64 [B, size] each: index (row of the buffer's states, flat), tokens, positions, slots, prefix, words (0); rows from the
    request's count on are padding: position 0, slot 0. Last, int64 [B, 1]: the flat number of each request's last row.
    """
    if not use_triton(following):
        return unread_ref(following, count, seats, length, size, table, page_size)
    batch = len(seats)
    ints, last = (torch.empty(*shape, dtype=torch.int64, device=seats.device) for shape in ((6, batch, size), (batch, 1)))
    if batch:
        _unread[batch,](following, count, seats, length, table, ints, last, batch, following.shape[1], table.stride(0), SIZE=size,
                        R=power_of_two(size), PAGE=page_size, num_warps=1, **pdl(seats))
    return *ints, last


def unread_ref(following, count, seats, length, size, table, page_size):
    at, count = torch.arange(size, device=seats.device), count[seats][:, None]
    valid = at < count
    positions = torch.where(valid, length[:, None] - count + at, 0).clamp(min=0)
    slots = torch.where(valid, slots_of(table, page_size, positions), 0)
    last = (count - 1).clamp(0, size - 1) + torch.arange(len(seats), device=seats.device)[:, None] * size
    return (seats[:, None] * following.shape[1] + at, following[seats, :size], positions, slots, positions + 1, torch.zeros_like(positions), last)


@jit
def _keep(p_states, p_rows, p_tokens, p_count, p_seats, p_buffer, p_next, p_counts, many, size, width, capacity, BLOCK: tl.constexpr,
          APPEND: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_b, i_j, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    seat, row = tl.load(p_seats + i_b), tl.load(p_rows + i_b * size + i_j)
    to = seat * capacity + (tl.minimum(tl.load(p_counts + seat) + i_j, capacity - 1) if APPEND else i_j)
    tl.store(p_buffer + to * width + i, tl.load(p_states + (i_b * many + row) * width + i, mask=i < width, other=0.0), mask=i < width)
    tl.store(p_next + to, tl.load(p_tokens + i_b * size + i_j))       # by every block of the width: the same value
    if not APPEND:
        tl.store(p_counts + seat, tl.load(p_count + i_b))


@jit
def _unread(p_next, p_count, p_seats, p_length, p_table, p_ints, p_last, batch, capacity, s_table, SIZE: tl.constexpr, R: tl.constexpr,
            PAGE: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_b, i_r = tl.program_id(0).to(tl.int64), tl.arange(0, R)
    seat, length, live = tl.load(p_seats + i_b), tl.load(p_length + i_b), i_r < SIZE
    count = tl.load(p_count + seat)
    valid, row = i_r < count, seat * capacity + i_r
    position = tl.maximum(tl.where(valid, length - count + i_r, 0), 0)      # of a seat without a request anything may wait
    many = batch * SIZE
    p_ints += i_b * SIZE + i_r
    tl.store(p_ints, row, mask=live)
    tl.store(p_ints + many, tl.load(p_next + row, mask=live, other=0), mask=live)
    tl.store(p_ints + 2 * many, position, mask=live)
    tl.store(p_ints + 3 * many, tl.where(valid, slots_at(p_table + i_b * s_table, position, live & valid, PAGE), 0), mask=live)
    tl.store(p_ints + 4 * many, position + 1, mask=live)
    tl.store(p_ints + 5 * many, tl.zeros([R], tl.int64), mask=live)
    tl.store(p_last + i_b, i_b * SIZE + tl.minimum(tl.maximum(count - 1, 0), SIZE - 1))
