"""Rotary position embedding: what a config says about it, in either spelling, and the frequencies that follow."""
import math
from dataclasses import dataclass

import torch

from minispec.fields import Fields

# What each type may say: numbers with the arguments of Fields.number (default, lower bound), None for what is read otherwise.
_KINDS = {
    "default": {}, "linear": {},
    "llama3": {"original_max_position_embeddings": None, "low_freq_factor": (), "high_freq_factor": ()},
    "yarn": {"original_max_position_embeddings": None, "truncate": None, "beta_fast": (32.0, 1e-6), "beta_slow": (1.0, 1e-6),
             "mscale": (0.0, -1e-9), "mscale_all_dim": (0.0, -1e-9), "attention_factor": (None,)},
}


@dataclass(frozen=True)
class Rope:
    """Rotation of `dim` channels. `style` "interleaved" pairs channels (2j, 2j+1), "half" pairs (j, j + dim/2).

    Frequencies and factors are those of transformers' ROPE_INIT_FUNCTIONS, bit for bit (tests/test_config.py).
    """
    dim: int
    theta: float
    style: str
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0

    def inverse_frequencies(self) -> torch.Tensor:
        """Angle per position of each channel pair, fp32 [dim / 2], on the CPU."""
        powers = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        plain = 1.0 / powers
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":                    # long waves divided by factor, short ones kept, a blend in between
            wave = 2 * math.pi / plain
            long, short = self.original / self.low_freq_factor, self.original / self.high_freq_factor
            scaled = torch.where(wave > long, plain / self.factor, plain)
            blend = (self.original / wave - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            return torch.where((wave >= short) & (wave <= long), (1 - blend) * scaled / self.factor + blend * scaled, scaled)
        if self.kind == "yarn":                      # from the pair of beta_fast rotations to that of beta_slow, likewise
            low, high = (self.dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))
                         for rotations in (self.beta_fast, self.beta_slow))
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, self.dim - 1)
            high += 0.001 * (low == high)
            keep = 1 - ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
            return (1.0 / (self.factor * powers)) * (1 - keep) + plain * keep
        return plain

    def _mscale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.kind == "yarn" and self.factor > 1 else 1.0

    @property
    def multiplier(self) -> float:
        """What cos and sin are multiplied with (transformers' attention_scaling)."""
        if self.attention_factor is not None:
            return self.attention_factor
        both = self.mscale and self.mscale_all_dim
        return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim) if both else self._mscale(1.0)

    @property
    def score_factor(self) -> float:
        """What MLA multiplies its softmax scale with: the square of YaRN's m for mscale_all_dim."""
        return self._mscale(self.mscale_all_dim) ** 2

    def __str__(self) -> str:
        scaled = "" if self.kind == "default" else f" {self.kind} factor {self.factor:g}"
        return f"rope theta {self.theta:g}{scaled}, {self.dim} channels, {self.style} pairs"


def read_rope(fields: Fields, dim: int, style: str, max_position: int) -> Rope:
    """The Rope of a config that spells it `rope_theta` + `rope_scaling` (key `type` or `rope_type`) or `rope_parameters`.

    Where both spellings are present they must say the same. Errors: MinispecError for a type or key not implemented.
    """
    if dim % 2:
        raise fields.refuse("head_dim" if style == "half" else "qk_rope_head_dim", "rope turns pairs: an even width is needed")
    sections = [section for name in ("rope_parameters", "rope_scaling") if (section := fields.section(name))]
    ropes = [_read(fields, section, dim, style, max_position) for section in sections or [Fields({}, fields.file)]]
    if ropes[0] != ropes[-1]:
        raise fields.refuse("rope_scaling", "rope_parameters in the same file says otherwise; remove one of the two")
    return ropes[0]


def _read(fields: Fields, section: Fields, dim: int, style: str, max_position: int) -> Rope:
    kind = section.get("rope_type", section.get("type", "default"))
    if kind != section.get("type", kind):
        raise section.refuse("type", f"rope_type in the same object is {kind!r}; remove one of the two")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise section.refuse("rope_type" if section.has("rope_type") else "type",
                             f"rope types {', '.join(_KINDS)} are supported; use another checkpoint")
    for place in (fields, section):
        place.only("partial_rotary_factor", (1, 1.0), "use another checkpoint")
    if kind == "default":
        section.only("factor", (1, 1.0), "name the rope type that the factor belongs to, or remove the field")
    known = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor", *_KINDS[kind])
    for key, value in section.values.items():
        if value is not None and key not in known:
            raise section.refuse(key, f"rope type {kind!r} has no such field here; remove it, or use another checkpoint")
    theta, outer = (place.number("rope_theta", None, above=1.0) for place in (section, fields))
    if theta and outer and theta != outer:
        raise fields.refuse("rope_theta", f"{section.path}rope_theta in the same file is {theta:g}; remove one of the two")
    theta = theta or outer or 10000.0
    if kind == "default":
        return Rope(dim, theta, style)
    original = fields.integer("original_max_position_embeddings",
                              section.integer("original_max_position_embeddings", max_position))
    factor = section.number("factor", max_position / original if kind == "yarn" else None)
    if factor is None or factor < 1:
        raise section.refuse("factor", f"rope type {kind!r} needs a factor of 1 or more; correct the config")
    numbers = {name: section.number(name, *how) for name, how in _KINDS[kind].items() if how is not None}
    rope = Rope(dim, theta, style, kind, factor, original, **numbers, truncate=section.flag("truncate", True))
    if rope.beta_fast < rope.beta_slow:
        raise section.refuse("beta_fast", f"must not be below beta_slow ({rope.beta_slow:g}); correct the config")
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise section.refuse("high_freq_factor", f"must be above low_freq_factor ({rope.low_freq_factor:g}); correct the config")
    return rope
