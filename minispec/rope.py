"""Rotary position embedding: what a config says about it, in either spelling, and the frequencies that follow."""

import math
from dataclasses import dataclass

import torch

from minispec.fields import Fields

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
             "attention_factor", "truncate"),
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
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            low, high = self._ramp_range()
            ramp = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
            keep = 1 - ramp
            return (1.0 / (self.factor * powers)) * (1 - keep) + plain * keep
        return plain

    def _ramp_range(self) -> tuple[float, float]:
        """The pairs between which YaRN goes from untouched to divided by `factor`."""
        def pair(rotations):
            return self.dim * math.log(self.original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))
        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        return low, high + 0.001 if low == high else high

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Long waves divided by `factor`, short ones kept, a linear blend of both in between."""
        wave = 2 * math.pi / plain
        long, short = self.original / self.low_freq_factor, self.original / self.high_freq_factor
        scaled = torch.where(wave > long, plain / self.factor, plain)
        blend = (self.original / wave - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        middle = (1 - blend) * scaled / self.factor + blend * scaled
        return torch.where((wave >= short) & (wave <= long), middle, scaled)

    @property
    def multiplier(self) -> float:
        """What cos and sin are multiplied with (transformers' attention_scaling)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    @property
    def score_factor(self) -> float:
        """What MLA multiplies its softmax scale with: the square of YaRN's m for mscale_all_dim (target.md 3b)."""
        if self.kind != "yarn" or not self.mscale_all_dim:
            return 1.0
        return _mscale(self.factor, self.mscale_all_dim) ** 2

    def __str__(self) -> str:
        scaled = "" if self.kind == "default" else f" {self.kind} factor {self.factor:g}"
        return f"rope theta {self.theta:g}{scaled}, {self.dim} channels, {self.style} pairs"


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(fields: Fields, dim: int, style: str, max_position: int, default_theta: float = 10000.0) -> Rope:
    """The Rope of a config that spells it `rope_theta` + `rope_scaling` (key `type` or `rope_type`) or `rope_parameters`.

    Where both spellings are present they must say the same. Errors: MinispecError for a type or key not implemented.
    """
    if dim % 2:
        raise fields.refuse("head_dim" if style == "half" else "qk_rope_head_dim", "rope turns pairs: an even width is needed")
    fields.only("partial_rotary_factor", (1, 1.0), "only 1.0 is supported (all channels turn); use another checkpoint")
    sections = [name for name in ("rope_parameters", "rope_scaling") if fields.section(name)]
    ropes = [_read(fields, fields.section(name), dim, style, max_position, default_theta) for name in sections]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        raise fields.refuse("rope_scaling", "rope_parameters in the same file says otherwise; remove one of the two")
    return ropes[0] if ropes else Rope(dim, _theta(fields, default_theta), style)


def _theta(fields: Fields, default: float | None) -> float | None:
    return fields.number("rope_theta", default, above=1.0)


def _read(fields: Fields, section: Fields, dim: int, style: str, max_position: int, default_theta: float) -> Rope:
    kind = section.get("rope_type", section.get("type", "default"))
    if kind != section.get("type", kind):
        raise section.refuse("type", f"rope_type in the same object is {kind!r}; remove one of the two")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise section.refuse("rope_type" if section.has("rope_type") else "type",
                             f"rope types {', '.join(_KEYS)} are supported; use another checkpoint")
    section.only("partial_rotary_factor", (1, 1.0), "only 1.0 is supported (all channels turn); use another checkpoint")
    if kind == "default":
        section.only("factor", (1, 1.0), "rope type 'default' has no factor; name the type, or remove the field")
    for key, value in section.values.items():
        common = ("type", "rope_type", "rope_theta", "partial_rotary_factor", "factor")
        if value is not None and key not in common + _KEYS[kind]:
            raise section.refuse(key, f"rope type {kind!r} has no such field here; remove it, or use another checkpoint")
    theta, outer = _theta(section, None), _theta(fields, None)
    if theta is not None and outer is not None and theta != outer:
        raise fields.refuse("rope_theta", f"{section.path}rope_theta in the same file is {theta:g}; remove one of the two")
    theta = theta or outer or default_theta
    if kind == "default":
        return Rope(dim, theta, style)
    original = fields.integer("original_max_position_embeddings",
                              section.integer("original_max_position_embeddings", max_position))
    factor = section.number("factor", max_position / original if kind == "yarn" else None)
    if factor is None or factor < 1:
        raise section.refuse("factor", f"rope type {kind!r} needs a factor of 1 or more; correct the config")
    if kind == "linear":
        return Rope(dim, theta, style, kind, factor)
    if kind == "llama3":
        low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
        if low >= high:
            raise section.refuse("high_freq_factor", f"must be above low_freq_factor ({low:g}); correct the config")
        return Rope(dim, theta, style, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
    beta_fast, beta_slow = section.number("beta_fast", 32.0, above=1e-6), section.number("beta_slow", 1.0, above=1e-6)
    if beta_fast < beta_slow:
        raise section.refuse("beta_fast", f"must not be below beta_slow ({beta_slow:g}); correct the config")
    return Rope(dim, theta, style, kind, factor, original, beta_fast, beta_slow,
                section.number("mscale", 0.0, above=-1e-9), section.number("mscale_all_dim", 0.0, above=-1e-9),
                section.number("attention_factor", None), section.flag("truncate", True))
