"""The ranks of one run: which part of a whole each holds, and how they meet."""
import hashlib
import os
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist

from minispec.errors import MinispecError

class Told(MinispecError):
    """An error that every rank raises, because one has told it."""


CHECK = 256         # rounds between two comparisons of what the ranks hold in common


class Ranks:
    """This rank among `size`. expert_parallel: routed experts are dealt whole; shard_latent: q_a and kv_a are split by rows and gathered.

    Tensors travel over `group`, nccl on CUDA, where a CUDA graph captures the calls, gloo on the CPU; values of the host over `side`, gloo.
    Alone, every method gives back what it is given and nothing is connected.
    """

    def __init__(self, rank=0, size=1, group=None, side=None, *, expert_parallel=False, shard_latent=False):
        self.rank, self.size, self.group, self.side = rank, size, group, side
        self.expert_parallel, self.shard_latent = expert_parallel, shard_latent

    @classmethod
    def connect(cls, size, device, *, expert_parallel=False, shard_latent=False):
        """(Ranks over the process group that is up, this rank's device): of several GPUs on a host each rank takes its own."""
        if size == 1:
            return cls(), device
        there = dist.get_world_size() if dist.is_initialized() else 1
        if there != size:
            raise MinispecError(f"tensor_parallel={size}, but {there} rank{'s' * (there > 1)} of this run are up: start as many as it says")
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank())))
            torch.cuda.set_device(device)
        side = dist.new_group(backend="gloo")
        group = dist.new_group(backend="nccl") if device.type == "cuda" else side
        return cls(dist.get_rank(), size, group, side, expert_parallel=expert_parallel, shard_latent=shard_latent), device

    def span(self, total):
        """(start, stop) of this rank's rows of `total`: all ranks hold ceil(total / size) but the last ones, who hold what is left."""
        width = -(-total // self.size)
        return min(self.rank * width, total), min((self.rank + 1) * width, total)

    def experts(self, total):
        """(start, stop) of this rank's whole experts: contiguous blocks whose sizes differ by one at most."""
        return self.rank * total // self.size, (self.rank + 1) * total // self.size

    def sum(self, x):
        """The sum of every rank's x, in place, with the same bits on every rank."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def gather(self, x, dim=-1):
        """Every rank's x, of one shape, concatenated in the order of ranks."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size, *x.shape)
        every = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        every(out.view(-1), x.contiguous().view(-1), group=self.group)
        return torch.cat(out.unbind(0), dim)

    def join(self, x, total):
        """The whole [..., total] of which x holds this rank's `span` of the last axis."""
        if self.size == 1:
            return x
        return self.gather(torch.nn.functional.pad(x, (0, -(-total // self.size) - x.shape[-1])))[..., :total]

    def agree(self, *tensors):
        """Rank 0's tensors, on every rank: one decision for all, in one broadcast. Wider dtypes come first."""
        if self.size == 1:
            return tensors
        parts = [x.contiguous().view(-1).view(torch.uint8) for x in tensors]
        flat = torch.cat(parts)
        dist.broadcast(flat, dist.get_global_rank(self.group, 0), group=self.group)
        taken = flat.split([len(part) for part in parts])
        return [part.view(x.dtype).view(x.shape) for part, x in zip(taken, tensors)]

    def exchange(self, value):
        """Every rank's value, a plain one of the host. MinispecError with a rank's own line where one had to stop instead."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.side)
        for rank, one in enumerate(values):
            if isinstance(one, MinispecError) and not isinstance(value, MinispecError):
                raise Told(f"rank {rank}: {one}")
        return values

    def least(self, value):
        return min(self.exchange(value))

    @contextmanager
    def together(self):
        """One rank's MinispecError inside becomes that of all: the others get it from the next `exchange`, which they must come to."""
        try:
            yield
        except Told:
            raise
        except MinispecError as error:
            self.exchange(MinispecError(str(error)))
            raise

    def check(self, what, values):
        """MinispecError that names the ranks on which one of `values`, name -> tensor or text, is not what most of them have."""
        if self.size == 1:
            return
        tensors = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        marks = torch.stack([fingerprint(values[name]) for name in tensors]).tolist() if tensors else []
        mine = {name: hashlib.sha256(value.encode()).hexdigest() for name, value in values.items() if name not in tensors}
        every = self.exchange(mine | dict(zip(tensors, marks)))
        for name in values:
            most = Counter(one.get(name) for one in every).most_common(1)[0][0]
            others = [str(rank) for rank, one in enumerate(every) if one.get(name) != most]
            if others:
                raise Told(f"{what}: {name} of rank {', '.join(others)} is not what the other ranks have; give every rank the "
                                    "same files, options and version, and look at that rank's hardware")


ALONE = Ranks()


def fingerprint(x):
    """int64 scalar on x's device: its bits as integers, each times its place, summed modulo 2^64."""
    bits = x.flatten().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in bits.split(2**22):
        total = total * 31 + (part.long() * torch.arange(1, len(part) + 1, device=x.device)).sum()
    return total
