"""The hidden-state buffer on the device: what the target leaves there, and the rows with which the draft reads it."""
import torch

from minispec.kernels.jit import follow, jit, pdl, power_of_two, tl, use_triton
from minispec.kernels.tree import slots_at, slots_of


def keep(parts, rows, tokens, length, seats, buffer, following, first, append=False):
    """In place: the states of an accepted path, in path order, and the token after each, at each request's seat, which begins with the
    position `length`; append: behind what lies there. What the capacity does not hold is lost or overwrites the last place (only seats that
    nobody reads get so far).

    parts: A tensors [B, R, h], the captured layers' of a forward's rows, which lie behind each other at a place, W = A * h; rows, tokens
    int64 [B, r]: the path, and what follows each of its rows; length, seats int64 [B]; buffer [seats, capacity, W], following int64 [seats,
    capacity], first int64 [seats]: the position of a seat's first state.
    """
    if not use_triton(buffer):
        return keep_ref(parts, rows, tokens, length, seats, buffer, following, first, append)
    (batch, size), (_, many, width) = rows.shape, parts[0].shape
    block = min(power_of_two(width), 1024)
    if batch:
        _keep[batch, size, -(-width // block)](tuple(part.contiguous() for part in parts), rows, tokens, length, seats, buffer, following, first,
                                               many, size, width, buffer.shape[1], PARTS=len(parts), BLOCK=block, APPEND=append, **pdl(buffer))


def keep_ref(parts, rows, tokens, length, seats, buffer, following, first, append=False):
    states = torch.cat(parts, -1)
    if append:      # one by one: of one state, which it is, that takes a third of what advanced indexing takes
        for seat, at, some, path, after in zip(seats.tolist(), length.tolist(), states, rows.tolist(), tokens.tolist()):
            for place, row, token in zip(range(at - first.tolist()[seat], buffer.shape[1]), path, after):
                buffer[seat, place], following[seat, place] = some[row], token
    else:
        buffer[seats, :rows.shape[1]] = states.gather(1, rows[..., None].expand(-1, -1, states.shape[-1]))
        following[seats, :rows.shape[1]], first[seats] = tokens, length


def unread(following, first, seats, length, size, table, page_size):
    """The rows with which the draft reads what the target made true: those of the positions first ... length - 1 of each request.

    following int64 [seats, capacity] and first int64 [seats]: the hidden buffer's next tokens, and a seat's first position; seats, length
    int64 [B]. Returns int64 [B, size] each: index (row of the buffer's states, flat), tokens, positions, slots, prefix, words (0); rows past
    the request's last are padding: position 0, slot 0. Last, int64 [B, 1]: the flat number of each request's last row.
    """
    if not use_triton(following):
        return unread_ref(following, first, seats, length, size, table, page_size)
    batch = len(seats)
    ints, last = (torch.empty(*shape, dtype=torch.int64, device=seats.device) for shape in ((6, batch, size), (batch, 1)))
    if batch:
        _unread[batch,](following, first, seats, length, table, ints, last, batch, following.shape[1], table.stride(0), SIZE=size,
                        R=power_of_two(size), PAGE=page_size, num_warps=1, **pdl(seats))
    return *ints, last


def unread_ref(following, first, seats, length, size, table, page_size):
    at, first, count = torch.arange(size, device=seats.device), first[seats][:, None], (length - first[seats])[:, None]
    valid = at < count
    positions = torch.where(valid, first + at, 0).clamp(min=0)
    slots = torch.where(valid, slots_of(table, page_size, positions), 0)
    last = (count - 1).clamp(0, size - 1) + torch.arange(len(seats), device=seats.device)[:, None] * size
    return (seats[:, None] * following.shape[1] + at, following[seats, :size], positions, slots, positions + 1, torch.zeros_like(positions), last)


@jit
def _keep(p_parts, p_rows, p_tokens, p_length, p_seats, p_buffer, p_next, p_first, many, size, width, capacity, PARTS: tl.constexpr,
          BLOCK: tl.constexpr, APPEND: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_b, i_j, i = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    seat, row, length = tl.load(p_seats + i_b), tl.load(p_rows + i_b * size + i_j), tl.load(p_length + i_b)
    real, to = i < width, seat * capacity + (tl.minimum(length - tl.load(p_first + seat) + i_j, capacity - 1) if APPEND else i_j)
    for k in tl.static_range(PARTS):
        tl.store(p_buffer + (to * PARTS + k) * width + i, tl.load(p_parts[k] + (i_b * many + row) * width + i, mask=real), mask=real)
    tl.store(p_next + to, tl.load(p_tokens + i_b * size + i_j))       # by every block of the width: the same value
    if not APPEND:
        tl.store(p_first + seat, length)


@jit
def _unread(p_next, p_first, p_seats, p_length, p_table, p_ints, p_last, batch, capacity, s_table, SIZE: tl.constexpr, R: tl.constexpr,
            PAGE: tl.constexpr, PDL: tl.constexpr):
    follow(PDL)
    i_b, i_r = tl.program_id(0).to(tl.int64), tl.arange(0, R)
    seat, length, live = tl.load(p_seats + i_b), tl.load(p_length + i_b), i_r < SIZE
    first = tl.load(p_first + seat)
    valid, row = i_r < length - first, seat * capacity + i_r
    position = tl.maximum(tl.where(valid, first + i_r, 0), 0)      # of a seat without a request anything may wait
    many, p_ints = batch * SIZE, p_ints + i_b * SIZE + i_r
    tl.store(p_ints, row, mask=live)
    tl.store(p_ints + many, tl.load(p_next + row, mask=live, other=0), mask=live)
    tl.store(p_ints + 2 * many, position, mask=live)
    tl.store(p_ints + 3 * many, tl.where(valid, slots_at(p_table + i_b * s_table, position, live & valid, PAGE), 0), mask=live)
    tl.store(p_ints + 4 * many, position + 1, mask=live)
    tl.store(p_ints + 5 * many, tl.zeros([R], tl.int64), mask=live)
    tl.store(p_last + i_b, i_b * SIZE + tl.minimum(tl.maximum(length - first - 1, 0), SIZE - 1))
