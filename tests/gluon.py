"""Enough of Gluon in numpy to run a kernel's text on the CPU, one program after another; layouts are ignored.

Copies land when they are waited for, and hold NaN until then; products are computed when they are waited for, from what shared memory
holds by then. So a kernel that reads too early, or overwrites what a product in flight still needs, gives NaN or a wrong result.
The partitions of a program are threads, and meet at its mbarriers alone.
"""
import importlib.util
import sys
import threading
import time
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
        self.data, self.shape, self.dtype = data, data.shape, data.dtype
        self.index = lambda i: Shared(self.data[i])
        self.load = lambda layout: array(self.data.copy())
        self.permute = lambda order: Shared(self.data.transpose(order))

    def store(self, value):
        self.data[:] = value


class Barriers:
    """Every mbarrier of a program; the 128 threads that copy arrive at once, and what they copied lands with the first wait."""
    def __init__(self):
        self.known, self.met, self.failed = {}, threading.Condition(), False

    def at(self, shared):
        return self.known[shared.data.ctypes.data]

    def init(self, shared, count):
        self.known[shared.data.ctypes.data] = types.SimpleNamespace(count=count, left=count, phase=0, copies=[])

    def arrive(self, shared, count=1, copies=()):
        with self.met:
            bar = self.at(shared)
            bar.copies += copies
            bar.left -= count
            assert bar.left >= 0, "more arrivals than a phase takes"
            if not bar.left:
                bar.left, bar.phase = bar.count, 1 - bar.phase
                self.met.notify_all()
        time.sleep(1e-4)                                # whoever waited goes on at once: an arrival too early shows

    def wait(self, shared, phase):
        with self.met:
            bar = self.at(shared)
            assert self.met.wait_for(lambda: self.failed or bar.phase != phase, 20) and not self.failed, "a barrier that nobody completes"
            for to, pointer, mask in bar.copies:
                to.store(pointer.load(mask))
            bar.copies.clear()


class Later:
    def __init__(self, value):
        self.value = value


def load(source):
    """The module of a file that imports Gluon; its functions marked gluon.jit are plain, `launch` runs one over a grid."""
    copies, program, size, barriers = [[]], [0, 0, 0], [0, 0, 0], Barriers()                           # copies: by groups, the last one open

    def copy(shared, pointer, mask=None):
        shared.data[:] = np.nan
        copies[-1].append((shared, pointer, mask))

    def copied(shared, increment_count):
        barriers.arrive(shared, 128, copies.pop())
        copies.append([])

    def product(a, b, acc, use_acc=True, is_async=False):
        value = lambda x: x.data if isinstance(x, Shared) else x.value() if isinstance(x, Later) else x  # noqa: E731
        return Later(lambda: array(np.asarray(value(a)) @ b.data + (value(acc) if use_acc else 0)))

    def specialize(parts, warps, registers):
        errors = []

        def run(function, arguments):
            try:
                with np.errstate(all="ignore"):
                    function(*arguments)
            except BaseException as problem:            # raised below, in the thread that asked
                errors.append(problem)
                with barriers.met:
                    barriers.failed = True
                    barriers.met.notify_all()
        threads = [threading.Thread(target=run, args=part) for part in parts]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
        if errors:
            raise errors[0]

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
        warp_specialize=specialize,
        shared_memory_descriptor=types.SimpleNamespace(reinterpret=lambda x, dtype, shape, layout: Shared(x.data.reshape(shape))),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(np.full(shape, np.nan, dtype)), NVMMADistributedLayout=nothing,
        NVMMASharedLayout=nothing, BlockedLayout=nothing, SliceLayout=nothing, DotOperandLayout=nothing)
    mbarrier = types.SimpleNamespace(init=barriers.init, arrive=barriers.arrive, wait=barriers.wait, MBarrierLayout=nothing)
    hopper = types.SimpleNamespace(mbarrier=mbarrier, fence_async_shared=nothing, warpgroup_mma=product,
                                   warpgroup_mma_init=lambda x: Later(lambda: x), warpgroup_mma_wait=lambda left, deps: deps[0].value())
    scope = {"tl": language}                                                                           # of functions that Triton shares

    def own(function):
        if function.__globals__.get("tl") is None:
            return function
        scope[function.__name__] = types.FunctionType(function.__code__, scope, function.__name__)
        return scope[function.__name__]

    gluon = types.SimpleNamespace(jit=own, language=language)
    fake = {"triton.experimental": types.SimpleNamespace(gluon=gluon), "triton.experimental.gluon": gluon,
            "triton.experimental.gluon.language.nvidia.ampere": types.SimpleNamespace(
                async_copy=types.SimpleNamespace(async_load=copy, mbarrier_arrive=copied)),
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
