"""How a checkpoint stores its Linear weights, as its quantization_config says."""
import re
from dataclasses import dataclass

from minispec.fields import Fields, short

_WAY_OUT = "store the weights as bf16, as FP8 e4m3 in 128x128 blocks, or as INT4 group-32 pack-quantized"


@dataclass(frozen=True)
class Quantization:
    """How Linear weights are stored. kind "fp8": one scale per `block` = (rows, columns) tile; "int4": one per `group` inputs.

    `targets` and `ignore` are compressed-tensors patterns: a module name, "Linear", or "re:" and a regular expression.
    """
    kind: str
    block: tuple[int, int] = (1, 1)
    group: int = 0
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ()

    def covers(self, names: tuple[str, ...]) -> bool:
        """Whether the Linear module known by any of `names` is stored quantised (int4) or may be (fp8)."""
        targeted, ignored = (any(p == "Linear" or p in names or p.startswith("re:") and any(re.match(p[3:], n) for n in names)
                                 for p in patterns) for patterns in (self.targets, self.ignore))
        return targeted and not ignored

    @classmethod
    def read(cls, fields: Fields) -> "Quantization":
        """From a quantization_config. MinispecError for any scheme but FP8 blocks and INT4 symmetric groups."""
        method = fields.text("quant_method")
        if method == "fp8":
            fields.only("fmt", ("e4m3",), _WAY_OUT)
            fields.only("activation_scheme", ("dynamic",), _WAY_OUT)
            block = fields.get("weight_block_size", None)
            if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
                raise fields.refuse("weight_block_size", f"two positive integers are expected, as [128, 128]; {_WAY_OUT}")
            return cls("fp8", block=tuple(block), ignore=_patterns(fields, "modules_to_not_convert"))
        if method != "compressed-tensors":
            raise fields.refuse("quant_method", f"this storage is not supported; {_WAY_OUT}")
        if (groups := fields.section("config_groups")) is None or len(groups.values) != 1:
            raise fields.refuse("config_groups", f"exactly one group is supported; {_WAY_OUT}")
        group = groups.section(next(iter(groups.values))) or groups
        if (weights := group.section("weights")) is None:
            raise group.refuse("weights", f"the scheme of the weights is needed; {_WAY_OUT}")
        sparsity = fields.section("sparsity_config") or Fields({}, fields.file)
        for place, name, *allowed in (
                (fields, "quantization_status", "compressed"), (sparsity, "format", "dense"), (group, "output_activations"),
                (fields, "format", "pack-quantized"), (group, "format", "pack-quantized"), (group, "input_activations"),
                (weights, "num_bits", 4), (weights, "type", "int"), (weights, "strategy", "group"), (weights, "symmetric", True),
                (weights, "dynamic", False), (weights, "actorder", False)):
            place.only(name, tuple(allowed), _WAY_OUT)
        fields.only("kv_cache_scheme", ({},), "remove the field to run with a cache that is not quantised")
        for name in ("num_bits", "type", "strategy", "symmetric"):
            weights.get(name)                        # refused where missing: no default is safe
        if (size := weights.integer("group_size")) % 32:
            raise weights.refuse("group_size", f"a multiple of 32 is needed; {_WAY_OUT}")
        return cls("int4", group=size, targets=_patterns(group, "targets", ("Linear",)), ignore=_patterns(fields, "ignore"))


def _patterns(fields: Fields, name: str, default: tuple = ()) -> tuple[str, ...]:
    patterns = fields.get(name, list(default))
    if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise fields.refuse(name, "a list of module names and 're:' patterns is expected; correct the config")
    for pattern in patterns:
        if pattern.startswith("re:"):
            # repeated groups, or many groups, wildcards or options, can take exponential time on a name that does not match
            bare = re.sub(r"\\.", "", pattern[3:])
            if re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{?(]", bare)) > 6 or len(pattern) > 500:
                raise fields.refuse(name, f"pattern {short(pattern)} repeats a group or has over 6 groups and wildcards; write it simpler")
            try:
                re.compile(pattern[3:])
            except (re.error, RecursionError, OverflowError) as error:
                raise fields.refuse(name, f"pattern {short(pattern)} is not a regular expression ({error}); correct it") from None
    return tuple(patterns)
