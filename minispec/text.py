"""Text at both ends of the engine: a chat template on the way in, streamed text and stop strings on the way out."""
import codecs
import json
import re
from dataclasses import dataclass
from datetime import datetime

from minispec.errors import MinispecError
from minispec.vocabulary import Vocabulary, split


class Decoder:
    """Text of one request as its ids arrive: never half a UTF-8 character, never a part of a stop string.

    A stop string is looked for in the decoded text, so it may span ids, and one id may hold its end and more. The
    earliest completion wins; of several that end at the same character, the longest. One Knuth-Morris-Pratt state
    for each stop string keeps the work linear in the text.
    """

    def __init__(self, tokenizer, stop: tuple[str, ...] = ()):
        """tokenizer: a Tokenizer, or None (the text is then always empty, and stop strings are refused)."""
        if stop and tokenizer is None:
            raise MinispecError(f"stop is {stop!r} but the target has no tokenizer: use stop_ids")
        if isinstance(stop, str) or not all(isinstance(s, str) and s for s in stop):
            raise MinispecError(f"stop is {stop!r}: give a sequence of strings, none of them empty")
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [(s, _failures(s)) for s in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stops)  # how many characters of each stop string the text so far ends with
        self._held = ""  # the end of the text, which may turn out to begin a stop string

    def push(self, ids: list[int]) -> tuple[str, int | None]:
        """Take the next ids; return (text that is safe to show, cut).

        cut is None, or how many of these ids are kept because the last of them completed a stop string: the text of
        the request then ends before that string, and nothing may be pushed after it.
        """
        if self._tokenizer is None:
            return "", None
        shown = []
        for count, token in enumerate(ids, 1):
            new = self._utf8.decode(self._tokenizer.decode_bytes([token]))
            for end, character in enumerate(new if self._stops else "", 1):
                if length := self._step(character):
                    shown.append((self._held + new[:end])[:-length])
                    self._held = ""
                    self._utf8.reset()
                    return "".join(shown), count
            text, keep = self._held + new, max(self._matched, default=0)
            shown.append(text[:len(text) - keep])
            self._held = text[len(text) - keep:]
        return "".join(shown), None

    def finish(self) -> str:
        """The text held back, once no more ids come; an unfinished character becomes U+FFFD."""
        text, self._held = self._held + self._utf8.decode(b"", final=True), ""
        return text

    def _step(self, character: str) -> int:
        """Advance every stop string by one character; return the length of the longest one now complete, or 0."""
        done = 0
        for i, (stop, failures) in enumerate(self._stops):
            n = self._matched[i]
            while n and stop[n] != character:
                n = failures[n - 1]
            n += stop[n] == character
            self._matched[i] = n
            if n == len(stop):
                done = max(done, n)
        return done


