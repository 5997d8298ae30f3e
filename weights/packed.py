"""Routed experts left in their stored form, for kernels/moe.py to read: INT4 groups or FP8 tiles instead of the fp32 they mean."""
from dataclasses import replace

import torch

from minispec.weights.quant import repack_int4

_DTYPES = {"int4": (torch.int16, torch.bfloat16), "fp8": (torch.float8_e4m3fn, torch.float32)}
_BLOCK = 128


def keep_packed(plan):
    """The weights.load.Plan with each layer's w13 and w2 as values in `plan.dtypes`' dtype and a parameter `..._scale` beside each.

    A layer whose experts are not all stored alike, or otherwise than the kernels read, stays as it is: dequantised.
    """
    quantization, forms = plan.quantization, {}
    for entry, kind, sources in plan.pieces:
        layer, _, name = entry.param.rpartition(".")
        if name in ("w13", "w2"):
            fits = (kind == "int4" and plan.checkpoint.tensors[sources[1]].dtype == "BF16" and quantization.group % 32 == 0 or
                    kind == "fp8" and quantization.block == (128, 128))
            forms.setdefault(layer, set()).add(kind if fits else None)
    kept = {layer: kind for layer, (kind, *others) in forms.items() if kind and not others}
    shapes, dtypes = dict(plan.shapes), {}
    for layer, kind in kept.items():
        for name, parts in (("w13", 2), ("w2", 1)):
            param = f"{layer}.{name}"
            experts, rows, columns = shapes[param]
            if kind == "int4":
                block = 64 if columns % 128 else 128
                for name, inputs in ((param, 4), (param + "_scale", 32)):
                    shapes[name] = experts, -(-columns // block), rows, block // inputs
            else:
                shapes[param + "_scale"] = (experts, parts * -(-rows // parts // _BLOCK), -(-columns // _BLOCK))
            dtypes[param], dtypes[param + "_scale"] = _DTYPES[kind]
    if dtypes:
        stored = " and ".join(sorted({kind.upper() for kind in kept.values()}))
        plan.report.lines.append(f"routed experts of {len(kept)} layers stay in {stored}")
    return replace(plan, shapes=shapes, dtypes=dtypes)


def store(plan, entry, kind: str, sources: tuple, values: torch.Tensor, scale: torch.Tensor, parameters: dict[str, torch.Tensor]) -> None:
    """Put one stored weight in its place. A w13 gate or up half takes its own range of scale tiles."""
    target, scales, index = parameters[entry.param], parameters[entry.param + "_scale"], entry.index
    values, scale = values.to(target.device), scale.to(scales.device)
    finite = scale.isfinite().all()
    expert, *rows = index
    if kind == "int4":
        at = expert, slice(None), *rows
        target[at], scales[at] = repack_int4(values, scale.repeat_interleave(plan.quantization.group // 32, 1), 4 * target.shape[-1])
    else:
        target[index] = values
        part = rows[0].start // values.shape[0] if rows else 0
        scales[expert, part * len(scale):(part + 1) * len(scale)] = scale.to(torch.float32)
        finite &= values.float().isfinite().all()
    if not finite:
        raise plan.checkpoint.refuse(sources[0], "or its scale holds NaN or infinity; download the file again")
