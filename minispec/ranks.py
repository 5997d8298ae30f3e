"""The ranks of one run: which part of a whole each holds, and how they meet."""
import hashlib
import json
import os
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from minispec.errors import MinispecError

CHECK = 256         # rounds between two comparisons of what the ranks hold in common


class Ranks:
    """This rank among `size`. expert_parallel: routed experts are dealt whole; shard_latent: q_a and kv_a are split by rows and gathered.

    Tensors travel over `group`, nccl on CUDA, where a CUDA graph captures the calls, gloo on the CPU; values of the host over `side`, gloo.
    Alone, every method gives back what it is given and nothing is connected.
    """

    def __init__(self, rank=0, size=1, group=None, side=None, tick=lambda: None, *, expert_parallel=False, shard_latent=False):
        self.rank, self.size, self.group, self.side, self.tick = rank, size, group, side, tick
        self.expert_parallel, self.shard_latent = expert_parallel, shard_latent

    @classmethod
    def connect(cls, team, device, *, expert_parallel=False, shard_latent=False):
        """The ranks of a launch.Team, connected; alone for None. No process group of torch's own is needed or touched."""
        if team is None:
            return ALONE
        day = timedelta(days=1)                 # what hangs is for the watch of launch.py to say
        side = group = dist.ProcessGroupGloo(dist.PrefixStore("side/", team.store), team.rank, team.size, day)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")       # else torch aborts the process, notebook or not
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = day
            group = dist.ProcessGroupNCCL(dist.PrefixStore("group/", team.store), team.rank, team.size, options)
            team.abort = group.abort
        return cls(team.rank, team.size, group, side, team.tick, expert_parallel=expert_parallel, shard_latent=shard_latent)

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
            self.tick()
            self.group.allreduce([x]).wait()
        return x

    def once(self, x):
        """x on rank 0, None on the others: what is to enter a sum one time."""
        return None if self.rank else x

    def gather(self, x, dim=-1):
        """Every rank's x, of one shape, concatenated in the order of ranks."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size, *x.shape)
        self.tick()
        self.group._allgather_base(out.view(-1), x.contiguous().view(-1)).wait()
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
        # a clone: `contiguous` keeps a single element's stride, which a view of bytes refuses
        parts = [x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in tensors]
        flat = torch.cat(parts)
        self.tick()
        self.group.broadcast(flat, 0).wait()
        taken = flat.split([len(part) for part in parts])
        return [part.view(x.dtype).view(x.shape) for part, x in zip(taken, tensors)]

    def exchange(self, value):
        """Every rank's value, something that JSON can hold."""
        if self.size == 1:
            return [value]
        self.tick()
        data = json.dumps(value).encode()
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self.side.allgather([counts], [torch.tensor([len(data)])]).wait()
        room = max(map(int, counts))
        texts = [torch.zeros(room, dtype=torch.uint8) for _ in counts]
        self.side.allgather([texts], [torch.frombuffer(bytearray(data.ljust(room)), dtype=torch.uint8)]).wait()
        return [json.loads(bytes(text.tolist())) for text in texts]

    def least(self, value):
        return min(self.exchange(value))

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
                raise MinispecError(f"{what}: {name} of rank {', '.join(others)} is not what the other ranks have; give every rank the "
                                    "same files, options and version, and look at that rank's hardware")


ALONE = Ranks()


def fingerprint(x):
    """int64 scalar on x's device: its bits as integers, each times its place, summed modulo 2^64."""
    bits = x.flatten().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for part in bits.split(2**22):
        total = total * 31 + (part.long() * torch.arange(1, len(part) + 1, device=x.device)).sum()
    return total
