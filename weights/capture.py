"""Which residual streams of the target a draft reads: every spelling becomes "the stream entering layer i" (eagle3.md 3)."""

from minispec.errors import MinispecError
from minispec.fields import Fields

_KEY = "eagle_aux_hidden_state_layer_ids"
# Model-Optimizer's export writes these beside the ids, and numbers layers by their outputs.
NVIDIA_KEYS = ("use_input_layernorm_in_first_layer", "use_last_layernorm", "use_mtp_layernorm", "next_layer_regular",
               "eh_proj_before_attn", "parallel_draft_step")


def resolve_capture(fields: Fields, layers: int, width: int, target_hidden: int, capture=None,
                    convention: str | None = None) -> tuple[tuple[int, ...], str]:
    """Canonical ids, ascending in 0..layers, and why they were read so.

    width: columns of fc, which must be len(ids) x target_hidden. capture, convention: the caller's own, which win;
    a capture without a convention numbers layer inputs.
    """
    if convention not in (None, "input", "output"):
        raise MinispecError(f"capture_convention is {convention!r}: 'input' or 'output' is expected")
    if width % target_hidden:
        raise MinispecError(f"{fields.file}: fc.weight takes {width} channels, which is no multiple of the target's hidden size "
                            f"{target_hidden}; use the draft that belongs to this target")
    count = width // target_hidden
    if capture is not None:
        listed, where = capture, "capture"
        outputs, why = convention == "output", f"the caller gave them{' as ' + convention + 's' if convention else ''}"
    else:
        listed, where = _listed(fields)
        if listed is None:
            ids = (2, layers // 2, layers - 3)
            reason = (f"WARNING: {fields.file} names no capture ids; taken as inputs of layers {list(ids)}, the default [2, "
                      "n/2, n-3]: if acceptance is low, give --capture")
            return _checked(ids, f"{fields.file}: default capture ids (none are "
                                 "named)", layers, count, width, target_hidden), reason
        outputs, why = _convention(fields, listed, where, convention)
    what = "capture" if capture is not None else f"{fields.file}: {where}"
    if not isinstance(listed, (list, tuple)) or not listed or any(type(i) is not int for i in listed):
        raise MinispecError(f"{what} is {listed!r}: a list of layer numbers is expected; give --capture")
    ids = tuple(i + outputs for i in listed)
    _checked(ids, f"{what} {list(listed)}", layers, count, width, target_hidden)
    kind = "outputs" if outputs else "inputs"
    same = f" = inputs of layers {list(ids)}" if outputs else ""
    return ids, f"capture ids {list(listed)} read as layer {kind}{same} because {why}"


def _listed(fields: Fields):
    """The ids of the config and the field they stand in; both places must agree."""
    eagle = fields.section("eagle_config")
    places = [(f, key) for f, key in ((fields, _KEY), (eagle, _KEY), (eagle, "layer_ids")) if f is not None and f.has(key)]
    for place, key in places[1:]:
        if place.values[key] != places[0][0].values[places[0][1]]:
            first = places[0][0].path + places[0][1]
            raise place.refuse(key, f"{first} in the same file is {places[0][0].values[places[0][1]]}; remove one, or give "
                                    "--capture")
    return (places[0][0].values[places[0][1]], places[0][0].path + places[0][1]) if places else (None, "")


def _convention(fields: Fields, listed, where: str, convention: str | None) -> tuple[bool, str]:
    """Whether the ids number outputs, and why. The order of the questions is the order of trust."""
    eagle = fields.section("eagle_config")
    if convention:
        return convention == "output", f"capture_convention {convention!r} was given"
    if eagle and eagle.has("capture_convention"):
        stated = eagle.text("capture_convention", choices=("input", "output"))
        return stated == "output", f"eagle_config.capture_convention is {stated!r}"
    if fields.has("transformer_layer_config") and where == _KEY:
        return False, "speculators' top-level list numbers inputs"
    named = [key for key in NVIDIA_KEYS if eagle and key in eagle.values]
    if named:
        return True, f"eagle_config has {named[0]}, as Model-Optimizer's exports, which number outputs"
    if isinstance(listed, list) and listed and type(listed[0]) is int and listed[0] == 1:
        return True, "the first id is 1"
    return False, "no sign says otherwise"


def _checked(ids: tuple, what: str, layers: int, count: int, width: int, target_hidden: int) -> tuple[int, ...]:
    way = "give --capture (and --capture-convention)"
    if len(ids) != count:
        raise MinispecError(f"{what}: {len(ids)} layers are listed, but fc.weight takes {width} = {count} x {target_hidden} "
                            f"channels; {way}")
    if any(not 0 <= i <= layers for i in ids):
        raise MinispecError(f"{what}: layer inputs {list(ids)} are not all within 0..{layers} of this target; {way}")
    if any(a == b for a, b in zip(ids, ids[1:])) or len(set(ids)) < len(ids):
        raise MinispecError(f"{what}: layer inputs {list(ids)} collide in a target of {layers} layers; {way}")
    if list(ids) != sorted(ids):
        raise MinispecError(f"{what}: layer inputs {list(ids)} are not ascending, and fc's order is low to high; {way}")
    return ids
