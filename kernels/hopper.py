"""`_attend` of tree_attention.py for absorbed MLA on Hopper, in Gluon: the same partial softmax, by three roles that run at once.

Four warps copy. Of two warpgroups, number W scores tiles W, W + 2, ... and multiplies the weights p of every tile, in ascending order, by
its half of the values. So the softmax of one runs under the products of the other; with t even:

    0: q k(t)   | softmax(t), hands p(t) on         | p(t) v(t)                                     | p(t+1) v(t+1)
    1: q k(t+1)                           | p(t) v(t) | softmax(t+1), hands p(t+1) on | p(t+1) v(t+1)

p goes from owner to neighbour through the 64 columns of the tile's buffer that are no values; the greatest score and the denominator of
a row go along a chain from tile to tile. A half of a buffer is free when its warpgroup has multiplied it.

No fence.proxy.async where copies arrive: products read what cp.async wrote without one, as CUTLASS and Triton do.
"""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_init, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents

from minispec.kernels import view

copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared            # names of Triton 3.9 and 3.6
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
_seen, _pairs, _span, _entries = [gluon.jit(getattr(view, name).fn) for name in ("_seen", "_pairs", "_span", "_entries")]


@gluon.jit
def attend(p_q, p_cache, p_table, p_path, p_part, p_lse, p_prefix, p_words, p_base, s_pb, s_pr, s_wb, s_wr, rows, scale, total,
           s_slot, s_kv, s_table, DK: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr, SINGLE: gl.constexpr, PDL: gl.constexpr,
           HEADS: gl.constexpr, G: gl.constexpr, DV: gl.constexpr, M: gl.constexpr, N: gl.constexpr, LENGTH: gl.constexpr):
    """The arguments of `_attend`; DK = DV = 256 or 512, M = DR = 64, N = 32 or 64, 4 warps beside 8 that it adds, 16-bit elements."""
    dtype: gl.constexpr = p_cache.dtype.element_ty
    BUFFERS: gl.constexpr = 128 // N
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = mbarrier.MBarrierLayout()
    if PDL == 1:
        gdc_launch_dependents()
    i_tile, i_split, i_z = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    i_b, i_kv = i_z // (HEADS // G), i_z % (HEADS // G)
    # a whole tile in every warp: what follows from all pairs needs no barrier
    j = gl.arange(0, 64, layout=gl.BlockedLayout([2], [32], [4], [0]))
    _, _, live, prefix, word = _pairs(p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile, j, G, M, LENGTH)
    q = gl.allocate_shared_memory(dtype, [2, M, DK // 2], SHARED)
    q_rest = gl.allocate_shared_memory(dtype, [M, DR], SHARED)
    k = gl.allocate_shared_memory(dtype, [2 * BUFFERS, N, DK // 2], SHARED)
    k_rest = gl.allocate_shared_memory(dtype, [BUFFERS, N, DR], SHARED)
    greatest, weights = gl.allocate_shared_memory(gl.float32, [2, M], PLAIN), gl.allocate_shared_memory(gl.float32, [2, M], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], PLAIN)
    free = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS + 2, 1], PLAIN)                            # the last two: weights are handed on
    for i in gl.static_range(2 * BUFFERS + 2):
        mbarrier.init(free.index(i), count=1)
        if i < 2 * BUFFERS:
            mbarrier.init(full.index(i), count=128)
    low = gl.min(gl.where(live, prefix, 2**30), 0)
    union, base, top, end, length = _span(prefix, word, p_base + i_b, j, gl.num_programs(1), N, LENGTH)
    start, stop = i_split * length, gl.minimum(i_split * length + length, end)
    if not SINGLE:
        if start >= stop:
            return
    tiles = gl.maximum((stop - start + N - 1) // N, 1)

    pairs = p_prefix, p_words, s_pb, s_pr, s_wb, s_wr, rows, i_b, i_tile
    shared = q, q_rest, k, k_rest, greatest, weights, full, free
    half = shared, pairs, base, start, end, low, tiles, scale, p_part, p_lse, i_split, i_kv, total
    source = shared, pairs, p_q, p_cache, p_table, p_path, base, start, stop, tiles, union, top, i_kv, s_slot, s_kv, s_table
    gl.warp_specialize([(_half, (half, 0, DV, SINGLE, PDL, HEADS, G, M, N, LENGTH)),
                        (_half, (half, 1, DV, SINGLE, PDL, HEADS, G, M, N, LENGTH)),
                        (_copies, (source, DK, DR, PAGE, HEADS, G, M, N, LENGTH))], [4, 4], [232, 40])


@gluon.jit
def _copies(source, DK: gl.constexpr, DR: gl.constexpr, PAGE: gl.constexpr, HEADS: gl.constexpr, G: gl.constexpr, M: gl.constexpr,
            N: gl.constexpr, LENGTH: gl.constexpr):
    """Queries, then every tile: the half that its owner multiplies, which is free first, then the other and the columns that are no values."""
    shared, pairs, p_q, p_cache, p_table, p_path, base, start, stop, tiles, union, top, i_kv, s_slot, s_kv, s_table = source
    q, q_rest, k, k_rest, _, _, full, free = shared
    rows, i_b, i_tile = pairs[6], pairs[7], pairs[8]
    BUFFERS: gl.constexpr = 128 // N
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    TILE: gl.constexpr = gl.SliceLayout(1, COPY)
    n, d, e = gl.arange(0, N, layout=TILE), gl.arange(0, DK // 2, layout=gl.SliceLayout(0, COPY)), gl.arange(0, DR, layout=gl.SliceLayout(0, COPY))
    p_table += i_b.to(gl.int64) * s_table
    p_cache += i_kv * s_kv
    if LENGTH:
        p_path += (i_b * rows + i_tile // ((G + M - 1) // M)) * 64
    entry, known = _entries(p_table, p_path, start, n, union, top, base, stop, s_slot, PAGE, LENGTH)
    row, head, live, _, _ = _pairs(*pairs, gl.arange(0, M, layout=TILE), G, M, LENGTH)
    p_row = p_q + ((i_b * rows + row).to(gl.int64) * HEADS + i_kv * G + head) * (DK + DR)
    for i in gl.static_range(2):
        copy(q.index(i), p_row[:, None] + (i * (DK // 2) + d)[None, :], mask=live[:, None])
    copy(q_rest, p_row[:, None] + (DK + e)[None, :], mask=live[:, None])
    for t in range(tiles):
        buffer, own, phase = t % BUFFERS, t % 2, (t // BUFFERS + 1) % 2
        p_entry = p_cache + entry
        mbarrier.wait(free.index(2 * buffer + own), phase)
        copy(k.index(2 * buffer + own), p_entry[:, None] + (own * (DK // 2) + d)[None, :], mask=known[:, None])
        async_copy.mbarrier_arrive(full.index(2 * buffer + own), increment_count=False)
        mbarrier.wait(free.index(2 * buffer + 1 - own), phase)
        copy(k_rest.index(buffer), p_entry[:, None] + (DK + e)[None, :], mask=known[:, None])
        copy(k.index(2 * buffer + 1 - own), p_entry[:, None] + ((1 - own) * (DK // 2) + d)[None, :], mask=known[:, None])
        async_copy.mbarrier_arrive(full.index(2 * buffer + 1 - own), increment_count=False)
        entry, known = _entries(p_table, p_path, start + (t + 1) * N, n, union, top, base, stop, s_slot, PAGE, LENGTH)


@gluon.jit
def _scores(shared, t, W: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """Issue the score product of an own tile."""
    q, q_rest, k, k_rest, _, _, full, _ = shared
    buffer, phase = t % (128 // N), t // (128 // N) % 2
    zero = t >> 30                                      # else the descriptors of q are kept over the loop, in more registers than there are
    score = warpgroup_mma_init(gl.full([M, N], 0.0, gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])))
    mbarrier.wait(full.index(2 * buffer + W), phase)
    score = warpgroup_mma(q.index(W + zero), k.index(2 * buffer + W).permute([1, 0]), score, use_acc=False, is_async=True)
    mbarrier.wait(full.index(2 * buffer + 1 - W), phase)
    score = warpgroup_mma(q_rest, k_rest.index(buffer).permute([1, 0]), score, is_async=True)
    return warpgroup_mma(q.index(1 - W + zero), k.index(2 * buffer + 1 - W).permute([1, 0]), score, is_async=True)


@gluon.jit
def _handed(k_rest, t, M: gl.constexpr, N: gl.constexpr):
    """Where a tile's weights lie, once its scores are known."""
    return reinterpret(k_rest.index(t % (128 // N)), k_rest.dtype, [M, N], gl.NVMMASharedLayout(2 * N, 16, 2))


@gluon.jit
def _softmax(score, highest, weight, shared, seen, t, W: gl.constexpr, M: gl.constexpr, N: gl.constexpr, LENGTH: gl.constexpr):
    """Of an own tile: weights in 16 bits, what fades the sums so far, greatest score and denominator."""
    word, prefix, base, start, end, low, scale = seen
    column, at = gl.arange(0, N, layout=gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))), start + t * N
    if LENGTH:
        score = gl.where((at + column < end)[None, :], score, float("-inf"))
    elif at + N > low:
        visible = (_seen(word, prefix, base, at)[:, None] >> column.to(gl.uint64)[None, :]) & 1
        score = gl.where(visible != 0, score, float("-inf"))
    higher = gl.maximum(highest, gl.max(score, 1) * scale)
    p, fade = gl.exp2(score * scale - higher[:, None]), gl.exp2(highest - higher)
    weight = weight * fade + gl.sum(p, 1)
    return p.to(shared[3].dtype), fade, higher, weight


@gluon.jit
def _hand(p, higher, weight, shared, t, W: gl.constexpr, M: gl.constexpr, N: gl.constexpr):
    """A tile's weights, greatest score and denominator to the other warpgroup."""
    barrier()                                           # every warp has its scores: the keys they came from may go
    _handed(shared[3], t, M, N).store(p)
    shared[4].index(W).store(higher)
    shared[5].index(W).store(weight)
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared[7].index(2 * (128 // N) + W))


@gluon.jit
def _neighbour(acc, highest, shared, t, W: gl.constexpr, M: gl.constexpr, N: gl.constexpr, ROW: gl.constexpr, OUT: gl.constexpr):
    """Issue the value product of a tile whose weights the other warpgroup hands on."""
    mbarrier.wait(shared[7].index(2 * (128 // N) + 1 - W), t // 2 % 2)
    higher, weight = shared[4].index(1 - W).load(ROW), shared[5].index(1 - W).load(ROW)
    acc = acc * gl.convert_layout(gl.exp2(highest - higher), gl.SliceLayout(1, OUT))[:, None]
    return warpgroup_mma(_handed(shared[3], t, M, N), shared[2].index(t % (128 // N) * 2 + W), acc, is_async=True), higher, weight


@gluon.jit
def _done(acc, shared, t, W: gl.constexpr, N: gl.constexpr):
    """Wait for a value product; its half of the buffer is free."""
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(shared[7].index(t % (128 // N) * 2 + W))
    return acc


@gluon.jit
def _half(half, W: gl.constexpr, DV: gl.constexpr, SINGLE: gl.constexpr, PDL: gl.constexpr, HEADS: gl.constexpr, G: gl.constexpr,
          M: gl.constexpr, N: gl.constexpr, LENGTH: gl.constexpr):
    """Warpgroup W: half W of the sum of values."""
    shared, pairs, base, start, end, low, tiles, scale, p_part, p_lse, i_split, i_kv, total = half
    ROW: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16]))
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV // 2, 16])
    _, _, _, prefix, word = _pairs(*pairs, gl.arange(0, M, layout=ROW), G, M, LENGTH)
    seen = word, prefix, base, start, end, low, scale
    highest, weight = gl.full([M], -1e30, gl.float32, ROW), gl.full([M], 0.0, gl.float32, ROW)
    # not plain zeros: ptxas would wait for the scores before the first factor
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma_init(gl.full([M, DV // 2], 0.0, gl.float32, OUT))])
    for t in range(W, tiles, 2):
        score = _scores(shared, t, W, M, N)
        if W == 1:
            acc, highest, weight = _neighbour(acc, highest, shared, t - 1, W, M, N, ROW, OUT)
        score = warpgroup_mma_wait(W, deps=[score])
        p, fade, highest, weight = _softmax(score, highest, weight, shared, seen, t, W, M, N, LENGTH)
        if W == 1:
            acc = _done(acc, shared, t - 1, W, N)
        _hand(p, highest, weight, shared, t, W, M, N)
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUT))[:, None]
        acc = warpgroup_mma(gl.convert_layout(p, gl.DotOperandLayout(0, OUT, 2)), shared[2].index(t % (128 // N) * 2 + W), acc, is_async=True)
        acc = _done(acc, shared, t, W, N)
        if W == 0:
            if t + 1 < tiles:
                acc, highest, weight = _neighbour(acc, highest, shared, t + 1, W, M, N, ROW, OUT)
                acc = _done(acc, shared, t + 1, W, N)
    if W * tiles % 2 == 1:
        acc, highest, weight = _neighbour(acc, highest, shared, tiles - 1, W, M, N, ROW, OUT)
        acc = warpgroup_mma_wait(0, deps=[acc])
    if PDL == 2:
        gdc_launch_dependents()

    m, v = gl.arange(0, M, layout=gl.SliceLayout(1, OUT)), W * (DV // 2) + gl.arange(0, DV // 2, layout=gl.SliceLayout(0, OUT))
    row, head, live, _, _ = _pairs(*pairs, m, G, M, LENGTH)
    i = (pairs[7] * pairs[6] + row).to(gl.int64) * HEADS + i_kv * G + head
    weight, highest = gl.convert_layout(weight, gl.SliceLayout(1, OUT)), gl.convert_layout(highest, gl.SliceLayout(1, OUT))
    acc = acc * gl.where(weight > 0, 1 / weight, 0.0)[:, None]
    if not SINGLE:
        i += i_split.to(gl.int64) * total
        if W == 0:
            gl.store(p_lse + i, gl.where(weight > 0, highest + gl.log2(weight), float("-inf")), mask=live)
    gl.store(p_part + i[:, None] * DV + v[None, :], acc.to(p_part.dtype.element_ty), mask=live[:, None])
