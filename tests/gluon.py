"""Enough of Gluon in numpy to run a kernel's text on the CPU, one program after another; layouts are ignored.

Copies land when they are waited for, and hold NaN until then; products are computed when they are waited for, from what shared memory
holds by then. So a kernel that reads too early, or overwrites what a product in flight still needs, gives NaN or a wrong result.
"""
import importlib.util
import sys
import types

import numpy as np
import torch


class Array(np.ndarray):
    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return np.asarray(array).view(Array)


def array(x):
    return np.asarray(x).view(Array)


class Pointer:
    def __init__(self, memory, at):
        self.memory, self.at, self.dtype = memory, array(at), types.SimpleNamespace(element_ty=memory.dtype.type)

    def __add__(self, offset):
        return Pointer(self.memory, self.at + offset)

    def __getitem__(self, index):
        return Pointer(self.memory, self.at[index])

    def load(self, mask):
        at, mask = np.broadcast_arrays(self.at, True if mask is None else mask)
        assert ((0 <= at[mask]) & (at[mask] < self.memory.size)).all(), "a load outside of the tensor"
        return array(np.where(mask, self.memory[np.where(mask, at, 0)], self.memory.dtype.type(0)))

    def store(self, value, mask):
        at, mask, value = np.broadcast_arrays(self.at, True if mask is None else mask, value)
        assert ((0 <= at[mask]) & (at[mask] < self.memory.size)).all(), "a store outside of the tensor"
        self.memory[at[mask]] = value[mask]


class Shared:
    def __init__(self, data):
        self.data, self.shape = data, data.shape
        self.index = lambda i: Shared(self.data[i])
        self.load = lambda layout: Shared(self.data.copy())
        self.permute = lambda order: Shared(self.data.transpose(order))

    def store(self, value):
        self.data[:] = value


class Later:
    def __init__(self, value):
        self.value = value


def load(source):
    """The module of a file that imports Gluon; its functions marked gluon.jit are plain, `launch` runs one over a grid."""
    copies, program, size = [[]], [0, 0, 0], [0, 0, 0]                                                 # copies: by groups, the last one open

    def copy(shared, pointer, mask=None):
        shared.data[:] = np.nan
        copies[-1].append((shared, pointer, mask))

    def land(left):
        while len(copies) > left + 1:
            for shared, pointer, mask in copies.pop(0):
                shared.store(pointer.load(mask))

    def product(a, b, acc, use_acc=True, is_async=False):
        return Later(lambda: array(a.data @ b.data + ((acc.value() if isinstance(acc, Later) else acc) if use_acc else 0)))

    nothing = lambda *args, **kwargs: None                                                             # noqa: E731
    ignore = lambda value, layout=None: value                                                          # noqa: E731
    language = types.SimpleNamespace(
        constexpr=object, int32=np.int32, int64=np.int64, uint64=np.uint64, float32=np.float32, program_id=lambda i: array(np.int32(program[i])),
        num_programs=lambda i: array(np.int32(size[i])),
        static_range=range, arange=lambda a, b, layout=None: array(np.arange(a, b, dtype=np.int32)),
        full=lambda shape, value, dtype, layout=None: array(np.full(shape, value, dtype)),
        where=lambda c, a, b: array(np.where(c, a, b)), minimum=lambda a, b: array(np.minimum(a, b)), maximum=lambda a, b: array(np.maximum(a, b)),
        max=lambda x, axis: array(np.max(x, axis)), min=lambda x, axis: array(np.min(x, axis)), sum=lambda x, axis: array(np.sum(x, axis)),
        exp2=np.exp2, log2=np.log2, reduce_or=lambda x, axis: array(np.bitwise_or.reduce(x, axis)), convert_layout=ignore,
        load=lambda p, mask=None, other=0: p.load(mask), store=lambda p, value, mask=None: p.store(value, mask), barrier=nothing,
        allocate_shared_memory=lambda dtype, shape, layout: Shared(np.full(shape, np.nan, dtype)), NVMMADistributedLayout=nothing,
        NVMMASharedLayout=nothing, BlockedLayout=nothing, SliceLayout=nothing, DotOperandLayout=nothing)
    hopper = types.SimpleNamespace(warpgroup_mma=product, warpgroup_mma_init=lambda x: Later(lambda: x),
                                   warpgroup_mma_wait=lambda left, deps: deps[0].value())
    scope = {"tl": language}                                                                           # of functions that Triton shares

    def own(function):
        if function.__globals__.get("tl") is None:
            return function
        scope[function.__name__] = types.FunctionType(function.__code__, scope, function.__name__)
        return scope[function.__name__]

    gluon = types.SimpleNamespace(jit=own, language=language)
    fake = {"triton.experimental": types.SimpleNamespace(gluon=gluon), "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language.nvidia.ampere": types.SimpleNamespace(
                async_copy=types.SimpleNamespace(async_load=copy, commit_group=lambda: copies.append([]), wait_group=land)),
            "triton.experimental.gluon.language.nvidia.hopper": hopper,
            "triton.language.extra.cuda": types.SimpleNamespace(gdc_launch_dependents=nothing)}
    spec = importlib.util.spec_from_file_location("gluon_under_test", source)
    module, kept = importlib.util.module_from_spec(spec), {name: sys.modules.get(name) for name in fake}
    sys.modules.update(fake)
    try:
        spec.loader.exec_module(module)
    finally:
        for name, value in kept.items():
            sys.modules.pop(name) if value is None else sys.modules.update({name: value})

    class Launch:
        def __init__(self, function):
            self.function = function

        def __getitem__(self, grid):
            def run(*args, num_warps, **constants):
                args = [pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
                size[:] = grid
                for at in np.ndindex(*grid):
                    program[:] = at
                    with np.errstate(all="ignore"):
                        self.function(*args, **constants)
            return run

    def pointer(x):
        return Pointer(torch.as_strided(x, (x.untyped_storage().nbytes() // x.element_size(),), (1,), 0).numpy(), np.int64(x.storage_offset()))

    module.launch = Launch
    return module
