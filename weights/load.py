"""From a checkpoint to parameters: the account of every tensor and every parameter, then the filling."""
import difflib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

import torch

from minispec.config import Quantization, TargetConfig
from minispec.errors import MinispecError
from minispec.fields import refuse_first
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.names import Dim, Entry, Table, skip_target, strip_target, target_table
from minispec.weights.packed import store
from minispec.weights.quant import dequantize_fp8, unpack_int4

DEFAULT = Path(__file__).parent / "default"      # the pair that comes with minispec, and its prompts
_FLOATS = ("F32", "BF16", "F16", "F64")
_COMPANIONS = ("_packed", "_scale", "_scale_inv", "_shape", "_zero_point", "_g_idx")
_CONFIG = "take the config.json that belongs to the weights"


@dataclass
class Report:
    """`lines`: what was assumed and done, for people. `tensors`: file tensor -> "consumed by ..." or "skipped: ...".

    `bytes` counts the consumed tensors as stored.
    """
    lines: list[str] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


@dataclass
class Plan:
    """A checkpoint whose account is complete and whose weights are not read yet.

    `shapes`: parameters to allocate. `pieces`: entries of the table, each with how it is stored, "plain", "fp8" or "int4", and
    the file tensors that hold it (the weight, then its scale). `dtypes`: of the parameters that stay as stored (`keep_packed`).
    `replicated`: those that every rank holds alike (`shard`).
    """
    checkpoint: Checkpoint
    shapes: dict[str, tuple[int, ...]]
    pieces: list[tuple[Entry, str, tuple[str, ...]]]
    quantization: Quantization | None
    report: Report
    dtypes: dict[str, torch.dtype] = field(default_factory=dict, kw_only=True)
    replicated: frozenset[str] = field(default=frozenset(), kw_only=True)


def rename(checkpoint: Checkpoint, canonical: Callable[[str], str]) -> dict[str, str]:
    """Canonical name -> name in the file. MinispecError where two tensors of the file mean the same."""
    names: dict[str, str] = {}
    for file_name in checkpoint.tensors:
        other = names.setdefault(canonical(file_name), file_name)
        if other != file_name:
            raise checkpoint.refuse(file_name, f"and {other} name the same parameter; remove one of the two")
    return names


def account(checkpoint: Checkpoint, table: Table, names: dict[str, str], others: dict[str, str],
            quantization: Quantization | None, prefix: str = "", notes: tuple[str, ...] = ()) -> Plan:
    """Match both sides completely. names: canonical -> file name; others: file name -> "skipped: ..." or its use elsewhere."""
    found = [(entry, *_stored(checkpoint, entry, names, quantization)) for entry in table.entries]
    missing, pieces = [entry.source for entry, kind, _ in found if not kind], [piece for piece in found if piece[1]]
    states: dict[str, str] = {}
    for entry, kind, sources in pieces:
        for source in sources:
            states[source] = f"{states[source]}, {entry.param}" if source in states else f"consumed by {entry.param}"
        if kind == "int4" and entry.source + "_shape" in names:
            states[names[entry.source + "_shape"]] = "skipped: repeats the shape of the packed weight"
    read = sum(checkpoint.tensors[name].bytes for name, state in states.items() if state.startswith("consumed"))
    states |= {name: state for name, state in others.items() if name not in states}
    if unknown := [name for name in names.values() if name not in states]:
        raise _unknown(checkpoint, unknown, missing, table, prefix)
    if missing:
        near = _nearest(prefix + missing[0], list(checkpoint.tensors)) or "none"
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise MinispecError(f"{checkpoint.folder}: tensor {prefix}{missing[0]}{more} is missing; the nearest name present is "
                            f"{near}; download the complete checkpoint, or {_CONFIG}")
    stored = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for _, kind, _ in pieces).items())
    lines = [*notes, *checkpoint.notes, f"{checkpoint.folder}: {read / 1e6:.1f} MB of weights read ({stored})"]
    for reason, count in Counter(state for state in states.values() if state.startswith("skipped: ")).items():
        lines.append(f"{count} tensors {reason} (first: {next(name for name in states if states[name] == reason)})")
    return Plan(checkpoint, table.shapes, pieces, quantization, Report(lines, states, read))


