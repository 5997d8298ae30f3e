"""Triton code of kernels/moe.py: products with experts' matrices in any stored form, for all rows or for sorted blocks of them.

What bounds it is reading the weights. A warp of a program takes its own part of K (the leading axis of the dots), so that a short K
and few output rows still put enough warps to work, and sums meet in a fixed order without atomics.
"""
from minispec.kernels.jit import follow, jit, tl


@jit
def _int4(w, s):
    """Units and their scales, two a register, -> four bf16 tensors of w / 2^24. The bits of a nibble q + 8 alone are the bf16
    (q + 8) / 2^133, or four places higher (q + 8) / 2^129, where exponent 1 goes on from the subnormals: a mask and one
    multiply-add make w, rounded once."""
    return tl.inline_asm_elementwise("""{
        .reg .b32 t, u, low, high, offset, a, b, c, zero;
        mov.b32 a, 0x76007600; mov.b32 b, 0x74007400; mov.b32 c, 0xB500B500; mov.b32 zero, 0x80008000;     // 2^109, 2^105, -2^-21, -0
        fma.rn.bf16x2 low, $5, a, zero; fma.rn.bf16x2 high, $5, b, zero; fma.rn.bf16x2 offset, $5, c, zero;
        shr.u32 u, $4, 8;
        and.b32 t, $4, 0x000F000F; fma.rn.bf16x2 $0, t, low, offset;
        and.b32 t, $4, 0x00F000F0; fma.rn.bf16x2 $1, t, high, offset;
        and.b32 t, u, 0x000F000F; fma.rn.bf16x2 $2, t, low, offset;
        and.b32 t, u, 0x00F000F0; fma.rn.bf16x2 $3, t, high, offset;
        }""", "=&r,=&r,=&r,=&r,r,r", [w, s], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)


