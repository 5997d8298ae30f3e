"""Which rows see which entries of a paged cache: one rule for prefill, chain and tree.

Cache indices are counted in tokens of one request; the page table turns them into slots:

    0 ............ base-1 | base ........ base+63
    committed tokens      | this forward's rows (the tail)

A row sees every index below its `prefix`, and index base + j where bit j of its ancestor word is set (itself included).
A tree row has prefix = base; a prefill row i needs no word: prefix = base + i + 1.
"""
from dataclasses import dataclass
from functools import cached_property

import torch

from minispec.kernels.jit import jit, tl

EXACT = 512         # tokens of a split where View.exact asks for fixed split points


@dataclass(frozen=True)
class View:
    """table int64 [B, pages]; prefix, words int64 [B, R]; base int64 [B]; extent: no row sees a cache index >= extent.

    exact: on the GPU no bit of a row depends on the rows beside it, nor on where in the tail its ancestors lie: they are taken in path
    order, as plain decoding would, in splits of EXACT, in tiles of one row's heads. It costs most where there are few heads.
    chain: the rows are the last of `extent` entries, each seeing all up to itself.
    """
    table: torch.Tensor
    page_size: int
    prefix: torch.Tensor
    base: torch.Tensor
    words: torch.Tensor
    extent: int
    exact: bool = False
    chain: bool = False

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
        """bool [B, extent, 1, 1]: entries that no row sees may hold NaN, and 0 * NaN must not reach a sum. None: there are none (asked on the
        CPU only: on CUDA the question would stop the queue)."""
        unseen = ~self.visible.any(1)[..., None, None]
        return unseen if unseen.is_cuda or unseen.any() else None

    @cached_property
    def path(self):
        """The bits set in each word, ascending, then the others: uint8 [B, R, 64]. The ancestors of a row in path order, root first."""
        bits = (self.words[..., None] >> torch.arange(64, device=self.words.device)) & 1
        return bits.sort(dim=-1, descending=True, stable=True).indices.to(torch.uint8)


# For the kernels of tree_attention.py and hopper.py; the latter gives the ranges a layout.
@jit
def _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, at, G: tl.constexpr, M: tl.constexpr, LENGTH: tl.constexpr):
    """Row, head within its group, liveness, prefix and word of the pairs `at` of a tile."""
    if LENGTH:
        row, head = at * 0 + i_tile // ((G + M - 1) // M), i_tile % ((G + M - 1) // M) * M + at
        live = head < G
    else:
        row, head = (i_tile * M + at) // G, (i_tile * M + at) % G
        live = row < rows
    prefix = tl.load(p_prefix + (i_b.to(tl.int64) * s_pb + row * s_pr), mask=live, other=0).to(tl.int32)
    word = tl.load(p_words + (i_b.to(tl.int64) * s_wb + row * s_wr), mask=live, other=0).to(tl.uint64, bitcast=True)
    return row, head, live, prefix, word


@jit
def _span(prefix, word, p_base, j, splits, N: tl.constexpr, LENGTH: tl.constexpr):
    """Of a whole tile: the words' union, the base, the greatest prefix, the end of what it sees, the tokens of a split; j: 0 ... 63."""
    union, top, base = tl.reduce_or(word, 0), tl.max(prefix, 0), tl.load(p_base).to(tl.int32)
    bit = ((union >> j.to(tl.uint64)) & 1).to(tl.int32)
    if LENGTH:
        end = top + tl.sum(bit, 0)
        length = LENGTH
    else:
        tail = tl.max(bit * (j + 1), 0)
        end = tl.where(tail > 0, tl.maximum(top, base + tail), top)
        length = tl.maximum((end + splits * N - 1) // (splits * N), 1) * N
    return union, base, top, end, length


@jit
def _seen(word, prefix, base, at):
    """Bit n: whether cache index at + n is visible, n < 64."""
    none = word ^ word
    count, shift = tl.minimum(prefix - at, 64), base - at
    head = tl.where(count > 0, (none - 1) >> (64 - tl.maximum(count, 1)).to(tl.uint64), none)
    left, right = tl.minimum(tl.maximum(shift, 0), 63).to(tl.uint64), tl.minimum(tl.maximum(-shift, 0), 63).to(tl.uint64)
    return head | tl.where((shift < 64) & (shift > -64), word << left >> right, none)


@jit
def _entries(p_table, p_path, at, n, union, top, base, stop, s_slot, PAGE: tl.constexpr, LENGTH: tl.constexpr):
    """Where in the cache the indices at + n lie, and whether they come before `stop` and any row of the tile sees them."""
    index = at + n
    known = index < stop
    if LENGTH:
        step = tl.load(p_path + (index - top), mask=known & (index >= top), other=0).to(tl.int32)
        index = tl.where(index < top, index, base + step)
    else:
        known = known & (((_seen(union, top, base, at) >> n.to(tl.uint64)) & 1) != 0)
    # not (page * PAGE + index % PAGE) * s_slot: Triton 3.6 takes that for a multiple of PAGE and reads odd strides by misaligned vectors
    return tl.load(p_table + index // PAGE, mask=known, other=0) * PAGE * s_slot + index % PAGE * s_slot, known
