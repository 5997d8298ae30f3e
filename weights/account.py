"""The account of a checkpoint: every tensor in it is placed or skipped for a reason, every parameter is covered."""

import difflib
from dataclasses import dataclass, field
from typing import Callable

from minispec.config import Quantization
from minispec.errors import MinispecError
from minispec.weights.checkpoint import Checkpoint
from minispec.weights.names import Entry, Table

_FLOATS = ("F32", "BF16", "F16", "F64")
_COMPANIONS = (".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_shape", ".weight_zero_point", ".weight_g_idx")


@dataclass
class Report:
    """`lines`: what was assumed and done, for people. `tensors`: file tensor -> "consumed by ..." or "skipped: ...".

    `bytes` counts the consumed tensors as stored.
    """

    lines: list[str] = field(default_factory=list)
    tensors: dict[str, str] = field(default_factory=dict)
    bytes: int = 0


@dataclass(frozen=True)
class Piece:
    """An entry of the table and the file tensors that hold it: kind "plain" (weight), "fp8" or "int4" (weight, scale)."""

    entry: Entry
    kind: str
    sources: tuple[str, ...]


@dataclass
class Plan:
    """A checkpoint whose account is complete: every tensor placed or skipped, every parameter covered. Nothing is read yet."""

    checkpoint: Checkpoint
    shapes: dict[str, tuple[int, ...]]
    pieces: list[Piece]
    quantization: Quantization | None
    report: Report


def rename(checkpoint: Checkpoint, canonical: Callable[[str], str]) -> dict[str, str]:
    """Canonical name -> name in the file. MinispecError where two tensors of the file mean the same."""
    names: dict[str, str] = {}
    for file_name in checkpoint.tensors:
        name = canonical(file_name)
        if name in names:
            raise MinispecError(f"{checkpoint.tensors[file_name].file}: tensors {names[name]} and {file_name} name the same "
                                "parameter; remove one of the two")
        names[name] = file_name
    return names


def account(checkpoint: Checkpoint, table: Table, names: dict[str, str], others: dict[str, str],
            quantization: Quantization | None, prefix: str = "", notes: list[str] | None = None) -> Plan:
    """Match both sides completely. names: canonical -> file name; others: file name -> "skipped: ..." or its use elsewhere."""
    report = Report(list(notes or []))
    pieces, missing = [], []
    for entry in table.entries:
        piece = _place(checkpoint, entry, names, quantization)
        if piece is None:
            missing.append(entry.source)
            continue
        pieces.append(piece)
        for source in piece.sources:
            before = report.tensors.get(source)
            report.tensors[source] = f"{before}, {entry.param}" if before else f"consumed by {entry.param}"
            report.bytes += 0 if before else checkpoint.tensors[source].bytes
        if piece.kind == "int4":
            shape = names.get(entry.source + "_shape")
            if shape:
                report.tensors[shape] = "skipped: repeats the shape of the packed weight"
    for name, state in others.items():
        report.tensors.setdefault(name, state)
    unknown = [name for name in names.values() if name not in report.tensors]
    if unknown:
        raise _unknown(checkpoint, unknown, missing, table, prefix)
    if missing:
        raise _missing(checkpoint, missing, prefix)
    report.lines += _summary(checkpoint, pieces, report)
    return Plan(checkpoint, table.shapes, pieces, quantization, report)