@jit
def _fp8(w):
    """e4m3 -> bf16: the same bits four places lower are 2^-120 of the value, subnormals too."""
    return tl.inline_asm_elementwise("""{
        .reg .b32 t, u, c, zero;
        mov.b32 c, 0x7B807B80; mov.b32 zero, 0x80008000;
        prmt.b32 t, $2, 0, 0x1404; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; lop3.b32 u, t, 0x80008000, u, 0xEA;
        fma.rn.bf16x2 $0, u, c, zero;
        prmt.b32 t, $2, 0, 0x3424; shr.u32 u, t, 4; and.b32 u, u, 0x07F007F0; lop3.b32 u, t, 0x80008000, u, 0xEA;
        fma.rn.bf16x2 $1, u, c, zero;
        }""", "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4)


@jit
def _matrix(p_w, p_s, e, i_n, i_tile, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr, BK: tl.constexpr, KIND: tl.constexpr):
    """Pointers to input 0 of rows i_n of expert e's matrix [N, K], and of their scales; i_tile: the rows' fp8 tiles, of TILES."""
    e = e.to(tl.int64)
    if KIND == "int4":
        BLOCKS: tl.constexpr = (K + BK - 1) // BK
        p_w += e * (BLOCKS * N * (BK // 4)) + i_n[None, :, None] * (BK // 4)
        p_s += e * (BLOCKS * N * (BK // 32)) + i_n[None, :, None] * (BK // 32)
    else:
        p_w += e * (N * K) + i_n[None, :, None] * K
    if KIND == "fp8":
        p_s += e * (TILES * ((K + 127) // 128)) + i_tile[None, :, None] * ((K + 127) // 128)
    return p_w, p_s


@jit
def _multiply(acc, p_w, p_s, p_x, k, seen, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
              KIND: tl.constexpr, ASM: tl.constexpr, DOT: tl.constexpr):
    """acc [SPLIT, BN, BM] += w x over the inputs k .. k + SPLIT * BK. Pointers stand at input 0: p_w [1, BN, 1], p_x [1, 1, BM];
    seen bool [BM] says where x may be read."""
    EVEN: tl.constexpr = K % (SPLIT * BK) == 0
    if KIND == "int4":
        i_block, i_u = k // BK + tl.arange(0, SPLIT), tl.arange(0, BK // 4)
        live = ((i_block < (K + BK - 1) // BK) | EVEN)[:, None, None]
        w = tl.load(p_w + (i_block[:, None] * (N * (BK // 4)) + i_u[None, :])[:, None, :], mask=live, other=0)
        s = tl.load(p_s + (i_block[:, None] * (N * (BK // 32)) + tl.arange(0, BK // 32)[None, :])[:, None, :], mask=live, other=0.0)
        s = tl.reshape(tl.broadcast_to(s[:, :, :, None], (SPLIT, BN, BK // 32, 8)), (SPLIT, BN, BK // 4))
        i_x = i_block[:, None] * BK + (i_u // 8 * 32 + i_u % 8)[None, :]
        seen = ((i_x < K) | EVEN)[:, :, None] & seen[None, None, :]
        p_x += i_x[:, :, None]
        if ASM:
            four = _int4(w, s)
        for j in tl.static_range(4):
            one = four[j] if ASM else (((w.to(tl.int32) >> 4 * j & 15) - 8) * s.to(tl.float32)).to(DOT)
            acc = tl.dot(one, tl.load(p_x + 8 * j, mask=seen, other=0.0).to(DOT), acc, input_precision="ieee")
    else:
        i_k = k + tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]
        live = (i_k < K) | EVEN
        w = tl.load(p_w + i_k[:, None, :], mask=live[:, None, :], other=0.0)
        x = tl.load(p_x + i_k[:, :, None], mask=live[:, :, None] & seen[None, None, :], other=0.0).to(DOT)
        if KIND == "fp8":
            i_tile = k + tl.arange(0, SPLIT) * BK
            s = tl.load(p_s + (i_tile // 128)[:, None, None], mask=(i_tile < K)[:, None, None], other=0.0)          # [SPLIT, BN, 1]
            acc += tl.dot(_fp8(w) if ASM else w.to(DOT), x, input_precision="ieee") * s
        else:
            acc = tl.dot(w.to(DOT), x, acc, input_precision="ieee")
    return acc


@jit
def _block(p_start, i_block, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """The i_block-th block of BM sorted pairs -> its expert (-1 past the last), first pair, and the end of the expert's pairs."""
    i_e = tl.arange(0, EP)
    count = tl.load(p_start + i_e + 1, mask=i_e < E, other=0) - tl.load(p_start + i_e, mask=i_e < E, other=0)
    blocks = (count + BM - 1) // BM
    e = tl.sum((tl.cumsum(blocks, 0) <= i_block).to(tl.int32), 0)
    before = tl.sum(tl.where(i_e < e, blocks, 0), 0)
    e = tl.where(i_block < tl.sum(blocks, 0), e, -1)
    at = tl.maximum(e, 0)
    return e, tl.load(p_start + at) + (i_block - before) * BM, tl.load(p_start + at + 1)


@jit
def _active(p_ids, slot, rows, E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, P: tl.constexpr):
    """The slot-th of the active experts in ascending order, -1 past the last, and how many there are."""
    i_p = tl.arange(0, P)
    ids = tl.load(p_ids + i_p, mask=i_p < rows * TOPK, other=E).to(tl.int32)
    if E < 64:      # a bit each
        i_e, bits = tl.arange(0, EP), tl.reduce_or(tl.full([P], 1, tl.int64) << ids.to(tl.int64), 0)
        first = ((bits >> i_e.to(tl.int64)) & 1).to(tl.int32) * (i_e < E)
        return tl.max(tl.where((first > 0) & (tl.cumsum(first, 0) == slot + 1), i_e, -1), 0), tl.sum(first, 0)
    again = tl.max(((ids[:, None] == ids[None, :]) & (i_p[:, None] < i_p[None, :])).to(tl.int32), 0)
    first = (again == 0) & (ids < E)
    rank = tl.sum((first[None, :] & (ids[None, :] < ids[:, None])).to(tl.int32), 1)
    return tl.max(tl.where((rank == slot) & (ids < E), ids, -1), 0), tl.sum(first.to(tl.int32), 0)


@jit
def _share(p_ids, p_weights, e, i_m, valid, TOPK: tl.constexpr, KP: tl.constexpr):
    """Of each row: whether it takes expert e, int32, and with what weight."""
    i_k = tl.arange(0, KP)
    at, live = i_m[:, None] * TOPK + i_k[None, :], valid[:, None] & (i_k < TOPK)[None, :]
    chosen = tl.load(p_ids + at, mask=live, other=-2).to(tl.int32) == e
    return tl.max(chosen.to(tl.int32), 1), tl.sum(tl.where(chosen, tl.load(p_weights + at, mask=live, other=0.0), 0.0), 1)


@jit
def active_list(p_ids, p_weights, p_active, p_dense, rows, E: tl.constexpr, EP: tl.constexpr, TOPK: tl.constexpr, KP: tl.constexpr,
                P: tl.constexpr, ROWS: tl.constexpr):
    """active[slot] = e | the rows that take it as bits << 16, for the active experts e in ascending order, -1 past the last; active[-1]
    how many there are; dense [slot, ROWS] the expert's weight in each row."""
    slot, i_m = tl.program_id(0), tl.arange(0, ROWS)
    e, count = _active(p_ids, slot, rows, E, EP, TOPK, P)
    taken, weight = _share(p_ids, p_weights, e, i_m, i_m < rows, TOPK, KP)
    tl.store(p_dense + slot * ROWS + i_m, weight)
    tl.store(p_active + slot, e | (tl.sum(taken << i_m, 0) << 16))
    tl.store(p_active + tl.num_programs(0), count)


@jit
def up(p_x, p_ids, p_weights, p_w, p_s, p_h, p_active, p_start, p_order, rows, slots, TOPK: tl.constexpr, KP: tl.constexpr, P: tl.constexpr,
       LIST: tl.constexpr, PDL: tl.constexpr, ROWS: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
       E: tl.constexpr, EP: tl.constexpr, SORTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
       SPLIT: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, DOT: tl.constexpr, UNIT: tl.constexpr):
    """h = weight * silu(gate x) * up x, BN / 2 columns of it for one expert. Few rows: h [slot, row, I] of BM of the rows that take it;
    sorted: h [pair, I]. LIST: it makes active_list's list itself, and for `down` to read."""
    follow(PDL, False)
    TILES: tl.constexpr = (I + BN // 2 - 1) // (BN // 2)
    slot, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    i_m = tl.arange(0, BM)
    if SORTED:
        e, first, end = _block(p_start, slot, E, EP, BM)
        if e < 0:
            return
        valid = first + i_m < end
        pair = tl.load(p_order + first + i_m, mask=valid, other=0)
        i_row, i_out = pair // TOPK, first + i_m
        weight = tl.load(p_weights + pair, mask=valid, other=0.0)
    else:
        first, slot, i_all = slot // slots * BM, slot % slots, tl.arange(0, ROWS)
        if LIST:
            e, count = _active(p_ids, slot, rows, E, EP, TOPK, P)
            taken, _ = _share(p_ids, p_weights, e, i_all, i_all < rows, TOPK, KP)
            word = e | (tl.sum(taken << i_all, 0) << 16)
            if (tile == 0) & (first == 0):
                tl.store(p_active + slot, word)
                tl.store(p_active + slots, count)
        else:
            word = tl.load(p_active + slot)
            e, taken = word & 0xFFFF, (word >> 16 >> i_all) & 1
        if (word == -1) | (first >= tl.sum(taken, 0)):
            return
        here = (taken > 0)[None, :] & (tl.cumsum(taken, 0)[None, :] == (first + 1 + i_m)[:, None])      # [BM, ROWS]
        valid, i_row = tl.max(here.to(tl.int32), 1) > 0, tl.sum(tl.where(here, i_all[None, :], 0), 1)
        i_out = slot * rows + i_row
        if LIST:
            _, weight = _share(p_ids, p_weights, e, i_row, valid, TOPK, KP)
        else:
            weight = tl.load(p_weights + slot * ROWS + i_row, mask=valid, other=0.0)
    # rows of a tile: 8 of gate, 8 of up in turns, so that both halves of a product lie in the same threads
    i_n = tl.arange(0, BN)
    is_up = i_n // 8 % 2
    i_j = tl.minimum(tile * (BN // 2) + i_n // 16 * 8 + i_n % 8, I - 1)
    p_w, p_s = _matrix(p_w, p_s, e, i_j + is_up * I, i_j // 128 + is_up * ((I + 127) // 128), 2 * I, H, 2 * ((I + 127) // 128), BK, KIND)
    p_rows = p_x + i_row[None, None, :].to(tl.int64) * H
    acc = tl.zeros((SPLIT, BN, BM), tl.float32)
    for k in range(0, H, SPLIT * BK):
        acc = _multiply(acc, p_w, p_s, p_rows, k, valid, 2 * I, H, BN, BK, SPLIT, KIND, ASM, DOT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    both = tl.permute(tl.reshape(tl.sum(acc, 0) * UNIT, (BN // 16, 2, 8, BM)), (0, 2, 3, 1))
    gate, up = tl.split(both)
    h = gate / (1 + tl.exp(-gate)) * up * weight[None, None, :]
    i_j = tile * (BN // 2) + tl.arange(0, BN // 16)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
    tl.store(p_h + i_out[None, None, :].to(tl.int64) * I + i_j, h.to(p_h.dtype.element_ty), mask=valid[None, None, :] & (i_j < I))


@jit
def down(p_h, p_w, p_s, p_inner, p_shared, p_base, p_out, p_active, p_start, rows, slots, SHARED: tl.constexpr, BASE: tl.constexpr,
         PARTS: tl.constexpr, PDL: tl.constexpr, H: tl.constexpr, I: tl.constexpr,
         E: tl.constexpr, EP: tl.constexpr, SORTED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         SPLIT: tl.constexpr, KIND: tl.constexpr, ASM: tl.constexpr, DOT: tl.constexpr, UNIT: tl.constexpr):
    """BN columns of the output. Few rows: the sum over all active experts, ascending, of one of PARTS ranges of I; sorted: one expert's
    part for its pairs. SHARED > 0: plus the shared expert's inner [rows, SHARED] by its matrix [H, SHARED], which is asked for early."""
    TILES: tl.constexpr = (H + BN - 1) // BN
    BLOCKS: tl.constexpr = (I + SPLIT * BK - 1) // (SPLIT * BK) // PARTS
    part = tl.program_id(0) // TILES
    i_m, i_n = tl.arange(0, BM), tl.program_id(0) % TILES * BN + tl.arange(0, BN)
    clamped, i_k = tl.minimum(i_n, H - 1), tl.arange(0, SPLIT)[:, None] * BK + tl.arange(0, BK)[None, :]
    if SHARED:
        w_shared = tl.load(p_shared + clamped.to(tl.int64)[None, :, None] * SHARED + i_k[:, None, :], mask=(i_k < SHARED)[:, None, :], other=0.0)
    follow(PDL)
    if SORTED:
        word, first, end = _block(p_start, part, E, EP, BM)
        if word < 0:
            return
        i_out, steps, k = first + i_m, BLOCKS, 0
        i_h, valid = i_out, i_out < end
    else:
        word, steps, k = tl.load(p_active), tl.load(p_active + slots) * BLOCKS, part * BLOCKS
        i_out, i_h, valid = part * rows + i_m, i_m, i_m < rows
    mask, at = (i_n < H)[:, None] & valid[None, :], i_out[None, :].to(tl.int64) * H + i_n[:, None]
    if SHARED:
        inner = tl.load(p_inner + i_m[None, None, :].to(tl.int64) * SHARED + i_k[:, :, None],
                        mask=(i_k < SHARED)[:, :, None] & valid[None, None, :], other=0.0)
    if BASE:
        base = tl.load(p_base + at, mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros((SPLIT, BN, BM), tl.float32)
    for step in range(0, steps):
        p_we, p_se = _matrix(p_w, p_s, word & 0xFFFF, clamped, clamped // 128, H, I, (H + 127) // 128, BK, KIND)
        p_rows = p_h + (step // BLOCKS * rows + i_h)[None, None, :].to(tl.int64) * I
        seen = valid if SORTED else (word >> 16 >> i_m & 1) != 0
        acc = _multiply(acc, p_we, p_se, p_rows, (k + step % BLOCKS) * (SPLIT * BK), seen, H, I, BN, BK, SPLIT, KIND, ASM, DOT)
        if not SORTED:      # a round ahead: a load that waits for another is not prefetched far
            word = tl.load(p_active + (step + 1) // BLOCKS)
    out = tl.sum(acc, 0) * UNIT
    if SHARED:
        out += tl.sum(tl.dot(w_shared.to(DOT), inner.to(DOT), input_precision="ieee"), 0)
    if BASE:
        out += base
    tl.store(p_out + at, out.to(p_out.dtype.element_ty), mask=mask)
