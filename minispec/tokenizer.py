"""The tokenizer of a checkpoint: text or chat messages to ids, ids to bytes; and the ids that end an answer."""
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

from minispec.errors import MinispecError
from minispec.fields import Fields, present, read_json, refuse_first
from minispec.text import ChatTemplate, unicode_text
from minispec.vocabulary import Vocabulary, added_tokens, read_vocabulary


@dataclass(frozen=True, eq=False)
class Tokenizer:
    vocabulary: Vocabulary
    bos: tuple[int, ...]                # what `encode` prefixes: one id with add_bos_token, else none
    names: dict[str, str]               # bos_token, eos_token, ... as a template knows them
    templates: dict[str, ChatTemplate]  # "default" and others by name; empty without a chat template

    @classmethod
    def load(cls, directory, vocab_size: int) -> "Tokenizer | None":
        """Read the tokenizer of a checkpoint; None if the directory has no tokenizer file (see `read_vocabulary`).

        vocab_size: how many ids the model has. Raises MinispecError for a file that is damaged or of another model.
        """
        directory = Path(directory)
        config = _optional(directory / "tokenizer_config.json")
        if (vocabulary := read_vocabulary(directory, config, vocab_size)) is None:
            return None
        names = {key: text for key in ("bos_token", "eos_token", "unk_token", "pad_token") if (text := _name(config, key))}
        bos = (vocabulary.find(names.get("bos_token", "")),) if config.flag("add_bos_token", False) else ()
        refuse_first(
            f"{config.file}:",
            (config.flag("add_eos_token", False), "add_eos_token is true, which ends a prompt before its answer: make it false"),
            (None in bos, f"add_bos_token is true but bos_token is {names.get('bos_token')!r}, not in the vocabulary: name one"))
        return cls(vocabulary, bos, names, _templates(directory, config))

    @property
    def has_template(self) -> bool:
        return bool(self.templates)

    @property
    def source(self) -> str:
        """What was read, in words, for the load report."""
        return self.vocabulary.source

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.vocabulary.special.values())

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt: BOS where add_bos_token asks for it, then the text, in which nothing is a control token."""
        return [*self.bos, *self.vocabulary.plain(unicode_text(text, "the prompt"))]

    def decode_bytes(self, ids: Iterable[int], skip_special: bool = True) -> bytes:
        """The bytes that ids print, each id by itself: a first word of sentencepiece keeps the space before it."""
        ids, hidden, pieces = list(ids), self.special_ids if skip_special else (), self.vocabulary.pieces
        if foreign := [token for token in ids if not 0 <= token < len(pieces)]:
            raise MinispecError(f"id {foreign[0]} is not one of the model's {len(pieces)} ids")
        return b"".join(pieces[token] for token in ids if token not in hidden)

    def chat(self, messages, add_generation_prompt: bool = True, **variables) -> tuple[list[int], str]:
        """(ids, rendered text) of a chat: a user's message, or a list of {"role": ..., "content": ...}.

        variables go to the template (`tools`, `thinking`, ...). No BOS but the template's. The text of a control token
        is one only where the template wrote it; a template that acts on such text inside a message is an error.
        """
        template = variables.get("tools") and self.templates.get("tool_use") or self.templates.get("default")
        if template is None:
            raise MinispecError(f"the target has no chat template 'default' (has: {sorted(self.templates)}): leave out --chat")
        variables["add_generation_prompt"] = add_generation_prompt
        return template.encode(self.vocabulary, self.names, messages, variables)


def stop_ids(directory, vocab_size: int, tokenizer: Tokenizer | None = None) -> dict[int, list[str]]:
    """Ids that end an answer -> where each is named: the union over the config files of a checkpoint.

    Read are eos_token_id (an int or a list) of config.json, its text_config and generation_config.json, and eos_token
    of tokenizer_config.json and special_tokens_map.json, looked up in the tokenizer; without one in added_tokens_decoder,
    and a name that is not found is passed over. Raises MinispecError for an id the model does not have.
    """
    config, settings, generation, names = (_optional(Path(directory, name)) for name in (
        "config.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json"))
    found = {}  # id -> {place: None}, a set in order
    for place, fields in (("config.json", config), ("config.json text_config", config.section("text_config")),
                          ("generation_config.json", generation)):
        value = fields.get("eos_token_id", []) if fields else []
        for token in value if isinstance(value, list) else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise fields.refuse("eos_token_id", f"ids are 0 to {vocab_size - 1}; correct it")
            found.setdefault(token, {})[place] = None
    added = {text: token for token, (text, _) in added_tokens(settings, vocab_size).items()}
    for fields in (settings, names):
        if text := _name(fields, "eos_token"):
            token = tokenizer.vocabulary.find(text) if tokenizer else added.get(text)
            if token is not None:
                found.setdefault(token, {})[fields.file.name] = None
            elif tokenizer:
                raise fields.refuse("eos_token", f"no token of {tokenizer.source}; correct it")
    return {token: list(places) for token, places in found.items()}


def _optional(path: Path) -> Fields:
    return Fields(read_json(path) if present(path) else {}, path)


def _name(config: Fields, key: str) -> str | None:
    """The text of a token that a config names as a str or as {"content": str}."""
    value = config.get(key, None)
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(text, str):
        raise config.refuse(key, "the text of a token is expected; correct it")
    return text and unicode_text(text, f"{config.file}: {key}")


def _templates(directory: Path, config: Fields) -> dict[str, ChatTemplate]:
    """Chat templates by name: chat_template.jinja, else chat_template of tokenizer_config.json (one text, or named ones)."""
    path, value = directory / "chat_template.jinja", config.get("chat_template", [])
    if present(path):
        return {"default": ChatTemplate(unicode_text(path.read_text("utf-8", "surrogateescape"), str(path)), str(path))}
    named = [{"name": "default", "template": value}] if isinstance(value, str) else value
    if not isinstance(named, list) or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str)
                                              and isinstance(entry.get("template"), str) for entry in named):
        raise config.refuse("chat_template", "text, or a list of objects with name and template, is expected; correct it")
    return {entry["name"]: ChatTemplate(entry["template"], f"{config.file} chat_template") for entry in named}


def token_ids(index, prompt, tokenizer, vocab):
    """Ids of a prompt, text or ids; MinispecError, with the prompt's index, for anything else."""
    if not isinstance(prompt, (str, list, tuple)):          # bytes, a dict or a set would pass for ids, in some order
        raise MinispecError(f"prompt {index} is {type(prompt).__name__}; give text or a list of token ids")
    if len(prompt) == 0:
        raise MinispecError(f"prompt {index} is empty; give at least one character or token")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise MinispecError(f"prompt {index} is text, but the target has no tokenizer files; give token ids")
        return tokenizer.encode(prompt)
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= token < vocab:
            raise MinispecError(f"prompt {index}: {repr(token)[:60]} is not a token id of this target (0 to {vocab - 1})")
    return [int(token) for token in prompt]
