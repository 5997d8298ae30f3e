"""Triton where it has something to run on: its import takes 0.4 s and 75 MB. Elsewhere every kernel is its reference in PyTorch."""
import os
import sys
from functools import lru_cache
from types import SimpleNamespace

import torch

if sys.platform == "linux" and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"):
    import triton
    import triton.language as tl

    jit, INTERPRET = triton.jit, triton.knobs.runtime.interpret
else:
    jit, INTERPRET, tl = (lambda function: function), False, SimpleNamespace(constexpr=lambda value: value)


def use_triton(x):
    """Whether the tensor lies where the Triton kernels run. Tests on the CPU say yes in its place, for the interpreter."""
    return x.is_cuda


def power_of_two(n):
    """The least power of two >= n."""
    return 1 << (n - 1).bit_length()


@lru_cache
def _overlaps(device):
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pdl(x):
    """Launch options of a kernel that calls `follow` before it touches what another wrote or reads."""
    return {"PDL": 1, "launch_pdl": True} if x.is_cuda and _overlaps(x.device) else {"PDL": 0}


@jit
def follow(PDL: tl.constexpr, RELEASE: tl.constexpr = True):
    """Wait for the kernel before, then let the one after be launched: on Hopper a launch overlaps the kernel before it (pdl). RELEASE False: the
    caller does so later, as programs that come while very many run meet on few multiprocessors: 12 of `down` took 22 us instead of 9."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        if RELEASE:
            tl.extra.cuda.gdc_launch_dependents()
