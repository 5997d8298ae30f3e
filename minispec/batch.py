"""The tensors of one forward. Everything here is dense [B, R]: R rows for each of B requests; rows that are not valid write to slot 0."""
from dataclasses import dataclass
from typing import Any

import torch

from minispec.kernels.tree_attention import View


@dataclass(frozen=True)
class Rows:
    """tokens, positions, slots: int64 [B, R]; the slot is where a row's KV is written. view: what each row sees."""
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    view: View


@dataclass(frozen=True)
class Batch:
    """The requests of one step.

    table int64 [B, pages] page ids; length int64 [B] tokens with target KV; pending int64 [B] the root: true, but without KV;
    room int64 [B] tokens that the context still holds; seats int64 [B] rows of the hidden buffer; on the host: longest, the greatest
    length, and unread, the greatest number of states that wait in the hidden buffer.
    """
    table: torch.Tensor
    page_size: int
    length: torch.Tensor
    pending: torch.Tensor
    room: torch.Tensor
    seats: torch.Tensor
    longest: int
    unread: int
    sampling: Any

    def slots(self, index, valid=None):
        """Cache index of a request [B, R] -> slot; where not valid the dump slot 0."""
        slots = self.table.gather(1, index // self.page_size) * self.page_size + index % self.page_size
        return slots if valid is None else torch.where(valid, slots, 0)

    def rows(self, tokens, positions, index, *, prefix, words, valid=None, extent):
        """Rows that write at cache `index`, see `prefix` entries and the ancestors in `words` (bit j = entry length + j)."""
        view = View(self.table, self.page_size, prefix, self.length, words, extent)
        return Rows(tokens, positions, self.slots(index, valid), view)
