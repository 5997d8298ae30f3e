"""The tokenizer of a checkpoint: text or chat messages to ids, ids to bytes; and the ids that end an answer."""
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from minispec.errors import MinispecError
from minispec.fields import read_json
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
        """Read the tokenizer of a checkpoint; None if the directory has no tokenizer file.

        The first of these is read: tiktoken.model (Kimi's form), tokenizer.model (sentencepiece), tokenizer.json (with
        the `tokenizers` package). vocab_size: how many ids the model has. Raises MinispecError for a file that is
        damaged or of another model.
        """
        directory = Path(directory)
        settings = directory / "tokenizer_config.json"
        config = _optional(settings)
        vocabulary = read_vocabulary(directory, config, vocab_size)
        if vocabulary is None:
            return None
        names = {key: _name(settings, config, key) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        names = {key: text for key, text in names.items() if text}
        if _flag(settings, config, "add_eos_token"):
            raise MinispecError(f"{settings}: add_eos_token is true, which would end a prompt before its answer: set it to false")
        bos = ()
        if _flag(settings, config, "add_bos_token"):
            bos = (vocabulary.find(names.get("bos_token", "")),)
            if bos[0] is None:
                raise MinispecError(f"{settings}: add_bos_token is true but bos_token is {names.get('bos_token')!r}, which is no "
                                    "token of the vocabulary: name one, or set add_bos_token to false")
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
        """The bytes that ids print, each id by itself, so that the parts of any split join to the bytes of the whole.

        They continue a text: a first word of sentencepiece keeps the space before it.
        """
        hidden, pieces, printed = self.special_ids if skip_special else (), self.vocabulary.pieces, []
        for token in ids:
            if not 0 <= token < len(pieces):
                raise MinispecError(f"id {token} is not one of the model's {len(pieces)} ids")
            if token not in hidden:
                printed.append(pieces[token])
        return b"".join(printed)

    def chat(self, messages, add_generation_prompt: bool = True, **variables) -> tuple[list[int], str]:
        """(ids, rendered text) of a chat: a user's message, or a list of {"role": ..., "content": ...}.

        variables go to the template (`tools`, `thinking`, ...). No BOS but the template's. The text of a control token
        is one only where the template wrote it; a template that acts on such text inside a message is an error.
        """
        if not self.templates:
            raise MinispecError("the target has no chat template (tokenizer_config.json, chat_template.jinja): leave out --chat")
        name = "tool_use" if variables.get("tools") and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise MinispecError(f"the target's chat templates are {sorted(self.templates)}: name one of them 'default'")
        variables["add_generation_prompt"] = add_generation_prompt
        return self.templates[name].encode(self.vocabulary, self.names, messages, variables)


def stop_ids(directory, vocab_size: int, tokenizer: Tokenizer | None = None) -> dict[int, list[str]]:
    """Ids that end an answer -> where each is named: the union over the config files of a checkpoint.

    Read are eos_token_id (an int or a list) of config.json, its text_config and generation_config.json, and eos_token
    of tokenizer_config.json and special_tokens_map.json, looked up in added_tokens_decoder, then in the tokenizer;
    without a tokenizer a name that is not found is passed over. Raises MinispecError for an id the model does not have.
    """
    directory, found = Path(directory), {}
    config = _optional(directory / "config.json")
    inner = config.get("text_config")
    for name, fields in (("config.json", config), ("config.json text_config", inner if isinstance(inner, dict) else {}),
                         ("generation_config.json", _optional(directory / "generation_config.json"))):
        value = fields.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise MinispecError(f"{directory / name}: eos_token_id is {value!r}, but ids are 0..{vocab_size - 1}: correct it")
            found.setdefault(token, {})[name] = None
    settings = directory / "tokenizer_config.json"
    added = {text: token for token, (text, _) in added_tokens(directory, _optional(settings), vocab_size).items()}
    for path in (settings, directory / "special_tokens_map.json"):
        if text := _name(path, _optional(path), "eos_token"):
            token = added.get(text, tokenizer.vocabulary.find(text) if tokenizer else None)
            if token is not None:
                found.setdefault(token, {})[path.name] = None
            elif tokenizer:
                raise MinispecError(f"{path}: eos_token is {text!r}, which is no token of {tokenizer.source}: correct it")
    return {token: list(origins) for token, origins in found.items()}


def _optional(path: Path) -> dict:
    return read_json(path) if path.exists() else {}


def _name(path: Path, config: dict, key: str) -> str | None:
    """The text of a token that a config names as a str or as {"content": str}."""
    value = config.get(key)
    text = value.get("content") if isinstance(value, dict) else value
    if value is not None and not isinstance(text, str):
        raise MinispecError(f"{path}: {key} is {value!r}: it must be the text of a token")
    return text


def _flag(path: Path, config: dict, key: str) -> bool:
    value = config.get(key)
    if value not in (None, False, True) or isinstance(value, (int, float)) and not isinstance(value, bool):
        raise MinispecError(f"{path}: {key} is {value!r}: it must be true or false")
    return bool(value)


def _templates(directory: Path, config: dict) -> dict[str, ChatTemplate]:
    """Chat templates by name: chat_template.jinja, else chat_template of tokenizer_config.json (one text, or named ones)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return {"default": ChatTemplate(path.read_text(encoding="utf-8"), str(path))}
        except UnicodeDecodeError as error:
            raise MinispecError(f"{path}: is not UTF-8, {error}: download it again") from error
    path, value = directory / "tokenizer_config.json", config.get("chat_template")
    named = value if isinstance(value, list) else [] if value is None else [{"name": "default", "template": value}]
    for entry in named:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not isinstance(entry.get("template"), str):
            raise MinispecError(f"{path}: chat_template is {str(entry)[:80]!r}: it must be text, or a list of name and template")
    return {entry["name"]: ChatTemplate(entry["template"], f"{path} chat_template") for entry in named}
