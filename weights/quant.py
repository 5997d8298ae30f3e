"""Stored forms of a Linear weight and the fp32 matrix that each of them means (DeepSeek-V3's README_WEIGHTS; compressed-tensors pack-quantized)."""
import torch
import torch.nn.functional as F


def unpack_int4(packed: torch.Tensor, scale: torch.Tensor, group: int = 32) -> torch.Tensor:
    """fp32 [out, in] from int32 `packed` [out, in / 8] and float `scale` [out, in / group].

    Input 8c + i of a row sits in bits 4i..4i+3 of word c, stored as q + 8 with q in -8..7; the weight is q * scale, the
    product taken in fp32 (compressed-tensors' pack-quantized, symmetric).
    """
    out, words = packed.shape
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    quants = ((packed.unsqueeze(-1) >> shifts) & 15) - 8                       # [out, in / 8, 8]
    groups = quants.view(out, words * 8 // group, group).to(torch.float32)
    return (groups * scale.to(torch.float32).unsqueeze(-1)).view(out, words * 8)


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (128, 128),
                   start: tuple[int, int] = (0, 0)) -> torch.Tensor:
    """fp32 [out, in] from float8 `weight` and `scale` [ceil(out / rows), ceil(in / columns)]; edge tiles are cut, and `start` is where in
    the first tile the weight begins.

    `scale` multiplies, although checkpoints call it weight_scale_inv.
    """
    out, columns = weight.shape
    tiles = scale.to(torch.float32).repeat_interleave(block[0], 0)[start[0]:start[0] + out]
    tiles = tiles.repeat_interleave(block[1], 1)[:, start[1]:start[1] + columns]
    return weight.to(torch.float32) * tiles


def repack_int4(packed: torch.Tensor, scale: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 `packed` [out, in / 8] and `scale` [out, in / 32] as kernels/moe.py stores them, in blocks of `block` inputs: the same nibbles
    as int16 units [ceil(in / block), out, block / 4], in another order within each 32 inputs, and [ceil(in / block), out, block / 32]."""
    steps = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.view(packed.shape[0], -1, 1, 4) >> steps[:, None]) & 15                          # [out, group, r, j]
    units = (nibbles << steps[:4]).sum(-1, dtype=torch.int32)
    units = torch.where(units >= 2**15, units - 2**16, units).to(torch.int16)                          # [out, group, r]
    groups = -(-scale.shape[1] * 32 // block) * (block // 32)
    units, scale = F.pad(units, (0, 0, 0, groups - units.shape[1])), F.pad(scale, (0, groups - scale.shape[1]))
    return units.view(len(units), -1, block // 4).transpose(0, 1), scale.view(len(units), -1, block // 32).transpose(0, 1)
