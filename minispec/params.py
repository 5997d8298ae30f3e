"""What a user may ask of one request, checked when it is said."""

import difflib
import math
import numbers
import operator
from dataclasses import dataclass, fields

from minispec.errors import MinispecError

# field -> (lowest, highest); the bounds keep every processed logit finite in float32
INTEGERS = {"max_tokens": (1, 2**31 - 1), "top_k": (0, 2**31 - 1), "seed": (0, 2**63 - 1)}
NUMBERS = {"temperature": (0.0, 1e6), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (0.01, 100.0),
           "presence_penalty": (-100.0, 100.0), "frequency_penalty": (-100.0, 100.0)}
BIAS = 1000.0  # largest absolute logit bias
COLDEST = 1e-6  # lowest temperature above 0


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Wrong values raise MinispecError with the field, the value and the allowed range.

    max_tokens          tokens emitted at most, 1 or more
    temperature         0 takes the most likely token; else 1e-6 to 1e6 divides the logits
    top_k               keeps the k most likely tokens (with all that tie with the last of them); 0 keeps all
    top_p               keeps the fewest most likely tokens that together reach this probability; (0, 1], 1 keeps all
    min_p               keeps tokens at least min_p times as likely as the likeliest; [0, 1], 0 keeps all
    seed                keys the sampling noise, 0 to 2**63 - 1; the same seed gives the same ids, with or without a draft
    repetition_penalty  logits of ids in prompt or output: above 0 divided, below 0 multiplied by it; 0.01 to 100, 1 is none
    presence_penalty    taken off the logit of an id that the output has; -100 to 100
    frequency_penalty   the same, times its count in the output
    logit_bias          {id: number added to its logit}, -1000 to 1000, or -inf to forbid the id; kept as sorted pairs
    stop                strings (or one string) that end the text, which excludes them
    stop_ids            ids (or one id) that end the output, which includes them
    ignore_eos          goes past the model's own stop ids, not past `stop_ids`
    logprobs            also returns the log-probability of each emitted id under the processed distribution
    Penalties and bias act first, then temperature, top_k, top_p, min_p in this order; at temperature 0 the last three do nothing.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple = ()
    stop: tuple = ()
    stop_ids: tuple = ()
    ignore_eos: bool = False
    logprobs: bool = False

    def __post_init__(self):
        clean = {}
        for name, (low, high) in INTEGERS.items():
            clean[name] = _integer(name, getattr(self, name), low, high)
        for name, (low, high) in NUMBERS.items():
            clean[name] = _number(name, getattr(self, name), low, high)
        if 0 < clean["temperature"] < COLDEST:
            raise _bad("temperature", self.temperature, f"0 (the most likely token) or {COLDEST:g} to 1e+06")
        if clean["top_p"] == 0:
            raise _bad("top_p", self.top_p, "a number above 0 and at most 1; for the most likely token set temperature 0")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        clean["logit_bias"] = _bias(self.logit_bias)
        clean["stop"] = _strings(self.stop)
        one = _is_integer(self.stop_ids)
        stop_ids = (self.stop_ids,) if one else _sequence("stop_ids", self.stop_ids, "an id or a list of ids")
        clean["stop_ids"] = tuple(_integer("stop_ids", value, 0, 2**31 - 1) for value in stop_ids)
        for name, value in clean.items():
            object.__setattr__(self, name, value)

    @classmethod
    def make(cls, **named) -> "SamplingParams":
        """The same as the constructor, but an unknown name is a MinispecError that proposes the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in named:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise MinispecError(f"sampling parameter {name!r} is unknown: {hint}")
        return cls(**named)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocab(self, vocab: int) -> None:
        """Refuses ids outside 0..vocab-1 and a bias that forbids every id."""
        for name, ids in (("stop_ids", self.stop_ids), ("logit_bias", [token for token, _ in self.logit_bias])):
            for token in ids:
                if token >= vocab:
                    raise MinispecError(f"{name}: id {token} is not in the target's vocabulary of {vocab} ids (0 to {vocab - 1})")
        if sum(value == -math.inf for _, value in self.logit_bias) == vocab:
            raise MinispecError(f"logit_bias: all {vocab} ids are forbidden; leave at least one")


def _bad(name, value, wanted):
    return MinispecError(f"{name}: {value!r} is not possible; give {wanted}")


def _is_integer(value):
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _integer(name, value, low, high):
    if not _is_integer(value) or not low <= operator.index(value) <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")
    return operator.index(value)


def _number(name, value, low, high):
    # the comparison also turns NaN away
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not low <= value <= high:
        raise _bad(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _sequence(name, value, wanted):
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _bad(name, value, wanted)
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value


def _strings(value):
    strings = (value,) if isinstance(value, str) else tuple(_sequence("stop", value, "a string or a list of strings"))
    for text in strings:
        if not isinstance(text, str) or not text:
            raise _bad("stop", text, "strings of at least one character")
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise _bad("stop", text, "text that UTF-8 can encode")
    return strings


def _bias(value):
    pairs = list(value.items()) if hasattr(value, "items") else list(_sequence("logit_bias", value, "a dict of id: number"))
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise _bad("logit_bias", value, "a dict of id: number")
    bias = []
    for token, number in pairs:
        token = _integer("logit_bias id", token, 0, 2**31 - 1)
        forbids = isinstance(number, numbers.Real) and number == -math.inf
        bias.append((token, -math.inf if forbids else _number(f"logit_bias of id {token}", number, -BIAS, BIAS)))
    if len({token for token, _ in bias}) < len(bias):
        raise _bad("logit_bias", value, "each id once")
    return tuple(sorted(bias))
