"""Text at both ends of the engine: a chat template on the way in, streamed text and stop strings on the way out."""
import codecs
import json
import re
from dataclasses import dataclass
from datetime import datetime

from minispec.errors import MinispecError
from minispec.vocabulary import Vocabulary, any_of, join, split


class Decoder:
    """Text of one request as its ids arrive: never half a UTF-8 character, never a part of a stop string.

    A stop string may span ids, and one id may hold its end and more. The earliest completion wins; of several that end at the
    same character, the longest. One Knuth-Morris-Pratt state for each stop string keeps the work linear in the text.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        """tokenizer: a Tokenizer, or None (the text is then always empty, and stop strings are refused)."""
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop) or (stop and tokenizer is None):
            raise MinispecError(f"stop is {stop!r}: give strings that are not empty, or stop_ids where there is no tokenizer")
        self._tokenizer, self._stops, self._fallbacks = tokenizer, stop, []
        for string in stop:
            table = [0]  # for each prefix, the length of its longest proper prefix that is also its suffix
            for character in string[1:]:
                table.append(_advance(string, table, table[-1], character))
            self._fallbacks.append(table)
        self._matched = [0] * len(stop)  # how many characters of each stop string the text so far ends with
        self._held = ""  # the end of the text, which may turn out to begin a stop string
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> tuple[str, int | None]:
        """Take the next ids; return (text that is safe to show, cut).

        cut is None, or how many of these ids are kept because the last of them completed a stop string: the text of the request
        then ends before that string, and nothing may be pushed after it.
        """
        if not self._stops:         # a round of four tokens takes 5 us, not 30
            return self._utf8.decode(self._tokenizer.decode_bytes(ids)) if self._tokenizer else "", None
        shown = ""
        for count, token in enumerate(ids, 1):
            new = self._utf8.decode(self._tokenizer.decode_bytes([token]))
            text = self._held + new
            for end, character in enumerate(new, len(self._held) + 1):
                self._matched = [_advance(*state, character) for state in zip(self._stops, self._fallbacks, self._matched)]
                if done := max((n for stop, n in zip(self._stops, self._matched) if n == len(stop)), default=0):
                    self._held = ""
                    self._utf8.reset()
                    return shown + text[:end - done], count
            safe = len(text) - max(self._matched, default=0)
            shown, self._held = shown + text[:safe], text[safe:]
        return shown, None

    def finish(self) -> str:
        """The text held back, once no more ids come; an unfinished character becomes U+FFFD."""
        text, self._held = self._held + self._utf8.decode(b"", final=True), ""
        return text


def _advance(stop: str, table: list[int], n: int, character: str) -> int:
    """Characters of `stop` that the text ends with after one more, which ended with n < len(stop) of them before."""
    while n and stop[n] != character:
        n = table[n - 1]
    return n + (stop[n] == character)


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja chat template, rendered in a sandbox with the names and the whitespace rules that transformers gives one."""
    source: str  # the template
    where: str   # the file it came from, for errors

    def encode(self, vocabulary: Vocabulary, names: dict, messages, variables: dict) -> tuple[list[int], str]:
        """(ids, text) of a chat; see Tokenizer.chat. names: bos_token and the like; variables: what else a template gets.

        User text that reads like a control token, or ends like the beginning of one, has its first character replaced by a
        private one while the template works: one for one, so that lengths, trims and slices stay as they were. The control tokens
        in the result are then the template's own. With the characters put back, the text must be what the template makes of the
        messages as they are: otherwise it looked at such text, and the chat is refused.
        """
        special, now = vocabulary.special, datetime.now()
        data = {**variables, "messages": _messages(messages, special)}
        try:  # a copy of lists, dicts, strings and numbers: nothing else, no subclass of these, may reach a template
            data = json.loads(json.dumps(data))
        except (TypeError, ValueError, RecursionError) as error:
            raise MinispecError(f"messages and template variables must be plain JSON values: {error}") from error
        text = unicode_text(self.render({**names, **data}, now), "the chat")
        ids, said = vocabulary.marked(text), json.dumps(data, ensure_ascii=False)
        used = {*text, *self.source, *said, *"".join(special)}
        private = (character for character in map(chr, range(0xF0000, 0x10FFFE)) if character not in used)
        masks = dict(zip(sorted({name[0] for name in special}), private))
        begun = {name[:n] for name in special for n in range(1, len(name) + 1)}  # a template may trim what follows
        control = re.compile(rf"(?=(?:{any_of(special)})|(?:{any_of(begun)})\s*\Z)(.)", re.DOTALL)
        guarded = _changed(data, lambda string: control.sub(lambda match: masks[match[0]], string)) if special else data
        if guarded == data:
            return ids, text
        unmask = {ord(mask): character for character, mask in masks.items()}
        parts = [(part.translate(unmask), token) for part, token in split(self.render({**names, **guarded}, now), special)]
        if "".join(part for part, _ in parts) != text or ids != join(split(text, special), vocabulary.plain):
            name = max(special, key=lambda name: (name in said, name[0] in said))
            raise MinispecError(f"{self.where}: a message has text like the control token {name!r}, which template or tokenizer "
                                "cannot treat as plain text here: remove it from the message")
        return join(parts, vocabulary.plain), text

    def render(self, variables: dict, now: datetime) -> str:
        """The text of a chat. variables: plain JSON values; now: what `strftime_now` in the template formats."""
        import jinja2.sandbox

        def refuse(message):
            raise jinja2.TemplateError(message)

        def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # jinja's own escapes HTML
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                                   extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = tojson
        environment.globals.update(raise_exception=refuse, strftime_now=now.strftime)
        try:
            return environment.from_string(self.source).render(variables)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                RecursionError, MemoryError) as error:
            what = f"fails on these messages, {type(error).__name__}: {error}"
            if isinstance(error, jinja2.TemplateSyntaxError):
                what = f"does not parse, line {error.lineno}: {error.message}"
            raise MinispecError(f"{self.where}: the chat template {what}: correct it, or leave out --chat") from error


def unicode_text(text: str, what: str) -> str:
    """The text itself, if it is text and can be UTF-8."""
    if not isinstance(text, str):
        raise MinispecError(f"{what} is {text!r}: give text")
    if half := re.search(r"[\ud800-\udfff]", text):  # of a surrogate pair
        raise MinispecError(f"{what} has {half[0]!r} at character {half.start()}, which is not UTF-8: remove it")
    return text


def _messages(messages, special: dict[str, int]) -> list[dict]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, (list, tuple)) or not messages:
        raise MinispecError(f"messages are {messages!r}: give a user's message, or a list of {{'role': ..., 'content': ...}}")
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or any(name in role for name in special):
            raise MinispecError(f"message {i} is {message!r}: give {{'role': ..., 'content': ...}}, no control token in the role")
    # as transformers does: a template would print the None
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _changed(value, change):
    """A JSON value with every string in it changed."""
    if isinstance(value, list):
        return [_changed(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _changed(item, change) for key, item in value.items()}
    return change(value) if isinstance(value, str) else value
