"""SamplingParams: every impossible value is one clear line; every possible one is kept exactly."""

import math
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some

from minispec.errors import MinispecError
from minispec.params import SamplingParams

BAD = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.0), ("max_tokens", True), ("max_tokens", "8"), ("max_tokens", None),
    ("max_tokens", 2**31),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", 1e-7), ("temperature", 2e6),
    ("temperature", "1"), ("temperature", True), ("temperature", None), ("temperature", 1j), ("temperature", 10**400),
    ("top_k", -1), ("top_k", 2.5), ("top_k", False), ("top_k", 2**31),
    ("top_p", 0), ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.0001), ("top_p", math.nan), ("top_p", True),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", math.nan), ("min_p", [0.1]),
    ("seed", -1), ("seed", 2**63), ("seed", 0.5), ("seed", True), ("seed", None),
    ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", math.inf), ("repetition_penalty", 101),
    ("presence_penalty", math.nan), ("presence_penalty", 101), ("frequency_penalty", -math.inf), ("frequency_penalty", "x"),
    ("logit_bias", {"5": 1.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}), ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: 1001}), ("logit_bias", {1: "x"}), ("logit_bias", {True: 1.0}), ("logit_bias", 5), ("logit_bias", [1, 2]),
    ("logit_bias", [(1, 2.0), (1, 3.0)]), ("logit_bias", None), ("logit_bias", {1: True}),
    ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", None), ("stop", b"x"), ("stop", "\ud800"),
    ("stop_ids", -1), ("stop_ids", [1.0]), ("stop_ids", [True]), ("stop_ids", "12"), ("stop_ids", None), ("stop_ids", {"a"}),
    ("ignore_eos", 1), ("ignore_eos", None), ("logprobs", 5), ("logprobs", "yes"),
]


@pytest.mark.parametrize("name,value", BAD, ids=lambda value: repr(value)[:20])
def test_impossible_values_are_named(name, value):
    with pytest.raises(MinispecError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(name) and "give " in message and "\n" not in message
    if not isinstance(value, (list, dict, set)):
        assert repr(value) in message


def test_defaults_are_greedy():
    params = SamplingParams()
    assert params.temperature == 0 and params.max_tokens == 128 and params.stop == params.stop_ids == params.logit_bias == ()


def test_values_are_kept_in_one_form():
    params = SamplingParams(max_tokens=numpy.int32(3), top_k=numpy.int64(2), temperature=numpy.float32(0.5), top_p=1, stop="end",
                            stop_ids=7, logit_bias={numpy.int64(9): -math.inf, 2: 1}, seed=2**63 - 1)
    assert params.stop == ("end",) and params.stop_ids == (7,) and params.logit_bias == ((2, 1.0), (9, -math.inf))
    assert type(params.max_tokens) is int and type(params.top_k) is int and type(params.temperature) is float
    assert type(params.top_p) is float and params.seed == 2**63 - 1 and isinstance(params.logit_bias[0][1], float)
    assert SamplingParams(stop=["a", "b"], stop_ids={3, 1}).stop == ("a", "b")
    assert SamplingParams(logit_bias={}) == SamplingParams()


def test_frozen_equal_hashable_copied():
    params = SamplingParams(temperature=0.7, logit_bias={3: 1.5}, stop=["x"], stop_ids=[4])
    with pytest.raises(FrozenInstanceError):
        params.seed = 1
    assert replace(params, seed=5).logit_bias == params.logit_bias
    assert pickle.loads(pickle.dumps(params)) == params and hash(params) == hash(replace(params))
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == ((1, 2.0),)


def test_unknown_names():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1)


def test_vocabulary():
    SamplingParams(stop_ids=[9], logit_bias={9: 1.0, 0: -math.inf}).check_vocab(10)
    for params, name in ((SamplingParams(stop_ids=[3, 10]), "stop_ids"), (SamplingParams(logit_bias={10: 1}), "logit_bias")):
        with pytest.raises(MinispecError, match=f"{name}: id 10 is not in the target's vocabulary of 10 ids"):
            params.check_vocab(10)
    with pytest.raises(MinispecError, match="all 3 ids are forbidden"):
        SamplingParams(logit_bias=dict.fromkeys(range(3), -math.inf)).check_vocab(3)


ANYTHING = some.one_of(some.none(), some.booleans(), some.integers(), some.floats(), some.text(max_size=3),
                       some.binary(max_size=2), some.complex_numbers(),
                       some.lists(some.one_of(some.integers(), some.text(max_size=2)), max_size=3),
                       some.dictionaries(some.integers(-2, 5), some.floats(), max_size=3), some.fractions())


@given(some.dictionaries(some.sampled_from(list(SamplingParams.__dataclass_fields__)), ANYTHING, max_size=3))
def test_anything_is_kept_or_refused(named):
    """Whatever is given, the result is a MinispecError or params within their ranges."""
    try:
        params = SamplingParams(**named)
    except MinispecError:
        return
    assert 1 <= params.max_tokens and 0 <= params.temperature <= 1e6 and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1
    assert 0 <= params.seed < 2**63 and params.top_k >= 0 and 0.01 <= params.repetition_penalty <= 100
    assert all(text for text in params.stop) and all(token >= 0 for token in params.stop_ids)
    assert all(value == -math.inf or abs(value) <= 1000 for _, value in params.logit_bias)
    assert replace(params) == params and hash(params) is not None
