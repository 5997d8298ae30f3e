"""From draft ids to target ids: the table in the file, read as offsets, checked, and made absolute (eagle3.md 2.3)."""

import torch

from minispec.errors import MinispecError
from minispec.weights.checkpoint import Checkpoint

_INTEGERS = ("I64", "I32", "I16")


def read_map(checkpoint: Checkpoint, d2t: str | None, t2d: str | None, vocab: int, draft_vocab: int,
             reading: str = "offset") -> tuple[torch.Tensor | None, list[str]]:
    """int64 [draft_vocab] target ids, unique and in range, or None for a full vocabulary; and the lines of the report.

    d2t, t2d: names in the file, or None. reading: "offset" (target = id + d2t[id]), "absolute", or "from-t2d".
    """
    if reading not in ("offset", "absolute", "from-t2d"):
        raise MinispecError(f"d2t is {reading!r}: 'offset', 'absolute' or 'from-t2d' is expected")
    where = checkpoint.folder
    if draft_vocab > vocab:
        raise MinispecError(f"{where}: draft_vocab_size {draft_vocab} exceeds the vocabulary {vocab}; correct the config")
    table = None if d2t is None else _read(checkpoint, d2t, _INTEGERS, draft_vocab, "draft_vocab_size").to(torch.int64)
    mask = None if t2d is None else _read(checkpoint, t2d, ("BOOL", "U8"), vocab, "vocab_size").to(torch.bool)
    identity = torch.arange(draft_vocab if d2t or t2d else 0)
    if draft_vocab == vocab:
        if table is not None and not torch.equal(table, identity if reading == "absolute" else torch.zeros_like(table)):
            raise MinispecError(f"{where}: {d2t} renames ids although draft_vocab_size equals the vocabulary ({vocab}); remove "
                                "it, or correct draft_vocab_size")
        if mask is not None and not mask.all():
            raise MinispecError(f"{where}: {t2d} leaves ids out although draft_vocab_size equals the vocabulary ({vocab}); "
                                "correct draft_vocab_size")
        return None, [f"draft vocabulary: all {vocab} ids"]
    if reading == "from-t2d":
        if mask is None:
            raise MinispecError(f"{where}: --d2t from-t2d needs a tensor t2d, which is missing; use the draft's original files")
        table, how = mask.nonzero().flatten(), "in the order of t2d (asked for)"
        if len(table) != draft_vocab:
            raise MinispecError(f"{where}: {t2d} keeps {len(table)} ids, but draft_vocab_size is {draft_vocab}; use the draft's "
                                "original files")
        return table, [f"draft vocabulary: {draft_vocab} of {vocab} ids, {how}"] + _prefix(table, identity)
    if table is None:
        way = "--d2t from-t2d takes the order of t2d" if mask is not None else "use the draft's original files"
        raise MinispecError(f"{where}: draft_vocab_size {draft_vocab} of {vocab} needs a tensor d2t, which is missing; {way}")
    absolute, offset = table, table + identity
    chosen, other = (absolute, offset) if reading == "absolute" else (offset, absolute)
    fault, other_fault = (_fault(ids, mask, vocab, draft_vocab) for ids in (chosen, other))
    if fault:
        way = "use the draft's original files"
        if not other_fault:
            way = {"offset": "the absolute reading fits: give --d2t absolute",
                   "absolute": "the offset reading fits: drop --d2t absolute"}[reading]
        raise MinispecError(f"{where}: {d2t} read as {reading} ids gives {fault}; {way}")
    if mask is None and reading == "offset" and not table.any():
        raise MinispecError(f"{where}: {d2t} is all zero and there is no t2d: it keeps the first {draft_vocab} of {vocab} ids, "
                            "as an unset table does; use the draft's original files")
    agreed = "agrees with t2d" if mask is not None else "no t2d to check against"
    lines = [f"draft vocabulary: {draft_vocab} of {vocab} ids, d2t read as {reading}; {agreed}"] + _prefix(chosen, identity)
    if mask is None and not other_fault and reading == "offset":
        lines.append("WARNING: d2t would pass as absolute ids too; if nothing is ever accepted, try --d2t absolute")
    return chosen, lines


def _read(checkpoint: Checkpoint, name: str, dtypes: tuple, length: int, field: str) -> torch.Tensor:
    info = checkpoint.tensors[name]
    if info.dtype not in dtypes:
        raise MinispecError(f"{info.file}: tensor {name} has dtype {info.dtype}, expected {' or '.join(dtypes)}; ids do not "
                            "survive a cast: use the draft's original files")
    if info.shape != (length,):
        raise MinispecError(f"{info.file}: tensor {name} has shape {list(info.shape)}, expected [{length}] = [{field}]; correct "
                            "the config, or use the draft's original files")
    return checkpoint.read(name)


def _fault(ids: torch.Tensor, mask: torch.Tensor | None, vocab: int, draft_vocab: int) -> str:
    """What is wrong with a table of target ids; empty when nothing is."""
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        return f"{int(outside.sum())} ids outside 0..{vocab - 1} (first {int(ids[outside][0])})"
    repeated = draft_vocab - len(torch.unique(ids))
    if repeated:
        return f"{repeated} repeated ids"
    if mask is not None and int(mask.sum()) != draft_vocab:
        return f"{draft_vocab} ids where t2d keeps {int(mask.sum())}"
    if mask is not None and not mask[ids].all():
        return f"{int((~mask[ids]).sum())} ids that t2d leaves out"
    return ""


def _prefix(ids: torch.Tensor, identity: torch.Tensor) -> list[str]:
    if not torch.equal(ids, identity):
        return []
    return [f"WARNING: the draft keeps exactly the first {len(ids)} ids, which looks like a default, not a choice by frequency"]
