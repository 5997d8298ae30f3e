"""Prompts of `minispec generate`."""
import os
import sys
from pathlib import Path

from minispec.errors import MinispecError


def read_prompts(texts, files, ids, note):
    """Prompts in the order texts, files, ids. A prompt `-` is standard input, read once, kept to the byte."""
    if texts.count("-") > 1:
        raise MinispecError("--prompt - is given twice, but standard input can be read once")
    if "-" in texts and sys.stdin is None:
        raise MinispecError("--prompt -: standard input is closed; give it a text")
    if "-" in texts and sys.stdin.isatty():
        note("reading the prompt from standard input; end it with Ctrl-D")
    prompts = [decoded(sys.stdin.buffer.read(), "--prompt -") if text == "-" else decoded(os.fsencode(text), "--prompt") for text in texts]
    for file in files:
        try:
            prompts.append(decoded(Path(file).read_bytes(), file))
        except OSError as error:
            raise MinispecError(f"--prompt-file {file}: {error.strerror}; give a readable text file") from error
    prompts += map(list, ids)
    if not prompts or not all(prompts):
        what = f"prompt {prompts.index('') + 1} is empty" if prompts else "no prompt"
        raise MinispecError(f"{what}; give --prompt TEXT, --prompt - for standard input, or --prompt-file FILE")
    return prompts


def decoded(data, where):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is {data[error.start]:#04x}"
        raise MinispecError(f"{where}: {found}, which is not UTF-8; convert the text") from error
