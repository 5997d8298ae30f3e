"""The hidden-state buffer: what the target saw, kept until the draft can read it."""
import torch

from minispec.kernels.buffer import keep, unread


class HiddenBuffer:
    """states [seats, capacity, A * hidden] of the target's captured layers, concatenated in ascending layer order.

    A state at position p is read together with the token at p + 1, so the last state of every forward waits here for that token:

        positions   ... L-3   L-2   L-1 |  L (pending, no state yet)
        a seat            state state state   next tokens: t[L-2] t[L-1] t[L]

    Every row in this buffer comes from the target. The draft's own recycled states never enter it: that mark, not a width, decides
    whether the fusion layer applies (Draft.fuse reads from here only). parts: (name, source layer) of each of the A slices.
    """

    def __init__(self, seats, capacity, capture, hidden, dtype, device):
        self.parts = [(f"input of layer {i}", i) for i in capture]
        self.hidden = hidden
        self.states = torch.zeros(seats + 1, capacity, len(capture) * hidden, dtype=dtype, device=device)
        self.next = torch.zeros(seats + 1, capacity, dtype=torch.int64, device=device)
        self.first = torch.zeros(seats + 1, dtype=torch.int64, device=device)         # position of a seat's first state

    def put(self, batch, parts, path, append=False):
        """Keep the states of an accepted path: parts, A tensors [B, R, hidden] of a forward's rows, the first of the path at position
        batch.length; path.tokens the token after each. append: what waits already stays, before them."""
        keep(parts, path.rows, path.tokens, batch.length, batch.seats, self.states, self.next, self.first, append)

    def keep_last(self, batch):
        """The draft has read all but the last state of each request."""
        last = (batch.length - self.first[batch.seats] - 1).clamp(0, self.next.shape[1] - 1)
        for kept in (self.states, self.next):
            kept[batch.seats, 0] = kept[batch.seats, last]
        self.first[batch.seats] = batch.length - 1

    def take(self, batch):
        """Unread of kernels/buffer.py for batch.unread rows a request, left until the next put; its index counts rows of `states`, flat."""
        return unread(self.next, self.first, batch.seats, batch.length, batch.unread, batch.table, batch.page_size)

    def part(self, k, seat=0):
        """The k-th captured layer's states at one seat, read or not: [capacity, hidden], for looking at."""
        return self.states[seat, :, k * self.hidden:(k + 1) * self.hidden]