def _failures(pattern: str) -> list[int]:
    """For each prefix of the pattern, the length of its longest proper prefix that is also its suffix."""
    table, n = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while n and pattern[i] != pattern[n]:
            n = table[n - 1]
        n += pattern[i] == pattern[n]
        table[i] = n
    return table


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja chat template, rendered in a sandbox with the names and the whitespace rules that transformers gives one."""
    source: str  # the template
    where: str   # the file it came from, for errors

    def encode(self, vocabulary: Vocabulary, names: dict, messages, variables: dict) -> tuple[list[int], str]:
        """(ids, text) of a chat; see Tokenizer.chat. names: bos_token and the like; variables: what else a template gets.

        User text that reads like a control token, or ends like the beginning of one, has its first character replaced
        by a private one while the template works: one for one, so that lengths, trims and slices stay as they were.
        The control tokens in the result are then the template's own. With the characters put back, the text must be
        what the template makes of the messages as they are: otherwise it looked at such text, and the chat is refused.
        """
        special, now = vocabulary.special, datetime.now()
        data = _plain_json({**variables, "messages": _messages(messages, special)})
        text = unicode_text(self.render({**names, **data}, now), "the chat")
        used = {*text, *self.source, *json.dumps(data, ensure_ascii=False)}
        private = (c for c in map(chr, (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))) if c not in used)
        masks = dict(zip(sorted({name[0] for name in special}), private))
        guarded, ids = _guard(data, special, masks), vocabulary.marked(text)
        if guarded == data:
            return ids, text
        unmask = {ord(mask): character for character, mask in masks.items()}
        parts = [(part if token is not None else part.translate(unmask), token)
                 for part, token in split(self.render({**names, **guarded}, now), special)]
        if "".join(part for part, _ in parts) != text or ids != vocabulary.join(split(text, special)):
            raise MinispecError(f"{self.where}: a message has text like the control token {_like(data, special)!r}, which the "
                                "chat template or the tokenizer cannot treat as plain text here: remove it from the message")
        return vocabulary.join(parts), text

    def render(self, variables: dict, now: datetime) -> str:
        """The text of a chat. variables: plain JSON values; now: what `strftime_now` in the template formats."""
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message):
            raise jinja2.TemplateError(message)

        def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = tojson  # jinja's own escapes HTML
        environment.globals.update(raise_exception=refuse, strftime_now=lambda form: now.strftime(form))
        try:
            return environment.from_string(self.source).render(variables)
        except jinja2.TemplateSyntaxError as error:
            raise MinispecError(f"{self.where}: the chat template does not parse, line {error.lineno}: {error.message}: "
                                "correct it, or leave out --chat") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                RecursionError, MemoryError) as error:
            raise MinispecError(f"{self.where}: the chat template fails on these messages, {type(error).__name__}: {error}: "
                                "change the messages, or leave out --chat") from error


def unicode_text(text: str, what: str) -> str:
    """The text itself, if it is text and can be UTF-8."""
    if not isinstance(text, str):
        raise MinispecError(f"{what} is {text!r}: give text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MinispecError(f"{what} has {text[error.start]!r} at character {error.start}, half a surrogate pair, which is not "
                            "UTF-8: remove it") from error
    return text


def _messages(messages, special: dict[str, int]) -> list[dict]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, (list, tuple)) or not messages:
        raise MinispecError(f"messages are {messages!r}: give a user's message, or a list of {{'role': ..., 'content': ...}}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise MinispecError(f"message {i} is {message!r}: give {{'role': 'user', 'content': ...}}")
        if name := next((name for name in special if name in message["role"]), None):
            raise MinispecError(f"message {i} has the role {message['role']!r} with the control token {name!r}: remove it")
    # as transformers does: a template would print the None
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _plain_json(value):
    """A copy of lists, dicts, strings and numbers: nothing else, no subclass of these, may reach a template."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise MinispecError(f"messages and template variables must be plain JSON values: {error}") from error


def _guard(value, special: dict[str, int], masks: dict[str, str]):
    """The value with every string in it (a message's role apart) masked where it reads like a control token."""
    if isinstance(value, list):
        return [_guard(item, special, masks) for item in value]
    if isinstance(value, dict):
        return {_guard(k, special, masks): v if k == "role" else _guard(v, special, masks) for k, v in value.items()}
    if not isinstance(value, str) or not special:
        return value
    name = re.compile("|".join(map(re.escape, special)))
    value = re.sub(f"[{re.escape(''.join(masks))}]", lambda m: masks[m[0]] if name.match(m.string, m.start()) else m[0], value)
    body = value.rstrip()  # a template may trim the rest
    for i in range(max(0, len(body) - max(map(len, special))), len(body)):
        if any(name.startswith(body[i:]) for name in special):
            value = value[:i] + masks[value[i]] + value[i + 1:]
    return value


def _like(data: dict, special: dict[str, int]) -> str:
    """A control token whose text stands in the data, whole or else begun."""
    text = json.dumps(data, ensure_ascii=False)
    return next((name for name in special if name in text), next((name for name in special if name[0] in text), ""))
