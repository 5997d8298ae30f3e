"""`_attend` of tree_attention.py for absorbed MLA on Hopper, in Gluon: the same partial softmax, with the layouts chosen by hand.

The score tile is split between two warpgroups, and copies run ahead of the products; with two buffers:

    wait p v(i-1) | copy tile i+1 into the buffer of i-1 | wait tile i | q k(i) | softmax | issue p v(i)

No fence.proxy.async in the loop: it is a membar, which would wait for the copies in flight. Products read what cp.async wrote without one,
as CUTLASS and Triton do after cp.async, and p comes from registers.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from minispec.kernels import view

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared            # names of Triton 3.9 and 3.6
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_seen, _pairs, _span, _entries = [gluon.jit(getattr(view, name).fn) for name in ("_seen", "_pairs", "_span", "_entries")]


@gluon.jit
def attend(p_q, p_cache, p_table, p_path, p_part, p_lse, p_prefix, p_words, p_base, s_pb, s_pr, s_wb, s_wr, rows, scale, total,
           s_slot, s_kv, s_table, DK: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr, SINGLE: gl.constexpr, PDL: gl.constexpr,
           HEADS: gl.constexpr, G: gl.constexpr, DV: gl.constexpr, M: gl.constexpr, N: gl.constexpr, LENGTH: gl.constexpr):
    """The arguments of `_attend`; DK = DV = 256 or 512, DR = 64, M = 64, N = 32 or 64, 8 warps, 16-bit elements."""
    dtype: gl.constexpr = p_cache.dtype.element_ty
    BUFFERS: gl.constexpr = 128 // N
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DV // 2, 16])
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    TILE: gl.constexpr = gl.SliceLayout(1, COPY)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE)
    if PDL == 1:
        gdc_launch_dependents()
    i_tile, i_split, i_z = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b, i_kv = i_z // (HEADS // G), i_z % (HEADS // G)
    # a whole tile in every warp: what follows from all pairs needs no barrier
    j = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [8], [0]))
    _, _, live, prefix, word = _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, j, G, M, LENGTH)
    low = gl.min(gl.where(live, prefix, 2**30), 0)
    union, base, top, end, length = _span(prefix, word, p_base + i_b, j, gl.num_programs(1), N, LENGTH)
    start, stop = i_split * length, gl.minimum(i_split * length + length, end)
    if not SINGLE:
        if start >= stop:
            return

    q = gl.allocate_shared_memory(dtype, [M, DK], SHARED)
    q_rest = gl.allocate_shared_memory(dtype, [M, DR], SHARED)
    k = gl.allocate_shared_memory(dtype, [BUFFERS, N, DK], SHARED)
    k_rest = gl.allocate_shared_memory(dtype, [BUFFERS, N, DR], SHARED)
    share = gl.allocate_shared_memory(dtype, [M, N], gl.NVMMASharedLayout(2 * N, 16, 2))
    n, d = gl.arange(0, N, layout=TILE), gl.arange(0, DK, layout=gl.SliceLayout(0, COPY))
    e = DK + gl.arange(0, DR, layout=gl.SliceLayout(0, COPY))
    p_table += i_b.to(gl.int64) * s_table
    p_cache += i_kv * s_kv
    if LENGTH:
        p_path += (i_b * rows + i_tile // ((G + M - 1) // M)) * 64
    entry, known = _entries(p_table, p_path, start, n, union, top, base, stop, s_slot, PAGE, LENGTH)
    row, head, live, _, _ = _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, gl.arange(0, M, layout=TILE), G, M, LENGTH)
    p_row = p_q + ((i_b * rows + row).to(gl.int64) * HEADS + i_kv * G + head) * (DK + DR)
    copy(q, p_row[:, None] + d[None, :], mask=live[:, None])
    copy(q_rest, p_row[:, None] + e[None, :], mask=live[:, None])
    for ahead in gl.static_range(BUFFERS - 1):
        p_entry = p_cache + entry
        copy(k.index(ahead), p_entry[:, None] + d[None, :], mask=known[:, None])
        copy(k_rest.index(ahead), p_entry[:, None] + e[None, :], mask=known[:, None])
        async_copy.commit_group()
        entry, known = _entries(p_table, p_path, start + (ahead + 1) * N, n, union, top, base, stop, s_slot, PAGE, LENGTH)

    _, _, _, prefix, word = _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, gl.arange(0, M, layout=ROW), G, M, LENGTH)
    highest = gl.full([M], -1e30, gl.float32, ROW)
    weights = gl.full([M, N], 0.0, gl.float32, SCORE)
    acc = warpgroup_mma_init(gl.full([M, DV], 0.0, gl.float32, OUT))
    zero = gl.full([M, N], 0.0, gl.float32, SCORE)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, SCORE))
    now = 0
    for at in range(start, stop, N):
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        free = (now + BUFFERS - 1) % BUFFERS
        p_entry = p_cache + entry
        copy(k.index(free), p_entry[:, None] + d[None, :], mask=known[:, None])
        copy(k_rest.index(free), p_entry[:, None] + e[None, :], mask=known[:, None])
        async_copy.commit_group()
        async_copy.wait_group(BUFFERS - 1)
        barrier()
        score = warpgroup_mma(q_rest, k_rest.index(now).permute([1, 0]), zero, use_acc=False, is_async=True)
        score = warpgroup_mma(q, k.index(now).permute([1, 0]), score, is_async=True)
        entry, known = _entries(p_table, p_path, at + BUFFERS * N, n, union, top, base, stop, s_slot, PAGE, LENGTH)
        score = warpgroup_mma_wait(0, deps=[score])
        if LENGTH:
            score = gl.where((at + column < end)[None, :], score, float("-inf"))
        elif at + N > low:
            visible = (_seen(word, prefix, base, at)[:, None] >> column.to(gl.uint64)[None, :]) & 1
            score = gl.where(visible != 0, score, float("-inf"))
        higher = gl.maximum(highest, gl.max(score, 1) * scale)
        p, fade = gl.exp2(score * scale - higher[:, None]), gl.exp2(highest - higher)
        weights = weights * fade[:, None] + p
        highest = higher
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        share.store(p.to(dtype))
        acc = warpgroup_mma(share.load(gl.DotOperandLayout(0, OUT, 2)), k.index(now), acc, is_async=True)
        now = (now + 1) % BUFFERS
    if PDL == 2:
        gdc_launch_dependents()
    acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)

    m, v = gl.arange(0, M, layout=gl.SliceLayout(1, OUT)), gl.arange(0, DV, layout=gl.SliceLayout(0, OUT))
    row, head, live, _, _ = _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, m, G, M, LENGTH)
    i = (i_b * rows + row).to(gl.int64) * HEADS + i_kv * G + head
    weight, highest = gl.convert_layout(gl.sum(weights, 1), gl.SliceLayout(1, OUT)), gl.convert_layout(highest, gl.SliceLayout(1, OUT))
    acc = acc * gl.where(weight > 0, 1 / weight, 0.0)[:, None]
    if not SINGLE:
        i += i_split.to(gl.int64) * total
        gl.store(p_lse + i, gl.where(weight > 0, highest + gl.log2(weight), float("-inf")), mask=live)
    gl.store(p_part + i[:, None] * DV + v[None, :], acc.to(p_part.dtype.element_ty), mask=live[:, None])
