"""What a user may ask of one request, checked when it is said."""
import math
import numbers
from dataclasses import dataclass

from minispec.errors import MinispecError

# field -> (type, lowest, highest); the bounds keep every processed logit finite in float32
RANGES = {"max_tokens": (int, 1, 2**31 - 1), "top_k": (int, 0, 2**31 - 1), "seed": (int, 0, 2**63 - 1),
          "temperature": (float, 0.0, 1e6), "top_p": (float, 0.0, 1.0), "min_p": (float, 0.0, 1.0),
          "repetition_penalty": (float, 0.01, 100.0), "presence_penalty": (float, -100.0, 100.0),
          "frequency_penalty": (float, -100.0, 100.0)}
ID, BIAS = (int, 0, 2**31 - 1), (float, -1000.0, 1000.0)
COLDEST, LEAST_P = 1e-6, 1e-30  # lowest temperature above 0; lowest top_p: fp32 holds it


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued. Wrong values raise MinispecError with the field, the value and the range (RANGES, ID, BIAS).

    Penalties and bias act first, then temperature, top_k, top_p, min_p in this order; at temperature 0 the last three do nothing.
    """
    max_tokens: int = 128            # tokens emitted at most
    temperature: float = 0.0         # 0 takes the most likely token; else 1e-6 to 1e6 divides the logits
    top_k: int = 0                   # keeps the k most likely tokens (with all that tie with the last of them); 0 keeps all
    top_p: float = 1.0               # keeps the fewest most likely tokens that together reach this probability; 1 keeps all
    min_p: float = 0.0               # keeps tokens at least min_p times as likely as the likeliest; 0 keeps all
    seed: int = 0                    # keys the sampling noise; the same seed gives the same ids, with or without a draft
    repetition_penalty: float = 1.0  # logits of ids in prompt or output: above 0 divided, below 0 multiplied by it; 1 is none
    presence_penalty: float = 0.0    # taken off the logit of an id that the output has
    frequency_penalty: float = 0.0   # the same, times its count in the output
    logit_bias: tuple = ()           # {id: number added to its logit, or -inf to forbid the id}; kept as sorted pairs
    stop: tuple = ()                 # strings (or one string) that end the text, which excludes them
    stop_ids: tuple = ()             # ids (or one id) that end the output, which includes them
    ignore_eos: bool = False         # goes past the model's own stop ids, not past `stop_ids`
    logprobs: bool = False           # also returns the log-probability of each emitted id under the processed distribution

    def __post_init__(self):
        clean = {name: _within(name, getattr(self, name), *bounds) for name, bounds in RANGES.items()}
        if 0 < clean["temperature"] < COLDEST:
            raise _bad("temperature", self.temperature, f"0 (the most likely token) or {COLDEST:g} to 1e+06")
        if clean["top_p"] < LEAST_P:
            raise _bad("top_p", self.top_p, f"a number above 0 ({LEAST_P:g} at least) and at most 1; for the most likely token set temperature 0")
        for name in ("ignore_eos", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise _bad(name, getattr(self, name), "True or False")
        clean["stop"] = _several("stop", self.stop, str, "strings")
        for text in clean["stop"]:
            if not isinstance(text, str) or not text or text.encode("utf-8", "ignore").decode() != text:
                raise _bad("stop", text, "strings of at least one character that UTF-8 can encode")
        stop_ids = _several("stop_ids", self.stop_ids, numbers.Integral, "ids")
        clean["stop_ids"] = tuple(_within("stop_ids", token, *ID) for token in stop_ids)
        clean["logit_bias"] = _bias(self.logit_bias)
        vars(self).update(clean)  # past the frozen __setattr__

    def check_vocab(self, vocab: int) -> None:
        """Refuses ids outside 0..vocab-1 and a bias that forbids every id."""
        for name, ids in (("stop_ids", self.stop_ids), ("logit_bias", dict(self.logit_bias))):
            if max(ids, default=0) >= vocab:
                raise MinispecError(f"{name}: id {max(ids)} is not in the target's vocabulary of {vocab} ids (0 to {vocab - 1})")
        if sum(value == -math.inf for _, value in self.logit_bias) == vocab:
            raise MinispecError(f"logit_bias: all {vocab} ids are forbidden; leave at least one")


def _bad(name, value, wanted):
    return MinispecError(f"{name}: {value!r} is not possible; give {wanted}")


def _within(name, value, kind, low, high):
    """The value as `kind`. NaN fails the comparison; bool is a number to Python, not to us."""
    abstract, words = (numbers.Integral, "an integer") if kind is int else (numbers.Real, "a number")
    if isinstance(value, bool) or not isinstance(value, abstract) or not low <= value <= high:
        raise _bad(name, value, f"{words} from {low} to {high}")
    return kind(value)


def _several(name, value, kind, nouns) -> tuple:
    if not isinstance(value, (kind, list, tuple, set, frozenset)):
        raise _bad(name, value, f"a list of {nouns}, or one of them")
    return (value,) if isinstance(value, kind) else tuple(value)


def _bias(value) -> tuple:
    pairs = list(value.items()) if hasattr(value, "items") else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise _bad("logit_bias", value, "a dict of id: number")
    bias = {}
    for token, number in pairs:
        forbids = isinstance(number, numbers.Real) and number == -math.inf
        bias[_within("logit_bias id", token, *ID)] = -math.inf if forbids else _within(f"logit_bias of id {token}", number, *BIAS)
    if len(bias) < len(pairs):
        raise _bad("logit_bias", value, "each id once")
    return tuple(sorted(bias.items()))
