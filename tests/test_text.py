"""Streamed text and stop strings against a search in the whole text; chat templates against transformers."""
import time
from datetime import datetime

import pytest
from hypothesis import given, settings, strategies as st

from minispec.errors import MinispecError
from minispec.text import ChatTemplate, Decoder


class Pieces:
    """A tokenizer of which only decoding is needed: id n prints the n-th piece."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode_bytes(self, ids):
        return b"".join(self.pieces[i] for i in ids)


def run(pieces, cuts=None, stop=()):
    """Push one id after the other, or in rounds that end at cuts; return (text, ids kept or None)."""
    decoder, text, ids, cuts = Decoder(Pieces(*pieces), stop), "", list(range(len(pieces))), cuts or range(len(pieces) + 1)
    for start, end in zip(cuts, cuts[1:]):
        new, kept = decoder.push(ids[start:end])
        text += new
        if kept is not None:
            assert decoder.finish() == ""
            return text, start + kept
    return text + decoder.finish(), None


def whole(pieces, stop):
    """The same from the whole text: the first character at which a stop string ends, the longest of those that end there."""
    seen = [len(b"".join(pieces[:i + 1]).decode("utf-8", "ignore_end")) for i in range(len(pieces))]
    text = b"".join(pieces).decode("utf-8", "ignore_end")
    for end in range(len(text) + 1):
        if fits := [s for s in stop if text[:end].endswith(s)]:
            return text[:end - max(map(len, fits))], next(i + 1 for i, n in enumerate(seen) if n >= end)
    return b"".join(pieces).decode("utf-8", "replace"), None


@pytest.fixture(scope="module", autouse=True)
def ignore_end():
    """A codec error handler: an unfinished character at the end is left out, any other fault becomes U+FFFD."""
    import codecs

    def handler(error):
        rest = error.object[error.start:]
        if error.reason == "unexpected end of data" or len(rest) == 2 and rest[0] == 0xED and 0xA0 <= rest[1] < 0xC0:
            return "", len(error.object)  # the second: Python's decoder waits for all three bytes of a surrogate
        return "\ufffd", error.end
    codecs.register_error("ignore_end", handler)


CHARACTERS = ["a", "b", "é", "中", "😀", "\n", " "]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_split_equals_a_search_in_the_whole_text(data):
    text = "".join(data.draw(st.lists(st.sampled_from(CHARACTERS), max_size=24))).encode()
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)])]
    stop = tuple(data.draw(st.lists(st.text(st.sampled_from(CHARACTERS[:5]), min_size=1, max_size=4), max_size=3)))
    rounds = [0, *sorted(data.draw(st.sets(st.integers(1, max(1, len(pieces) - 1))))), len(pieces)]
    assert run(pieces, stop=stop) == run(pieces, rounds, stop) == whole(pieces, stop)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=3), max_size=12))
def test_bytes_that_are_no_text(pieces):
    assert run(pieces) == (b"".join(pieces).decode("utf-8", "replace"), None)
    stop = ("\ufffd\ufffd", "a", "\ufffd\x00")
    assert run(pieces, stop=stop) == whole(pieces, stop)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("abc"), max_size=20), st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5),
                                                              max_size=3))
def test_nothing_is_held_back_without_need(text, stop):
    decoder, shown = Decoder(Pieces(*(c.encode() for c in text)), tuple(stop)), ""
    for i in range(len(text)):
        new, cut = decoder.push([i])
        shown += new
        if cut is not None:
            break
        seen = text[:i + 1]
        held = max([n for s in stop for n in range(len(s)) if seen.endswith(s[:n])], default=0)
        assert shown == seen[:len(seen) - held]


@pytest.mark.parametrize("pieces, stop, text, kept", [
    ([b"ab", b"cd", b"ef"], ("cd",), "ab", 2),
    ([b"ab", b"cd", b"ef"], ("bcde",), "a", 3),
    ([b"one END two END"], ("END",), "one ", 1),                    # the end and more in one id
    ([b"a", b"bc", b"d"], ("abcd", "bc"), "a", 2),                  # the earliest completion
    ([b"a", b"bc", b"d"], ("abc", "bc", "c"), "", 2),               # the longest of those that end there
    ([b"a", b"bc", b"d"], ("c", "bc", "abc"), "", 2),
    ([b"a", b"a", b"b"], ("ab",), "a", 3),
    ([b"abab", b"abc"], ("ababc",), "ab", 2),                       # overlaps itself
    (["日".encode()[:2], "日".encode()[2:] + "本".encode()], ("日",), "", 2),
    ([b"x", "😀".encode()[:1], "😀".encode()[1:3], "😀".encode()[3:]], ("😀",), "x", 4),
    ([b"x", b"", b"y"], ("xy",), "", 3),                            # an id that prints nothing
    ([b"en", b"d"], ("end!",), "end", None),                        # begun and never completed: shown at the end
    (["é".encode()[:1]], (), "\ufffd", None),
    ([b"\xed\xa0", b"\x80x"], ("x",), "\ufffd\ufffd\ufffd", 2),
    ([b"\xed\xa0"], ("\ufffd",), "\ufffd\ufffd", None),
    ([b"", "é".encode()[:1], b"x"], ("\ufffdx",), "", 3),
])
def test_cases(pieces, stop, text, kept):
    assert run(pieces, stop=stop) == run(pieces, [0, len(pieces)], stop) == (text, kept)


def test_work_is_linear_in_the_text():
    """A stop string of thousands of characters that is always about to be complete, in a long text."""
    begun = time.perf_counter()
    pieces = [b"a"] * 4_999 + [b"c"]
    assert run(pieces * 20, stop=("a" * 5_000 + "b", "a" * 2_500 + "b"))[1] is None
    assert time.perf_counter() - begun < 5


def test_without_a_tokenizer_there_is_no_text():
    decoder = Decoder(None)
    assert decoder.push([1, 2]) == ("", None) and decoder.finish() == ""


@pytest.mark.parametrize("tokenizer, stop", [(None, ("a",)), (Pieces(), ("",)), (Pieces(), "ab"), (Pieces(), (1,))])
def test_stop_strings_that_are_refused(tokenizer, stop):
    with pytest.raises(MinispecError, match="stop is"):
        Decoder(tokenizer, stop)


TEMPLATES = ["{% for m in messages %}\n  {% if m.role == 'user' %}\n[U] {{ m.content }}\n  {%- endif %}\n{% endfor %}\n",
             "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
             "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m['content'] | trim }}{% endfor %}",
             "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}",
             "{{ bos_token }}{{ messages[0].nothing }}{% if add_generation_prompt %}go{% endif %}"]
MESSAGES = [{"role": "user", "content": " <é> & \"x\" "}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("source", TEMPLATES)
def test_templates_render_as_in_transformers(source):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    variables = {"messages": MESSAGES, "bos_token": "<s>", "add_generation_prompt": True}
    expected = utils._compile_jinja_template(source).render(**variables)
    assert ChatTemplate(source, "here").render(variables, datetime.now()) == expected


def test_the_date_in_a_template():
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", "here").render({}, datetime(2025, 3, 4)) == "04 Mar 2025"


@pytest.mark.parametrize("source, words", [
    ("{% if %}", "does not parse, line 1"), ("{{ 1", "does not parse"), ("{% unknown %}", "does not parse"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ("{{ messages.append(1) }}", "SecurityError"), ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
    ("{{ '{0.__class__.__mro__}'.format(1) }}", "SecurityError"),
    ("{% for i in range(10**9) %}{% endfor %}", "OverflowError"),
    ("{{ missing.field }}", "UndefinedError"), ("{{ 1 / 0 }}", "ZeroDivision"),
    ("{{ 'a' + 1 }}", "TypeError"), ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ("{% include '/etc/passwd' %}", "TypeError"), ("{% import 'os' as os %}", "TypeError"),
])
def test_templates_that_fail_or_reach_out(source, words):
    with pytest.raises(MinispecError, match=words) as caught:
        ChatTemplate(source, "some/tokenizer_config.json chat_template").render({"messages": MESSAGES}, datetime.now())
    assert str(caught.value).startswith("some/tokenizer_config.json chat_template: ")


@pytest.mark.parametrize("source", ["{{ raise_exception.__globals__ }}", "{{ ''|attr('__class__')|attr('__mro__') }}",
                                    "{{ ''.__class__ }}"])
def test_what_the_sandbox_hides_prints_nothing(source):
    assert ChatTemplate(source, "here").render({}, datetime.now()) == ""