def _place(checkpoint: Checkpoint, entry: Entry, names: dict[str, str], quantization: Quantization | None) -> Piece | None:
    """The stored form of one entry, its shapes and dtypes checked; None when the file has no such tensor."""
    plain, packed, scale, tiles = (names.get(entry.source + end) for end in ("", "_packed", "_scale", "_scale_inv"))
    found = plain or packed
    if found is None:
        return None
    module = found.removesuffix("_packed").removesuffix(".weight")
    short_name = entry.source.removesuffix(".weight")
    aliases = (module, short_name, short_name.removeprefix("model."))
    covered = entry.linear and quantization is not None and quantization.covers(aliases)
    where = f"{checkpoint.tensors[found].file}: tensor {found}"
    int4 = covered and quantization.kind == "int4"
    if plain and packed:
        raise MinispecError(f"{where} is stored both plain and packed ({packed}); remove one of the two")
    if packed and not int4:
        why = "quantization_config does not cover it" if quantization else "config.json has no quantization_config"
        raise MinispecError(f"{where} is packed INT4, but {why}; correct targets or ignore in the config that belongs to the "
                            "weights")
    if plain and int4:
        raise MinispecError(f"{where} is stored plain, but quantization_config covers it and its ignore list does not name it; "
                            "add it to ignore, or take the packed weights")
    if int4:
        if scale is None:
            raise MinispecError(f"{where} has no scale: {entry.source}_scale is missing; download the shard that holds it")
        columns, group = entry.shape[1], quantization.group
        if columns % group:
            raise MinispecError(f"{where}: {columns} inputs are not whole groups of {group}; use a group_size that divides "
                                f"{entry.fields[1]}")
        _check(checkpoint, packed, (entry.shape[0], columns // 8), ("I32",), (entry.fields[0], f"{entry.fields[1]} / 8"))
        _check(checkpoint, scale, (entry.shape[0], columns // group), _FLOATS, (entry.fields[0], f"{entry.fields[1]} / {group}"))
        return Piece(entry, "int4", (packed, scale))
    dtype = checkpoint.tensors[plain].dtype
    if tiles is None and dtype != "F8_E4M3":
        _check(checkpoint, plain, entry.shape, _FLOATS, entry.fields)
        return Piece(entry, "plain", (plain,))
    if tiles is None:
        raise MinispecError(f"{where} is float8 without a scale: {entry.source}_scale_inv is missing; download the shard that "
                            "holds it")
    if dtype != "F8_E4M3":
        raise MinispecError(f"{where} has a scale ({tiles}) but dtype {dtype}, not F8_E4M3; remove the scale, or take the FP8 "
                            "weights")
    if not covered or quantization.kind != "fp8":
        raise MinispecError(f"{where} is float8, but config.json has no FP8 quantization_config that covers it; take the config "
                            "that belongs to the weights")
    _check(checkpoint, plain, entry.shape, ("F8_E4M3",), entry.fields)
    rows, columns = quantization.block
    _check(checkpoint, tiles, (-(-entry.shape[0] // rows), -(-entry.shape[1] // columns)), _FLOATS,
           (f"ceil({entry.fields[0]} / {rows})", f"ceil({entry.fields[1]} / {columns})"))
    return Piece(entry, "fp8", (plain, tiles))


def _check(checkpoint: Checkpoint, name: str, shape: tuple, dtypes: tuple, fields: tuple) -> None:
    info = checkpoint.tensors[name]
    if info.shape != tuple(shape):
        raise MinispecError(f"{info.file}: tensor {name} has shape {list(info.shape)}, but config.json says {list(shape)} = "
                            f"[{', '.join(fields)}]; take the config.json that belongs to the weights")
    if info.dtype not in dtypes:
        raise MinispecError(f"{info.file}: tensor {name} has dtype {info.dtype}, expected {' or '.join(dtypes)}; convert it")


def _unknown(checkpoint: Checkpoint, unknown: list[str], missing: list[str], table: Table, prefix: str) -> MinispecError:
    name = unknown[0]
    more = f" (and {len(unknown) - 1} more unknown tensors)" if len(unknown) > 1 else ""
    file = checkpoint.tensors[name].file
    base = next((name.removesuffix(end) + ".weight" for end in _COMPANIONS if name.endswith(end)), None)
    if base and (base in checkpoint.tensors or base.removeprefix(prefix) in missing):
        state = "which is not stored in the form that it serves" if base in checkpoint.tensors else "which is missing"
        return MinispecError(f"{file}: tensor {name}{more} is unknown alone: it belongs to {base}, {state}; take the config.json and "
                             "shards that belong together")
    if name.endswith(".bias"):
        return MinispecError(f"{file}: tensor {name}{more} is a bias, and this architecture has none; use another checkpoint")
    nearest = _nearest((base or name).removeprefix(prefix), missing or list(dict.fromkeys(e.source for e in table.entries)))
    state = "which is missing" if missing else "which is there too"
    return MinispecError(f"{file}: tensor {name}{more} is unknown; the nearest expected name is {prefix}{nearest}, {state}; "
                         "rename or remove the tensor, or take the config.json that belongs to the weights")


def _missing(checkpoint: Checkpoint, missing: list[str], prefix: str) -> MinispecError:
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    nearest = _nearest(prefix + missing[0], list(checkpoint.tensors))
    near = f"; the nearest name present is {nearest}" if nearest else ""
    return MinispecError(f"{checkpoint.folder}: tensor {prefix}{missing[0]}{more} is missing{near}; download the complete "
                         "checkpoint, or take the config.json that belongs to the weights")


def _nearest(name: str, names: list[str]) -> str:
    """The closest name; among very many, those with the same last part only, as difflib is slow."""
    if len(names) > 2000:
        names = [n for n in names if n.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:]][:2000] or names[:2000]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.0)), "")


def _summary(checkpoint: Checkpoint, pieces: list[Piece], report: Report) -> list[str]:
    kinds = {kind: sum(p.kind == kind for p in pieces) for kind in ("plain", "fp8", "int4")}
    stored = ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)
    lines = checkpoint.notes + [f"{checkpoint.folder}: {report.bytes / 1e6:.1f} MB of weights read ({stored})"]
    reasons: dict[str, list[str]] = {}
    for name, state in report.tensors.items():
        if state.startswith("skipped: "):
            reasons.setdefault(state, []).append(name)
    return lines + [f"{len(names)} tensors {reason} (first: {names[0]})" for reason, names in reasons.items()]
