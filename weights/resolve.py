"""What the numbers in a draft's files mean: layers become "the residual stream entering layer i", draft ids become target ids."""
import torch

from minispec.errors import MinispecError
from minispec.fields import Fields, refuse_first
from minispec.weights.checkpoint import Checkpoint

_KEY = "eagle_aux_hidden_state_layer_ids"
# Model-Optimizer's export writes these beside the ids, and numbers layers by their outputs.
NVIDIA_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular",
               "eh_proj_before_attn", "parallel_draft_step")
_READINGS = ("offset", "absolute", "from-t2d")
_ORIGINAL = "use the draft's original files"


def resolve_capture(fields: Fields, layers: int, width: int, target_hidden: int, capture=None,
                    convention: str | None = None) -> tuple[tuple[int, ...], str]:
    """Canonical ids, ascending in 0..layers, and why they were read so.

    width: columns of fc, which must be len(ids) x target_hidden. capture, convention: the caller's own, which win;
    a capture without a convention numbers layer inputs.
    """
    if convention not in (None, "input", "output"):
        raise MinispecError(f"capture_convention is {convention!r}: 'input' or 'output' is expected")
    count, rest = divmod(width, target_hidden)
    if rest:
        raise MinispecError(f"{fields.file}: fc.weight takes {width} channels, no multiple of the target's hidden size "
                            f"{target_hidden}; use the draft of this target")
    eagle = fields.section("eagle_config") or Fields({}, fields.file)
    where, listed = ("capture", capture) if capture is not None else _listed(fields, eagle)
    if listed is None:
        where, ids = f"{fields.file}: default capture ids (none are named)", (2, layers // 2, layers - 3)
        reason = (f"warning: {fields.file} names no capture ids; taken as inputs of layers {list(ids)}, the default [2, n/2, "
                  "n-3]: if acceptance is low, give --capture")
    else:
        if not isinstance(listed, (list, tuple)) or not listed or any(type(i) is not int for i in listed):
            raise MinispecError(f"{where} is {listed!r}: a list of layer numbers is expected; give --capture")
        stated = eagle.text("capture_convention", None, ("input", "output")) if capture is None and not convention else None
        nvidia = next((key for key in NVIDIA_KEYS if key in eagle.values), None)
        outputs, why = next((outputs, why) for sign, outputs, why in (                       # in the order of trust
            (capture is not None, convention == "output", f"the caller gave them{f' as {convention}s' if convention else ''}"),
            (convention, convention == "output", f"capture_convention {convention!r} was given"),
            (stated, stated == "output", f"eagle_config.capture_convention is {stated!r}"),
            (fields.has("transformer_layer_config") and fields.has(_KEY), False, "speculators' top-level list numbers inputs"),
            (nvidia, True, f"eagle_config has {nvidia}, as Model-Optimizer's exports, which number outputs"),
            (listed[0] == 1, True, "the first id is 1"),
            (True, False, "no sign says otherwise")) if sign)
        ids, where = tuple(i + outputs for i in listed), f"{where} {list(listed)}"
        same = f"outputs = inputs of layers {list(ids)}" if outputs else "inputs"
        reason = f"capture ids {list(listed)} read as layer {same} because {why}"
    numbers, way = f"layer inputs {list(ids)}", "give --capture (and --capture-convention)"
    refuse_first(f"{where}:",
                 (len(ids) != count, f"{len(ids)} layers, fc.weight takes {width} = {count} x {target_hidden} channels; {way}"),
                 (not all(0 <= i <= layers for i in ids), f"{numbers} are not all within 0..{layers} of this target; {way}"),
                 (len(set(ids)) < len(ids), f"{numbers} collide in a target of {layers} layers; {way}"),
                 (list(ids) != sorted(ids), f"{numbers} are not ascending, and fc's order is low to high; {way}"))
    return ids, reason


def _listed(fields: Fields, eagle: Fields) -> tuple[str, object]:
    """The field that names the ids, and its value, None when no field does; all that do must agree."""
    found = [(place, key) for place, key in ((fields, _KEY), (eagle, _KEY), (eagle, "layer_ids")) if place.has(key)]
    name, ids = next(((place.path + key, place.values[key]) for place, key in found), ("", None))
    for place, key in found[1:]:
        if place.values[key] != ids:
            raise place.refuse(key, f"{name} in the same file is {ids}; remove one, or give --capture")
    return name and f"{fields.file}: {name}", ids


def read_map(checkpoint: Checkpoint, d2t: str | None, t2d: str | None, vocab: int, draft_vocab: int,
             reading: str = "offset") -> tuple[torch.Tensor | None, list[str]]:
    """int64 [draft_vocab] target ids, unique and in range, or None for a full vocabulary; and the lines of the report.

    d2t, t2d: names in the file, or None. reading: "offset" (target = id + d2t[id]), "absolute", or "from-t2d".
    """
    if reading not in _READINGS:
        raise MinispecError(f"d2t is {reading!r}: {', '.join(_READINGS)} are possible")
    where = f"{checkpoint.folder}:"
    if draft_vocab > vocab:
        raise MinispecError(f"{where} draft_vocab_size {draft_vocab} exceeds the vocabulary {vocab}; correct the config")
    table = d2t and _read(checkpoint, d2t, ("I64", "I32", "I16"), draft_vocab, "draft_vocab_size").to(torch.int64)
    mask = t2d and _read(checkpoint, t2d, ("BOOL", "U8"), vocab, "vocab_size").to(torch.bool)
    offset = None if table is None else table + torch.arange(draft_vocab)
    readings = {"offset": offset, "absolute": table, "from-t2d": None if mask is None else mask.nonzero().flatten()}
    ids = readings[reading]
    if draft_vocab == vocab:
        named = readings["absolute" if reading == "absolute" else "offset"]
        full = f"although draft_vocab_size equals the vocabulary ({vocab}); correct draft_vocab_size"
        refuse_first(where, (named is not None and not _identity(named), f"{d2t} renames ids {full}, or remove it"),
                     (mask is not None and not mask.all(), f"{t2d} leaves ids out {full}"))
        return None, [f"draft vocabulary: all {vocab} ids"]
    if ids is None:
        needed, way = ("t2d", _ORIGINAL) if reading == "from-t2d" else (
            "d2t", _ORIGINAL if mask is None else "--d2t from-t2d takes the order of t2d")
        raise MinispecError(f"{where} draft_vocab_size {draft_vocab} of {vocab}, --d2t {reading}: needs a tensor {needed}, which "
                            f"is missing; {way}")
    other = {"offset": "absolute", "absolute": "offset"}.get(reading)
    other_fits = other and not _fault(readings[other], mask, vocab, draft_vocab)
    fault = _fault(ids, mask, vocab, draft_vocab)
    way = _ORIGINAL if not other_fits else f"the {other} reading fits: " + ("give" if reading == "offset" else "drop")
    refuse_first(where, (fault, f"{d2t or t2d} read as {reading}: {fault}; {way}{' --d2t absolute' if other_fits else ''}"),
                 (mask is None and reading == "offset" and not table.any(),
                  f"{d2t} is all zero, as an unset table is, and there is no t2d; {_ORIGINAL}"))
    agreed = "agrees with t2d" if mask is not None else "no t2d to check against"
    how = f"d2t read as {reading}; {agreed}" if other else "in the order of t2d (asked for)"
    lines = [f"draft vocabulary: {draft_vocab} of {vocab} ids, {how}"]
    if _identity(ids):
        lines.append(f"warning: the draft keeps exactly the first {draft_vocab} ids, which looks like a default, not a choice by "
                     "frequency")
    if mask is None and other_fits and reading == "offset":
        lines.append("warning: d2t would pass as absolute ids too; if nothing is ever accepted, try --d2t absolute")
    return ids, lines


def _read(checkpoint: Checkpoint, name: str, dtypes: tuple, length: int, field: str) -> torch.Tensor:
    info = checkpoint.tensors[name]
    if info.dtype not in dtypes:
        raise checkpoint.refuse(name, f"has dtype {info.dtype}, expected {' or '.join(dtypes)}; {_ORIGINAL}")
    if info.shape != (length,):
        raise checkpoint.refuse(name, f"has shape {list(info.shape)}, expected [{length}] = [{field}]; {_ORIGINAL}")
    return checkpoint.read(name)


def _identity(ids: torch.Tensor) -> bool:
    return torch.equal(ids, torch.arange(len(ids)))


def _fault(ids: torch.Tensor, mask: torch.Tensor | None, vocab: int, draft_vocab: int) -> str:
    """What is wrong with a table of target ids; empty when nothing is."""
    if mask is not None and int(mask.sum()) != draft_vocab:
        return f"t2d keeps {int(mask.sum())} ids, draft_vocab_size is {draft_vocab}"
    if len(outside := ids[(ids < 0) | (ids >= vocab)]):
        return f"{len(outside)} ids outside 0..{vocab - 1} (first {int(outside[0])})"
    if repeated := draft_vocab - len(torch.unique(ids)):
        return f"{repeated} repeated ids"
    return "" if mask is None or mask[ids].all() else f"{int((~mask[ids]).sum())} ids that t2d leaves out"
