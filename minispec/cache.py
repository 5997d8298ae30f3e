"""The paged KV cache of one model, and the move that makes an accepted path permanent."""
import torch

from minispec.kernels.accept import move


class Cache:
    """data [layers, slots, KV heads, width]. Slots belong to pages, pages to requests (pages.py); page 0 is nobody's: a dump for padding.

    In a request's own counting (cache index = committed order, not slot):

        0 ........ length-1 | length ........ length+R-1
        committed           | rows of this forward: free again unless `commit` keeps them
    """

    def __init__(self, layers, slots, kv_heads, width, dtype, device):
        self.data = torch.zeros(layers, slots, kv_heads, width, dtype=dtype, device=device)

    def __getitem__(self, layer):
        return self.data[layer]

    def commit(self, batch, path):
        """Move the KV of the accepted rows, in path order, to the cache indices length, length + 1, ... A chain is already there."""
        if not path.straight:
            move(self.data, batch.table, batch.page_size, batch.length, path.rows, path.count)
