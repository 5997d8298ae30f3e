"""Triton where it exists. On other systems every kernel is its reference in PyTorch."""
import sys
from types import SimpleNamespace

if sys.platform == "linux":
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
