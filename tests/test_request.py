"""A request ends where one-token-at-a-time decoding ends, however its tokens come in rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from minispec.errors import MinispecError
from minispec.params import SamplingParams
from minispec.request import Request
from minispec.text import Decoder


class Letters:
    """A tokenizer whose id n is the n-th small letter, then the bytes of two characters that take three ids each."""

    def decode_bytes(self, ids):
        return b"".join((b"abcdefghijklmnopqrstuvwxyz" + "\u20ac\u20ad".encode())[token:token + 1] for token in ids)


def request(prompt=(1, 2, 3), max_length=1000, eos=(), index=0, decoder=True, **params):
    params = SamplingParams(**params)
    return Request(index, list(prompt), params, eos, max_length, Decoder(Letters(), params.stop) if decoder else None)


def started(first=0, **named):
    made = request(**named)
    made.length = len(made.prompt_ids)
    made.take([first], [-0.5])
    return made


def test_a_request_from_prefill_to_end():
    made = request(prompt=range(5), max_tokens=6, logprobs=True)
    assert made.prefilling and made.room == 6 and made.limit == 11
    made.length = 5
    event = made.take([7], [-1.0])
    assert (event.ids, event.accepted, event.finish_reason, event.text) == ([7], None, None, "h")
    assert not made.prefilling and made.ids[-1] == 7 and made.length == 5 and made.room == 5 and made.accepted == []
    event = made.take([1, 2, 3], [-1.0, -2.0, -3.0])
    assert (event.ids, event.accepted, event.finish_reason) == ([1, 2, 3], 2, None)
    assert made.length == 8 and made.ids[-1] == 3 and made.room == 2
    event = made.take([4, 5, 6], [-4.0, -5.0, -6.0])
    assert (event.ids, event.accepted, event.finish_reason) == ([4, 5], 2, "length")
    output = made.output()
    assert output.ids == [7, 1, 2, 3, 4, 5] and output.text == "hbcdef" and output.accepted == [2, 2]
    assert output.logprobs == [-1.0, -1.0, -2.0, -3.0, -4.0, -5.0] and output.finish_reason == "length"


def test_uncut_lengths_add_up():
    made = started(max_tokens=30)
    for accepted in (0, 3, 6, 1, 2):
        made.take([1] * (accepted + 1))
    assert len(made.ids) == 1 + sum(count + 1 for count in made.accepted) and made.length == 3 + len(made.ids) - 1


@pytest.mark.parametrize("kind", ["id", "eos", "string", "long string"])
@pytest.mark.parametrize("cap", range(5))
@pytest.mark.parametrize("stop", range(5))
def test_grid_of_stop_and_cap(stop, cap, kind):
    """Stop and cap anywhere in an accepted run of 4 and its bonus: the same as one token at a time, and stop wins a tie."""
    run = [10, 11, 12, 13, 14]
    named = {"id": dict(stop_ids=[10 + stop]), "eos": dict(eos=[10 + stop]), "string": dict(stop=chr(ord("a") + 10 + stop)),
             "long string": dict(stop=chr(ord("a") + 9 + stop) + chr(ord("a") + 10 + stop))}[kind]
    logprobs = [-float(n) for n in range(5)]
    together = started(first=9, max_tokens=1 + cap + 1, logprobs=True, **named)
    event = together.take(run, logprobs)
    single = started(first=9, max_tokens=1 + cap + 1, logprobs=True, **named)
    for token, logprob in zip(run, logprobs):
        if not single.finish_reason:
            single.take([token], [logprob])
    assert (together.ids, together.text, together.finish_reason, together.logprobs, together.length) == (
        single.ids, single.text, single.finish_reason, single.logprobs, single.length)
    kept = min(stop, cap) + 1
    assert event.ids == run[:kept] and together.accepted == [min(kept, 4)] and together.ids == [9] + run[:kept]
    assert together.finish_reason == ("stop" if stop <= cap else "length") == event.finish_reason
    visible = 1 + kept if stop > cap else 1 + stop - (kind == "long string")
    assert together.text == "jklmno"[:visible] and len(together.logprobs) == len(together.ids)


@pytest.mark.parametrize("k", range(5))
def test_a_bonus_that_stops_was_a_bonus(k):
    made = started(stop_ids=[25])
    assert made.take([1] * k + [25]).accepted == k and made.finish_reason == "stop" and made.ids == [0] + [1] * k + [25]


@pytest.mark.parametrize("named,reason,text", [
    (dict(stop_ids=[4]), "stop", ""), (dict(eos=[4]), "stop", ""), (dict(stop="e"), "stop", ""),
    (dict(max_tokens=1), "length", "e"), (dict(max_tokens=1, eos=[4]), "stop", ""), (dict(max_length=4), "length", "e"),
    (dict(max_tokens=1, stop="ef"), "length", "e")])
def test_the_first_token_may_end_it(named, reason, text):
    made = started(first=4, **named)
    assert (made.finish_reason, made.ids, made.accepted, made.text, made.length) == (reason, [4], [], text, 3)


def test_ignore_eos_keeps_own_stops():
    made = started(eos=[5], stop_ids=[6], ignore_eos=True)
    made.take([5, 6, 7])
    assert made.ids == [0, 5, 6] and made.finish_reason == "stop" and made.text == "af"
    assert started(eos=[5]).take([5, 6]).ids == [5]


def test_held_text_comes_at_the_end():
    made = started(max_tokens=4, stop="bcd")
    assert made.take([1]).text == "" and made.take([2]).text == "" and made.take([1]).text == "bcb"
    assert made.text == "abcb" and made.finish_reason == "length"
    made = started(stop="bcd", stop_ids=[9])
    assert made.take([1, 2, 9]).text == "bc"


def test_context_is_exact():
    made = started(prompt=range(6), max_length=10, max_tokens=100)
    assert made.limit == 10 and made.room == 3
    assert made.take([1] * 7).ids == [1] * 3 and made.finish_reason == "length" and made.room == 0


def test_without_tokenizer():
    made = started(decoder=False, stop_ids=[3])
    assert made.take([1, 3, 5]).text is None and made.output().text is None and made.ids == [0, 1, 3]
    with pytest.raises(MinispecError, match="stop 'x' needs a tokenizer"):
        request(decoder=False, stop="x")


def test_refused_prompts():
    with pytest.raises(MinispecError, match="prompt 4 is empty"):
        request(prompt=[], index=4)
    for size in (8, 9):
        with pytest.raises(MinispecError, match=f"prompt 0 has {size} tokens and max_length is 8"):
            request(prompt=[1] * size, max_length=8)
    assert request(prompt=[1] * 7, max_length=8).room == 1


TOKENS = some.sampled_from([0, 1, 2, 3, 26, 27, 28, 29, 30, 31])


@given(some.lists(TOKENS, min_size=1, max_size=24), some.lists(some.integers(0, 5), min_size=1), some.integers(1, 24),
       some.sets(TOKENS, max_size=1), some.lists(some.text("abc\u20ac", min_size=1, max_size=3), max_size=2))
def test_any_split_into_rounds_gives_the_same(tokens, sizes, cap, stop_ids, stop):
    named = dict(max_tokens=cap, stop_ids=stop_ids, stop=stop, logprobs=True)
    whole, single = (request(**named) for _ in range(2))
    whole.length = single.length = 3
    for token in tokens:
        if not single.finish_reason:
            single.take([token], [float(token)])
    rest = list(tokens)
    take, rest = rest[:1], rest[1:]
    whole.take(take, [float(token) for token in take])
    for size in sizes + [1] * len(tokens):
        if rest and not whole.finish_reason:
            take, rest = rest[:size + 1], rest[size + 1:]
            whole.take(take, [float(token) for token in take])
    assert (whole.ids, whole.finish_reason, whole.logprobs, whole.length, whole.room) == (
        single.ids, single.finish_reason, single.logprobs, single.length, single.room)
    assert whole.text + whole.decoder.finish() == single.text + single.decoder.finish()
    if whole.finish_reason is None:
        assert len(whole.ids) == 1 + sum(count + 1 for count in whole.accepted)
