"""Vocabularies of three file formats: tiktoken.model in Kimi's form, sentencepiece, tokenizer.json."""
import base64
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from minispec.errors import MinispecError
from minispec.fields import read_json

# Kimi's split, the same in K2, K2.5 and Moonlight: Han runs, words (Han apart, an English contraction at their end),
# up to three digits, punctuation, line ends, space
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_SPLIT = "|".join((r"[\p{Han}]+", f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}", f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
                       r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one file.

    `special` are the control tokens. An added token marked `special: false` (such as <think>) is not one: it is a word,
    found in any text and printed as it is.
    """
    source: str                        # what was read, for the load report
    pieces: list[bytes]                # what each id of the model's vocabulary prints; a control token its own text
    special: dict[str, int]            # text -> id
    plain: Callable[[str], list[int]]  # ids of text that means no control token
    find: Callable[[str], int | None]  # id of the token with this text
    whole: Callable[[str], list[int]] | None = None  # ids of text with control tokens, unless it is `plain` between them

    def marked(self, text: str) -> list[int]:
        """Ids of text in which control tokens count."""
        return self.whole(text) if self.whole else self.join(split(text, self.special))

    def join(self, parts: list[tuple[str, int | None]]) -> list[int]:
        """Ids of what `split` returns."""
        return [i for text, token in parts for i in ([token] if token is not None else self.plain(text) if text else ())]


def read_vocabulary(directory: Path, config: dict, vocab_size: int) -> Vocabulary | None:
    """The first of tiktoken.model, tokenizer.model, tokenizer.json in the directory; None if there is none.

    config: tokenizer_config.json. Raises MinispecError for a damaged file and for ids outside vocab_size.
    """
    readers = {"tiktoken.model": _tiktoken, "tokenizer.model": _sentencepiece, "tokenizer.json": _tokenizer_json}
    found = [directory / name for name in readers if (directory / name).is_file()]
    if not found:
        return None
    parts = readers[found[0].name](found[0], config, added_tokens(directory, config, vocab_size), vocab_size)
    parts["source"] = f"{found[0].name}: {parts['source']}" + "".join(f"; {path.name} is not read" for path in found[1:])
    return Vocabulary(**parts)


def added_tokens(directory: Path, config: dict, vocab_size: int) -> dict[int, tuple[str, bool]]:
    """added_tokens_decoder of tokenizer_config.json: id -> (text, whether it is a control token)."""
    where, table, tokens = directory / "tokenizer_config.json", config.get("added_tokens_decoder") or {}, {}
    if not isinstance(table, dict):
        raise MinispecError(f"{where}: added_tokens_decoder is {table!r}: it must be a table from id to token")
    for key, token in table.items():
        text = token.get("content") if isinstance(token, dict) else None
        control = token.get("special", True) if isinstance(token, dict) else None
        if not re.fullmatch("[0-9]{1,18}", key) or not isinstance(text, str) or not text or type(control) is not bool:
            raise MinispecError(f"{where}: added_tokens_decoder has {key!r}: {token!r}, not an id and a token: correct it")
        if not int(key) < vocab_size or int(key) in tokens or text in (other for other, _ in tokens.values()):
            raise MinispecError(f"{where}: added_tokens_decoder gives id {key} to {text!r}, but an added token has one id, below "
                                f"the model's vocab_size {vocab_size}: correct the file")
        tokens[int(key)] = text, control
    return tokens


def _tiktoken(path, config, added, vocab_size) -> dict:
    import tiktoken
    ranks = _read_ranks(path, vocab_size)
    settings, pattern = path.with_name("tokenizer_config.json"), config.get("pat_str") or KIMI_SPLIT
    if taken := [i for i in added if i < len(ranks)]:
        raise MinispecError(f"{settings}: added_tokens_decoder gives id {taken[0]} to {added[taken[0]][0]!r}, but {path.name} "
                            f"uses ids 0..{len(ranks) - 1}: give it a later id")
    tokens = {i: added.get(i, (f"<|reserved_token_{i}|>", True)) for i in range(len(ranks), vocab_size)}
    special, words = ({text: i for i, (text, control) in tokens.items() if control is kind} for kind in (True, False))
    if len({**special, **words}) < len(tokens):
        raise MinispecError(f"{settings}: added_tokens_decoder uses the name <|reserved_token_N|> of another id N: rename it")
    pieces = [*sorted(ranks, key=ranks.get), *(text.encode() for text, _ in tokens.values())]
    try:
        encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={**special, **words})
    except (TypeError, ValueError) as error:
        raise MinispecError(f"{settings}: pat_str is {pattern!r}, no split pattern, {error}: correct or remove it") from error

    def tokens_of(text):
        return encoding.encode(text, allowed_special=set(words), disallowed_special=())

    def plain(text):
        try:
            try:
                ids = tokens_of(text)
            except ValueError:  # a run of space too long for the pattern engine; cut where Kimi's own tokenizer cuts any run
                cuts = [match.end() for match in re.finditer(r"\s{25000}|\S{25000}", text)]
                ids = [i for start, end in zip([0, *cuts], [*cuts, None]) for i in tokens_of(text[start:end])]
        except ValueError as error:
            raise MinispecError(f"{settings}: split pattern {pattern!r} fails on this text, {error}: shorten the text") from error
        if b"".join([pieces[i] for i in ids]) != text.encode():
            raise MinispecError(f"{settings}: pat_str is {pattern!r}, which leaves out a part of this text: correct or remove it")
        return ids

    def find(text):
        return special.get(text, words.get(text, ranks.get(text.encode())))
    origin = "of pat_str in tokenizer_config.json" if config.get("pat_str") else "of Kimi"
    return {"source": f"{len(ranks)} tokens and {len(tokens)} added, split {origin}",
            "pieces": pieces, "special": special, "plain": plain, "find": find}


def _read_ranks(path, vocab_size) -> dict[bytes, int]:
    """Token bytes -> id, of lines `BASE64 RANK`. Read here because tiktoken's own reader keeps stale copies in a cache."""
    ranks, taken = {}, set()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            text, rank = line.split()
            token, rank = base64.b64decode(text, validate=True), int(rank)
        except ValueError as error:
            raise MinispecError(f"{path}: line {number} is {line[:60]!r}, not a token in base64 and its rank: "
                                "download the file again") from error
        if not token or token in ranks or rank in taken or not 0 <= rank < vocab_size:
            raise MinispecError(f"{path}: line {number} gives rank {rank} to {token[:60]!r}, but each token and each rank comes "
                                f"once, and ranks are below the model's vocab_size {vocab_size}: download the file again")
        ranks[token] = rank
        taken.add(rank)
    missing = [f"rank {i}" for i in range(len(ranks)) if i not in taken]
    missing += [f"the byte {bytes([b])!r}" for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise MinispecError(f"{path}: has {len(ranks)} tokens but none for {missing[0]}: download it again")
    return ranks


def _sentencepiece(path, config, added, vocab_size) -> dict:
    import sentencepiece
    data = path.read_bytes()
    try:
        model = sentencepiece.SentencePieceProcessor(model_proto=data) if data else None
    except RuntimeError:
        model = None
    if model is None:
        raise MinispecError(f"{path}: has {len(data)} bytes that are no sentencepiece model: download it again")
    size = model.vocab_size()
    tokens = {i: (model.id_to_piece(i), model.is_control(i) or model.is_unknown(i)) for i in range(size)}
    _same_ids(path, {i: text for i, (text, _) in tokens.items()}, added, size, vocab_size)
    tokens.update(added)
    words = {text: i for i, (text, control) in added.items() if not control and i >= size}
    pieces = [b""] * vocab_size
    for i, (text, control) in tokens.items():
        if i < size and model.is_byte(i):
            pieces[i] = bytes([int(text[3:5], 16)])
        else:
            pieces[i] = (text if i in added or control else text.replace("▁", " ")).encode()
    ids = {text: i for i, (text, _) in tokens.items()}
    return {"source": f"{size} sentencepieces and {len(tokens) - size} added", "pieces": pieces,
            "special": {text: i for i, (text, control) in tokens.items() if control}, "find": ids.get,
            "plain": lambda text: [i for part, word in split(text, words)
                                   for i in ([word] if word is not None else model.encode(part, add_bos=False, add_eos=False))]}


def _tokenizer_json(path, config, added, vocab_size) -> dict:
    try:
        import tokenizers
    except ImportError as error:
        raise MinispecError(f"{path}: reading it needs the tokenizers package: pip install 'minispec[tokenizers]'") from error
    spec = read_json(path)

    def model_of(plain: bool):
        with _Refused(f"{path}: the tokenizers package cannot read it", "download it again"):
            model = tokenizers.Tokenizer.from_str(json.dumps(spec))
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = plain
        return model

    def ids_of(model, text):
        with _Refused(f"{path}: the tokenizers package cannot encode this text", "change the text"):
            return model.encode(text, add_special_tokens=False).ids
    model, marked = model_of(plain=True), functools.cache(lambda: model_of(plain=False))
    printed = _printed(path, spec.get("decoder"))
    ids = model.get_vocab(with_added_tokens=True)
    own = model.get_added_tokens_decoder()
    _same_ids(path, {i: text for text, i in ids.items()}, added, vocab_size, vocab_size)
    pieces = [b""] * vocab_size
    for text, i in ids.items():
        pieces[i] = printed(text)
    special = {token.content: i for i, token in own.items() if token.special}
    return {"source": f"{len(ids)} tokens, {len(own)} of them added", "pieces": pieces, "special": special, "find": ids.get,
            "plain": lambda text: ids_of(model, text), "whole": lambda text: ids_of(marked(), text)}


def _printed(path, decoder) -> Callable[[str], bytes]:
    """What a token of tokenizer.json prints, by itself, from the file's `decoder`."""
    steps = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") if isinstance(step, dict) else step for step in steps] if isinstance(steps, list) else [steps]
    if kinds == ["ByteLevel"]:
        # the byte alphabet of GPT-2: printable Latin-1 stands for itself, the other 68 bytes are numbered from U+0100
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        table = {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(sorted({*range(256)} - {*shown}))}
        return lambda text: bytes(map(table.get, text)) if all(c in table for c in text) else text.encode()
    metaspace = {"Metaspace"}, {"Replace", "ByteFallback", "Fuse", "Strip"}
    if not kinds or not any(set(map(str, kinds)) <= names for names in metaspace):
        raise MinispecError(f"{path}: decoder is {kinds}, supported are ByteLevel, Metaspace, and Replace with ByteFallback, "
                            "Fuse, Strip: convert the tokenizer, or give token ids")
    for step in steps:
        known = {"Metaspace": {"replacement": "▁"}, "Replace": {"pattern": {"String": "▁"}, "content": " "},
                 "Strip": {"content": " ", "stop": 0}}.get(step["type"], {})
        if wrong := [key for key, value in known.items() if step.get(key) != value]:
            raise MinispecError(f"{path}: decoder {step['type']} has {wrong[0]} {step.get(wrong[0])!r}, supported is "
                                f"{known[wrong[0]]!r}: convert the tokenizer, or give token ids")
    fallback = "ByteFallback" in kinds
    return lambda text: (bytes([int(text[3:5], 16)]) if fallback and re.fullmatch("<0x[0-9A-F]{2}>", text)
                         else text.replace("▁", " ").encode())


def _same_ids(path, own: dict[int, str], added: dict, size: int, vocab_size: int):
    """Check that the ids of a file are the model's, and those below size what tokenizer_config.json says they are."""
    if own and max(own) >= vocab_size:
        raise MinispecError(f"{path}: has ids up to {max(own)}, the model's vocab_size is {vocab_size}: it is of another model")
    for i, (text, _) in added.items():
        if i < size and own.get(i) != text:
            raise MinispecError(f"{path}: id {i} is {own.get(i)!r}, but added_tokens_decoder of tokenizer_config.json has "
                                f"{text!r}: correct one of the two")


class _Refused:
    """Turns what the tokenizers package raises, which is Exception itself and no subclass, into a MinispecError."""

    def __init__(self, what: str, way_out: str):
        self.what, self.way_out = what, way_out

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is Exception:
            raise MinispecError(f"{self.what}, {str(error).splitlines()[0]}: {self.way_out}") from error


def split(text: str, tokens: dict[str, int]) -> list[tuple[str, int | None]]:
    """The text as (plain text, None) and (token, its id), in turn; of two tokens that fit at one place, the longer."""
    parts, start = [], 0
    if tokens:
        for match in re.finditer("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))), text):
            parts += [(text[start:match.start()], None), (match[0], tokens[match[0]])]
            start = match.end()
    return [*parts, (text[start:], None)]
