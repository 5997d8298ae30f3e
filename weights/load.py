"""Filling a model's parameters from a checkpoint whose account is complete."""

from typing import Callable

import torch

from minispec.config import TargetConfig
from minispec.errors import MinispecError
from minispec.weights.account import Piece, Plan, Report, account, rename
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.names import skip_target, strip_target, target_table
from minispec.weights.quant import dequantize_fp8, unpack_int4

__all__ = ["Plan", "Report", "fill", "load_target", "open_target"]


def open_target(folder: str, config: TargetConfig) -> Plan:
    """The account of a target's checkpoint, from headers alone. MinispecError names the first tensor that does not fit."""
    checkpoint = Checkpoint.open(folder)
    names = rename(checkpoint, lambda name: strip_target(name, config))
    mtp = {name.split(".")[2] for name in names if name.startswith("model.layers.") and ".eh_proj." in name}
    others = {file: f"skipped: {why}" for name, file in names.items() if (why := skip_target(name, config, mtp))}
    if config.tie_word_embeddings and "lm_head.weight" in names:
        others[names["lm_head.weight"]] = "skipped: tied to the embedding, which it equals"
        _check_tied(checkpoint, names["lm_head.weight"], names.get("model.embed_tokens.weight"))
    _check_count(checkpoint, config)
    return account(checkpoint, target_table(config), names, others, config.quantization, config.prefix, list(config.notes))


def load_target(folder: str, config: TargetConfig, parameters: dict[str, torch.Tensor],
                progress: Callable[[int, int], None] | None = None) -> Report:
    """Fill `parameters` (names and shapes of names.target_table; any float dtype and device) in place from `folder`."""
    return fill(open_target(folder, config), parameters, progress)


def _check_tied(checkpoint: Checkpoint, head: str, embed: str | None) -> None:
    if embed is None or not torch.equal(checkpoint.read(head), checkpoint.read(embed)):
        raise MinispecError(f"{checkpoint.tensors[head].file}: tensor {head} is present and differs from the embedding, but "
                            "tie_word_embeddings is true; set it to false in config.json, or remove the tensor")


def _check_count(checkpoint: Checkpoint, config: TargetConfig) -> None:
    """Absurd counts end here, before a table of that length is built."""
    present = len(checkpoint.tensors)
    for name, count in (("num_hidden_layers", config.num_hidden_layers), ("n_routed_experts", config.n_routed_experts)):
        if count > present:
            raise MinispecError(f"{checkpoint.folder}: {name} is {count} in config.json, but the checkpoint holds {present} "
                                "tensors in all; take the config.json that belongs to the weights")
    needed = config.n_routed_experts * sum(config.is_moe(i) for i in range(config.num_hidden_layers))
    if needed > present:
        raise MinispecError(f"{checkpoint.folder}: {needed} experts are described by config.json, but the checkpoint holds "
                            f"{present} tensors in all; take the config.json that belongs to the weights")


def fill(plan: Plan, parameters: dict[str, torch.Tensor], progress: Callable[[int, int], None] | None = None) -> Report:
    """Copy every piece into its place, one tensor at a time, dequantised in fp32 and cast on the copy.

    `parameters` must have exactly the names and shapes of `plan.shapes`. progress(done, total) counts pieces.
    """
    if set(parameters) != set(plan.shapes):
        raise MinispecError(f"parameters {sorted(set(parameters) ^ set(plan.shapes))} are on one side only; allocate plan.shapes")
    for name, shape in plan.shapes.items():
        if tuple(parameters[name].shape) != tuple(shape):
            raise MinispecError(f"parameter {name} has shape {list(parameters[name].shape)}, the checkpoint fills {list(shape)}")
    with torch.no_grad():
        for done, piece in enumerate(plan.pieces):
            region = parameters[piece.entry.param][piece.entry.index]
            weight = _weight(plan, piece)
            region.copy_(weight.reshape(region.shape))
            if not torch.isfinite(region).all():
                where = f"{plan.checkpoint.tensors[piece.sources[0]].file}: tensor {piece.sources[0]}"
                if torch.isfinite(weight).all():
                    raise MinispecError(f"{where} exceeds the range of {region.dtype}; choose another dtype")
                raise MinispecError(f"{where} holds NaN or infinity; download the file again")
            if progress:
                progress(done + 1, len(plan.pieces))
    plan.checkpoint.close()
    return plan.report


def _weight(plan: Plan, piece: Piece) -> torch.Tensor:
    stored = [plan.checkpoint.read(name) for name in piece.sources]
    if piece.kind == "int4":
        return unpack_int4(*stored, plan.quantization.group)
    if piece.kind == "fp8":
        return dequantize_fp8(*stored, plan.quantization.block)
    return stored[0]
