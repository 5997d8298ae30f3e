"""What this machine has: the device, its free memory, and what fits into it, asked before anything is allocated."""
import os
from pathlib import Path

import torch

from minispec.errors import MinispecError

HEADROOM = 0.9      # the rest is for activations and the allocator's own losses
CGROUP = Path("/sys/fs/cgroup")     # version 2; version 1 in its folder `memory`


def resolve_device(name):
    """torch.device of a name; MinispecError for one that this machine or this build of torch lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise MinispecError(f'device {name!r} is not known; give "auto", "cpu", "cuda" or "cuda:N"')
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise MinispecError(f"device {name!r} is not there: this machine shows torch {count} CUDA devices; give cpu")
    return device


def resolve_dtype(name, device):
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    names = ("float32", "bfloat16", "float16")
    name = str(name).removeprefix("torch.")
    if name not in names:
        raise MinispecError(f"dtype {name!r} is not known; give auto, {', '.join(names)}")
    return getattr(torch, name)


def available(device):
    """Bytes that can still be allocated on the device; on the CPU the least of free memory and what the container's limit leaves.

    A container is also charged for the files it read: those pages (inactive_file) go when memory is asked for, so they count as free.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        limits += [int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable")]
    for group, limit, used, idle in ((CGROUP, "memory.max", "memory.current", "inactive_file"),
                                     (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")):
        if (group / limit).is_file() and (most := (group / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            limits.append(int(most) - int((group / used).read_text()) + int(stat[idle]))
    return min(limits)


def size(count):
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def weight_bytes(shapes, dtype, dtypes={}):
    """Bytes of parameters with these shapes. fp32 where layers.allocate keeps it is a rounding error here."""
    return sum(torch.Size(shape).numel() * dtypes.get(name, dtype).itemsize for name, shape in shapes.items())


def workspace(config, draft, shape, batch, captured, dtype):
    """Bytes beside weights and caches: rotary tables of target and draft (its config, or None), and the hidden buffer."""
    rotary = 8 * config.max_position_embeddings * (config.rope.dim + (draft.rope.dim if draft else 0))
    return rotary + batch * shape.unread * captured * config.hidden_size * dtype.itemsize


def read_bytes(sizes, config, rows, experts=None):
    """Weight bytes that a forward of the target over `rows` rows reads, of parameters that have `sizes`, name -> bytes: everything once but
    the embedding, and of E routed experts, k a row, the distinct ones a layer: `experts`, or the E * (1 - (1 - k / E) ** rows) that
    independent uniform routing expects (real rows share more)."""
    routed, share = sum(count for name, count in sizes.items() if name.removesuffix("_scale").endswith((".w13", ".w2"))), 0
    if routed:
        share = experts / config.n_routed_experts if experts else 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows
    return sum(count for name, count in sizes.items() if name != "embed") - routed * (1 - share)


def plan(free, weights, token, batch, length, context, scratch):
    """How long a request may be, and how many tokens the caches hold.

    free: bytes available; weights: bytes of parameters; token: cache bytes a token; length: what the user asked for, or None.
    context: the target's; scratch: cache tokens a request may hold past its length, for a tree and to fill a page; batch: requests at once.
    Returns (max_length, cache tokens, reason). MinispecError when the weights or the requested length do not fit.
    """
    if length is not None and length > context:
        raise MinispecError(f"max_length={length} is past the target's context (max_position_embeddings={context}); give at most that")
    room = int(free * HEADROOM) - weights
    usable = f"{HEADROOM:.0%} of the {size(free)} that are free on this device, {size(free * HEADROOM)}, may be used"
    if room < token * (scratch + 2):
        raise MinispecError(f"weights and the smallest cache need {size(weights + token * (scratch + 2))}, {usable}: "
                            "use a smaller checkpoint, a smaller dtype, or more memory")
    fits = room // token - scratch
    if length is None:
        longest, reason = min(context, fits), "the target's context" if context <= fits else f"what {size(free)} of free memory holds"
    elif length > fits:
        raise MinispecError(f"max_length={length} needs {size(weights + token * (length + scratch))}, {usable}: max_length={fits} fits")
    else:
        longest, reason = length, "as asked"
    return longest, min(batch * (longest + scratch), fits + scratch), reason
