"""Vocabularies of three file formats: tiktoken.model in Kimi's form, sentencepiece, tokenizer.json."""
import base64
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from minispec.errors import MinispecError
from minispec.fields import Fields, present, read_json, short

# Kimi's split, the same in K2, K2.5 and Moonlight: Han runs, words (Han apart, an English contraction at their end),
# up to three digits, punctuation, line ends, space
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_SPLIT = "|".join((r"[\p{Han}]+", f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}", f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
                       r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"))
# what a step of a tokenizer.json decoder must say, so that each token prints by itself
_STEPS = {"Metaspace": {"replacement": "▁"}, "Replace": {"pattern": {"String": "▁"}, "content": " "},
          "Strip": {"content": " ", "stop": 0}}


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of one file. An added token marked `special: false` (such as <think>) is a word, found in any text."""
    source: str                        # what was read, for the load report
    pieces: list[bytes]                # what each id of the model's vocabulary prints; a control token its own text
    special: dict[str, int]            # control tokens: text -> id
    plain: Callable[[str], list[int]]  # ids of text that means no control token
    find: Callable[[str], int | None]  # id of the token with this text
    whole: Callable[[str], list[int]] | None = None  # ids of text with control tokens, unless it is `plain` between them

    def marked(self, text: str) -> list[int]:
        """Ids of text in which control tokens count."""
        return self.whole(text) if self.whole else join(split(text, self.special), self.plain)


def read_vocabulary(directory: Path, config: Fields, vocab_size: int) -> Vocabulary | None:
    """The first that is there of tiktoken.model (Kimi's form), tokenizer.model (sentencepiece), tokenizer.json; None without one.

    config: tokenizer_config.json. Raises MinispecError for a damaged file and for ids outside vocab_size.
    """
    readers = {"tiktoken.model": _tiktoken, "tokenizer.model": _sentencepiece, "tokenizer.json": _tokenizer_json}
    if not (found := [name for name in readers if present(directory / name)]):
        return None
    vocabulary = readers[found[0]](directory / found[0], config, added_tokens(config, vocab_size), vocab_size)
    return replace(vocabulary, source=f"{found[0]}: {vocabulary.source}" + "".join(f"; {name} is not read" for name in found[1:]))


def added_tokens(config: Fields, vocab_size: int) -> dict[int, tuple[str, bool]]:
    """added_tokens_decoder of tokenizer_config.json: id -> (text, whether it is a control token)."""
    table, tokens, where = config.section("added_tokens_decoder"), {}, f"{config.file}: added_tokens_decoder"
    for key, token in table.values.items() if table else ():
        text, control = (token.get("content"), token.get("special", True)) if isinstance(token, dict) else (None, None)
        if not re.fullmatch("[0-9]{1,18}", key) or not isinstance(text, str) or type(control) is not bool \
                or not text or text.encode("utf-8", "ignore").decode() != text:
            raise MinispecError(f"{where} has {key!r}: {token!r}, not an id and a token: correct it")
        if int(key) >= vocab_size or int(key) in tokens or text in (other for other, _ in tokens.values()):
            raise MinispecError(f"{where} gives id {key} to {text!r}, but each has one id, below {vocab_size}: correct it")
        tokens[int(key)] = text, control
    return tokens


def _tiktoken(path, config, added, vocab_size) -> Vocabulary:
    import tiktoken
    ranks, pattern = _read_ranks(path, vocab_size), config.text("pat_str", KIMI_SPLIT)
    if taken := [i for i in added if i < len(ranks)]:
        raise MinispecError(f"{config.file}: added_tokens_decoder gives id {taken[0]} to {added[taken[0]][0]!r}, "
                            f"but {path.name} uses ids 0..{len(ranks) - 1}: give it a later id")
    tokens = {i: added.get(i, (f"<|reserved_token_{i}|>", True)) for i in range(len(ranks), vocab_size)}
    special, words = ({text: i for i, (text, control) in tokens.items() if control is kind} for kind in (True, False))
    if len({**special, **words}) < len(tokens):
        raise MinispecError(f"{config.file}: added_tokens_decoder uses the name <|reserved_token_N|> of another id N: rename it")
    pieces = [*sorted(ranks, key=ranks.get), *(text.encode() for text, _ in tokens.values())]
    try:
        if re.search(r"(^|[|(])(\||\)|$)", re.sub(r"\\.|\[[^]]*\]", "x", pattern)):
            raise ValueError("an alternative of it is empty")
        encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={**special, **words})
    except (TypeError, ValueError) as error:
        raise config.refuse("pat_str", f"no split pattern, {error}: correct or remove it") from error

    def plain(text):
        # Kimi's own tokenizer cuts runs of space, and of anything else, that are longer; the pattern engine fails on some
        cuts = [match.end() for match in re.finditer(r"(\s{25000}(?=\s)|\S{25000}(?=\S))|\s+|\S+", text) if match[1]]
        with _Refused(f"{config.file}: pat_str {pattern!r} fails on this text"):
            ids = [i for start, end in zip([0, *cuts], [*cuts, None])
                   for i in encoding.encode(text[start:end], allowed_special=set(words), disallowed_special=())]
        if b"".join([pieces[i] for i in ids]) != text.encode():
            raise config.refuse("pat_str", "it leaves out a part of this text: correct or remove it")
        return ids

    origin = "Kimi" if pattern is KIMI_SPLIT else "pat_str in tokenizer_config.json"
    return Vocabulary(f"{len(ranks)} tokens and {len(tokens)} added, split of {origin}", pieces, special, plain,
                      lambda text: special.get(text, words.get(text, ranks.get(text.encode()))))


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
            raise _damaged(path, f"line {number} is {line[:60]!r}, not a token in base64 and its rank") from error
        if not token or token in ranks or rank in taken or not 0 <= rank < vocab_size:
            raise _damaged(path, f"line {number} gives rank {rank} to {token[:60]!r}, but tokens are not empty, each token "
                                 f"and rank comes once, ranks are below vocab_size {vocab_size}")
        ranks[token] = rank
        taken.add(rank)
    missing = [f"rank {i}" for i in range(len(ranks)) if i not in taken]
    missing += [f"the byte {bytes([b])!r}" for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise _damaged(path, f"has {len(ranks)} tokens but none for {missing[0]}")
    return ranks


def _sentencepiece(path, config, added, vocab_size) -> Vocabulary:
    import sentencepiece
    data, model = path.read_bytes(), sentencepiece.SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
    except RuntimeError as error:
        raise _damaged(path, f"has {len(data)} bytes that are no sentencepiece model") from error
    size = model.vocab_size()
    tokens = {i: (model.id_to_piece(i), model.is_control(i) or model.is_unknown(i)) for i in range(size)}
    _same_ids(path, {i: text for i, (text, _) in tokens.items()}, added, size, vocab_size)
    tokens.update(added)
    words = {text: i for i, (text, control) in added.items() if not control and i >= size}
    pieces = [b""] * vocab_size
    for i, (text, control) in tokens.items():
        is_byte, verbatim = i < size and model.is_byte(i), i in added or control
        pieces[i] = bytes([int(text[3:5], 16)]) if is_byte else (text if verbatim else text.replace("▁", " ")).encode()
    encode = functools.partial(model.encode, add_bos=False, add_eos=False)
    special, ids = {text: i for i, (text, control) in tokens.items() if control}, {text: i for i, (text, _) in tokens.items()}
    return Vocabulary(f"{size} sentencepieces and {len(tokens) - size} added", pieces, special,
                      lambda text: join(split(text, words), encode), ids.get)


def _tokenizer_json(path, config, added, vocab_size) -> Vocabulary:
    try:
        import tokenizers
    except ImportError as error:
        raise MinispecError(f"{path}: reading it needs the tokenizers package: pip install 'minispec[tokenizers]'") from error
    spec = read_json(path)
    with _Refused(f"{path}: the tokenizers package cannot read it"):
        model = tokenizers.Tokenizer.from_str(json.dumps(spec))
    model.no_truncation()
    model.no_padding()

    def ids_of(text, plain):
        model.encode_special_tokens = plain
        with _Refused(f"{path}: the tokenizers package cannot encode this text"):
            return model.encode(text, add_special_tokens=False).ids
    printed, ids = _printed(path, spec.get("decoder")), model.get_vocab(with_added_tokens=True)
    texts, own = {i: text for text, i in ids.items()}, model.get_added_tokens_decoder()
    _same_ids(path, texts, added, vocab_size, vocab_size)
    pieces = [printed(texts[i]) if i in texts else b"" for i in range(vocab_size)]
    return Vocabulary(f"{len(ids)} tokens, {len(own)} of them added", pieces, {t.content: i for i, t in own.items() if t.special},
                      functools.partial(ids_of, plain=True), ids.get, functools.partial(ids_of, plain=False))


def _printed(path, decoder) -> Callable[[str], bytes]:
    """What a token of tokenizer.json prints, by itself; decoder: the file's, which the tokenizers package has accepted."""
    steps = decoder["decoders"] if decoder and decoder.get("type") == "Sequence" else [decoder or {}]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        # the byte alphabet of GPT-2: printable Latin-1 stands for itself, the other 68 bytes are numbered from U+0100
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        table = {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(sorted({*range(256)} - {*shown}))}
        return lambda text: bytes(map(table.get, text)) if all(c in table for c in text) else text.encode()
    llama = ["Replace", "ByteFallback", "Fuse", "Strip"]
    if kinds not in (["Metaspace"], llama, llama[:3]) or any(step != {**step, **_STEPS.get(step["type"], {})} for step in steps):
        raise MinispecError(f"{path}: decoder is {short(decoder)}, supported are ByteLevel, and with spaces written '▁' "
                            f"Metaspace or {llama} (Strip may be absent): convert the tokenizer, or give token ids")
    return lambda text: (bytes([int(text[3:5], 16)]) if kinds[0] == "Replace" and re.fullmatch("<0x[0-9A-F]{2}>", text)
                         else text.replace("▁", " ").encode())


def _same_ids(path, own: dict[int, str], added: dict, size: int, vocab_size: int):
    """Checks that the ids of a file are the model's, and those below size what tokenizer_config.json says they are."""
    if own and max(own) >= vocab_size:
        raise MinispecError(f"{path}: has ids up to {max(own)}, the model's vocab_size is {vocab_size}: it is of another model")
    for i, (text, _) in added.items():
        if i < size and own.get(i) != text:
            raise MinispecError(f"{path}: id {i} is {own.get(i)!r}, but {text!r} in tokenizer_config.json: correct one of them")


def _damaged(path, what: str) -> MinispecError:
    return MinispecError(f"{path}: {what}: download it again")


@dataclass
class _Refused(contextlib.AbstractContextManager):
    """Turns what a tokenizer package raises, also a panic of its Rust code (no Exception, no name to import), into a MinispecError."""
    what: str

    def __exit__(self, kind, error, traceback):
        if kind in (Exception, ValueError) or kind and kind.__name__ == "PanicException":
            raise MinispecError(f"{self.what}, {str(error).splitlines()[0]}: give token ids, or another file") from error


def any_of(texts: Iterable[str]) -> str:
    """A pattern for one of the texts; of two that fit at one place, the longer."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))


def split(text: str, tokens: dict[str, int]) -> list[tuple[str, int | None]]:
    """The text as (plain text, None) and (token, its id), in turn; of two tokens that fit at one place, the longer."""
    parts = re.split(f"({any_of(tokens)})", text) if tokens else [text]
    return [(part, tokens[part] if i % 2 else None) for i, part in enumerate(parts)]


def join(parts: list[tuple[str, int | None]], plain: Callable[[str], list[int]]) -> list[int]:
    """Ids of what `split` returns; plain: ids of the text between tokens."""
    return [i for text, token in parts for i in ([token] if token is not None else plain(text) if text else ())]