def _stored(checkpoint: Checkpoint, entry: Entry, names: dict[str, str],
            quantization: Quantization | None) -> tuple[str, tuple[str, ...]]:
    """How the file stores one entry and the tensors that hold it, shapes and dtypes checked; "" when it has no such tensor."""
    plain, packed, scale, tiles = (names.get(entry.source + end) for end in ("", "_packed", "_scale", "_scale_inv"))
    found = plain or packed
    if found is None:
        return "", ()
    module, dtype = entry.source.removesuffix(".weight"), checkpoint.tensors[found].dtype
    aliases = (found.removesuffix("_packed").removesuffix(".weight"), module, module.removeprefix("model."))
    covered = quantization.kind if entry.linear and quantization and quantization.covers(aliases) else ""
    fp8 = plain and dtype == "F8_E4M3"
    refuse_first(
        f"{checkpoint.tensors[found].file}: tensor {found}",
        (plain and packed, f"is stored both plain and packed ({packed}); remove one of the two"),
        (packed and covered != "int4", "is packed INT4, but " + ("quantization_config does not cover it" if quantization else
                                                                 "config.json has no quantization_config") + f"; {_CONFIG}"),
        (plain and covered == "int4", "is stored plain, but quantization_config covers it: add it to its ignore list, or take "
                                      "the packed weights"),
        (packed and not scale, f"has no scale: {entry.source}_scale is missing; download the shard that holds it"),
        (fp8 and not tiles, f"is float8 without a scale: {entry.source}_scale_inv is missing; download the shard that holds it"),
        (tiles and not fp8, f"has a scale ({tiles}) but dtype {dtype}, not F8_E4M3; remove the scale, or take the FP8 weights"),
        (fp8 and covered != "fp8", f"is float8, but config.json has no FP8 quantization_config that covers it; {_CONFIG}"))
    if not packed and not fp8:
        _check(checkpoint, plain, entry.shape, _FLOATS)
        return "plain", (plain,)
    rows, columns = entry.shape
    if packed:
        group = quantization.group
        if columns % group:
            raise checkpoint.refuse(packed, f"has {columns} inputs, not whole groups of {group}; use a group_size that divides "
                                            f"{columns.label}")
        _check(checkpoint, packed, (rows, Dim(columns // 8, f"{columns.label} / 8")), ("I32",))
        _check(checkpoint, scale, (rows, Dim(columns // group, f"{columns.label} / {group}")), _FLOATS)
        return "int4", (packed, scale)
    _check(checkpoint, plain, entry.shape, ("F8_E4M3",))
    _check(checkpoint, tiles, [Dim(-(-size // block), f"ceil({size.label} / {block})")
                               for size, block in zip(entry.shape, quantization.block)], _FLOATS)
    return "fp8", (plain, tiles)


def _check(checkpoint: Checkpoint, name: str, shape: tuple[Dim, ...] | list[Dim], dtypes: tuple[str, ...]) -> None:
    info = checkpoint.tensors[name]
    if info.shape != tuple(shape):
        raise checkpoint.refuse(name, f"has shape {list(info.shape)}, but config.json says {list(shape)} = "
                                      f"[{', '.join(size.label for size in shape)}]; {_CONFIG}")
    if info.dtype not in dtypes:
        raise checkpoint.refuse(name, f"has dtype {info.dtype}, expected {' or '.join(dtypes)}; convert it")


def _unknown(checkpoint: Checkpoint, unknown: list[str], missing: list[str], table: Table, prefix: str) -> MinispecError:
    name, more = unknown[0], f"(and {len(unknown) - 1} more unknown tensors) " if len(unknown) > 1 else ""
    base = next((name.removesuffix(end) for end in _COMPANIONS if name.endswith(".weight" + end)), None)
    if base and (base in checkpoint.tensors or base.removeprefix(prefix) in missing):
        state = "which is not stored in the form that it serves" if base in checkpoint.tensors else "which is missing"
        why = f"unknown alone: it belongs to {base}, {state}; take the config.json and shards that belong together"
    elif name.endswith(".bias"):
        why = "a bias, and this architecture has none; use another checkpoint"
    else:
        near = _nearest((base or name).removeprefix(prefix), missing or list(dict.fromkeys(e.source for e in table.entries)))
        state = "missing" if missing else "there too"
        why = f"unknown; the nearest expected name is {prefix}{near}, which is {state}; rename or remove the tensor, or {_CONFIG}"
    return checkpoint.refuse(name, f"{more}is {why}")


def _nearest(name: str, names: list[str]) -> str:
    """The closest name; among very many, those with the same last part only, as difflib is slow."""
    if len(names) > 2000:
        names = [n for n in names if n.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:]][:2000] or names[:2000]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.0)), "")


def _equal(checkpoint: Checkpoint, one: str, other: str, rows: int = 4096) -> bool:
    """Compared a part at a time: no rank holds a whole embedding."""
    shape = checkpoint.tensors[one].shape
    return shape == checkpoint.tensors[other].shape and all(
        torch.equal(checkpoint.read(one, part), checkpoint.read(other, part))
        for part in ((slice(at, min(at + rows, shape[0])),) for at in range(0, shape[0], rows)))


def open_target(folder: str, config: TargetConfig) -> Plan:
    """The account of a target's checkpoint, from headers alone. MinispecError names the first tensor that does not fit."""
    checkpoint = Checkpoint.open(folder)
    names = rename(checkpoint, lambda name: strip_target(name, config))
    others = skip_target(names, config)
    if config.tie_word_embeddings and "lm_head.weight" in names:
        head, embed = names["lm_head.weight"], names.get("model.embed_tokens.weight")
        others[head] = "skipped: tied to the embedding, which it equals"
        if embed is None or not _equal(checkpoint, head, embed):
            raise checkpoint.refuse(head, "differs from the embedding, but tie_word_embeddings is true; set it to false in "
                                          "config.json, or remove the tensor")
    present, layers = len(names), config.num_hidden_layers
    moe = sum(config.is_moe(i) for i in range(min(layers, present)))
    for name, count, times in (("num_hidden_layers", layers, 1), ("n_routed_experts", config.n_routed_experts, max(moe, 1))):
        if count * times > present:                  # an absurd count ends here, before a table of that length is built
            raise MinispecError(f"{folder}: {name} is {count} in config.json, but the checkpoint holds {present} tensors in all; "
                                f"{_CONFIG}")
    return account(checkpoint, target_table(config), names, others, config.quantization, config.prefix, config.notes)


def fill(plan: Plan, parameters: dict[str, torch.Tensor], progress: Callable[[int, int, str], None] | None = None) -> Report:
    """Copy every piece into its place, one tensor at a time: dequantised in fp32 and cast on the copy, or as stored (plan.dtypes).

    `parameters`, of any float dtype and device, must have exactly the names and shapes of `plan.shapes`.
    progress(done, total, "tensors read") counts pieces.
    """
    if set(parameters) != set(plan.shapes):
        raise MinispecError(f"parameters {sorted(set(parameters) ^ set(plan.shapes))} are on one side only; allocate plan.shapes")
    for name, shape in plan.shapes.items():
        if tuple(parameters[name].shape) != tuple(shape):
            raise MinispecError(f"parameter {name} has shape {list(parameters[name].shape)}, the checkpoint fills {list(shape)}")
    for done, (entry, kind, sources) in enumerate(plan.pieces, 1):
        stored = [plan.checkpoint.read(name, part) for name, part in zip(sources, _parts(plan, entry, kind))]
        if entry.param in plan.dtypes:
            store(plan, entry, kind, sources, *stored, parameters)
        else:
            _place(plan, entry, kind, sources, stored, parameters)
        if progress:
            progress(done, len(plan.pieces), "tensors read")
    plan.checkpoint.close()
    return plan.report


def _parts(plan: Plan, entry: Entry, kind: str) -> list[tuple[slice, ...]]:
    """What is read of each of an entry's file tensors: `entry.part` in weights, in int4 words, and in scales, whose tiles cover it."""
    def scaled(*blocks):
        return tuple(cut if cut.start is None else slice(cut.start // block, -(-cut.stop // block)) for cut, block in zip(entry.part, blocks))
    if kind == "plain":
        return [entry.part]
    return [scaled(1, 8), scaled(1, plan.quantization.group)] if kind == "int4" else [entry.part, scaled(*plan.quantization.block)]


def _place(plan: Plan, entry: Entry, kind: str, sources: tuple[str, ...], stored: list[torch.Tensor],
           parameters: dict[str, torch.Tensor]) -> None:
    block = plan.quantization.block if kind == "fp8" else ()
    start = [(cut.start or 0) % size for cut, size in zip((*entry.part, slice(0), slice(0)), block)]
    weight = (unpack_int4(*stored, plan.quantization.group) if kind == "int4" else
              dequantize_fp8(*stored, block, start) if kind == "fp8" else stored[0])
    with torch.no_grad():
        region = parameters[entry.param][entry.index]
        region.copy_(weight.reshape(region.shape))
    if not torch.isfinite(region).all():
        overflow = torch.isfinite(weight).all()
        raise plan.checkpoint.refuse(sources[0], f"exceeds the range of {region.dtype}; choose another dtype" if overflow
                                     else "holds NaN or infinity; download the file again")
