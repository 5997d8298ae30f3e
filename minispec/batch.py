"""The tensors of one forward. Everything here is dense [B, R]: R rows for each of B requests; rows that are not valid write to slot 0."""
from dataclasses import dataclass

import torch

from minispec.kernels.choose import Sampling
from minispec.kernels.tree import slots_of
from minispec.kernels.view import View


@dataclass(frozen=True)
class Rows:
    """tokens, positions, slots: int64 [B, R]; the slot is where a row's KV is written. view: what each row sees. live bool [B, R]: whether
    anybody wants a row, or None for all."""
    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    view: View
    live: torch.Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """The requests of one step.

    table int64 [B, pages] page ids; length int64 [B] tokens with target KV; pending int64 [B] the root: true, but without KV;
    room int64 [B] tokens that the context still holds; seats int64 [B] rows of the hidden buffer; on the host: longest, the greatest
    length, and unread, the greatest number of states that wait in the hidden buffer; exact: the target's rows ask for View.exact.
    """
    table: torch.Tensor
    page_size: int
    length: torch.Tensor
    pending: torch.Tensor
    room: torch.Tensor
    seats: torch.Tensor
    longest: int
    unread: int
    sampling: Sampling | None
    exact: bool = False

    def slots(self, index, valid=None):
        """Cache index of a request [B, R] -> slot; where not valid the dump slot 0."""
        slots = slots_of(self.table, self.page_size, index)
        return slots if valid is None else torch.where(valid, slots, 0)

    def rows(self, tokens, positions, index, *, prefix, words, valid=None, extent, exact=False, chain=False):
        """Rows that write at cache `index`, see `prefix` entries and the ancestors in `words` (bit j = entry length + j)."""
        view = View(self.table, self.page_size, prefix, self.length, words, extent, exact, chain)
        return Rows(tokens, positions, self.slots(index, valid), view)


class Assembler:
    """Makes the Batch of a step from its requests; the page table and the sampling tensors are kept while the requests stay the same."""

    def __init__(self, page_size, max_length, vocab, device, exact=False):
        self.page_size, self.max_length, self.vocab, self.device, self.exact = page_size, max_length, vocab, device, exact
        self.requests = self.table = self.sampling = None

    def __call__(self, requests):
        """requests: minispec.request.Request, all of them, in order."""
        counts = any((r.params.repetition_penalty, r.params.presence_penalty, r.params.frequency_penalty) != (1, 0, 0) for r in requests)
        if self.requests != requests or counts:      # penalties look at the output, which grows
            width = max(len(r.pages) for r in requests)
            self.requests, self.table = list(requests), self.tensor([r.pages + [0] * (width - len(r.pages)) for r in requests])
            self.sampling = Sampling.build([r.params for r in requests], [r.prompt_ids for r in requests],
                                           [r.ids[:-1] for r in requests], self.vocab, self.device)
        return self.batch(self.table, [r.length for r in requests], [r.ids[-1] if r.ids else 0 for r in requests],
                          [r.slot for r in requests], [r.length - r.draft_length for r in requests], self.sampling)

    def batch(self, table, length, pending, seats, unread, sampling):
        """The lists hold one int a request."""
        state = self.tensor([length, pending, [self.max_length - 1 - n for n in length], seats])
        return Batch(table, self.page_size, *state, max(length), max(unread), sampling, self.exact)

    def tensor(self, values):
        return torch.tensor(values, dtype=torch.int64, device=self.device)
