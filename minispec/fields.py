"""Typed reading of config.json: every refusal names the file, the field, the value found and the way out."""
import json
import os

from minispec.errors import MinispecError

REQUIRED = object()


def refuse_first(where: str, *cases: tuple[object, str]) -> None:
    """MinispecError("where what") for the first of the cases (wrong, what) whose `wrong` is true; all are evaluated."""
    for wrong, what in cases:
        if wrong:
            raise MinispecError(f"{where} {what}")


def present(path: str) -> bool:
    """Whether a file is at `path`. MinispecError for anything else there: a pipe may never end, a link to nothing is no "absent"."""
    if os.path.lexists(path) and not os.path.isfile(path):
        raise MinispecError(f"{path}: not a regular file, or a link to none; give the folder of a complete checkpoint")
    return os.path.lexists(path)


def read_json(path: str) -> dict:
    """The JSON object in `path`. MinispecError when it is missing, no file, not UTF-8, not JSON, or not an object."""
    present(path)
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise MinispecError(f"{path}: {error.strerror.lower()}; give the folder of a complete checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise MinispecError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(values, dict):
        raise MinispecError(f"{path}: holds a JSON {type(values).__name__}, not an object; download the file again")
    return values


def short(value, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def printable(text: str) -> str:
    """`text` on one line, what cannot be printed escaped: a name from a checkpoint must not write lines or steer the terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


class Fields:
    """One JSON object of a config file. `None` in the file reads as absent; `defaults` are those of the file's own format."""

    def __init__(self, values: dict, file: str, *, path: str = "", defaults: dict | None = None):
        self.values, self.file, self.path, self.defaults = values, file, path, defaults or {}

    @classmethod
    def read(cls, folder: str) -> "Fields":
        if not os.path.isdir(folder):
            raise MinispecError(f"{folder}: no such folder; give the folder of a checkpoint")
        path = os.path.join(folder, "config.json")
        return cls(read_json(path), path)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refuse(self, name: str, why: str) -> MinispecError:
        """The error for a field: `raise fields.refuse("hidden_act", "only silu is supported; ...")`."""
        found = f"is {short(self.values[name])}" if name in self.values else "is missing"
        return MinispecError(f"{self.file}: {printable(self.path + name)} {found}: {why}")

    def get(self, name: str, default=REQUIRED):
        """The file's value, else the format's default, else `default`. A null in the file takes `default` first."""
        if self.has(name):
            return self.values[name]
        if name in self.defaults and (name not in self.values or default is REQUIRED):
            return self.defaults[name]
        if default is REQUIRED:
            raise self.refuse(name, "this field is needed; take the config.json that belongs to the weights")
        return default

    def _checked(self, name: str, default, good, wanted: str):
        value = self.get(name, default)
        if self.has(name) and not good(value):
            raise self.refuse(name, f"{wanted} is expected; correct the config, or use another checkpoint")
        return value

    def integer(self, name: str, default=REQUIRED, low: int = 1, high: int = 2**31 - 1):
        return self._checked(name, default, lambda v: type(v) is int and low <= v <= high, f"an integer from {low} to {high}")

    def number(self, name: str, default=REQUIRED, above: float = 0.0):
        value = self._checked(name, default, lambda v: type(v) in (int, float) and above < v <= 1e30,
                              f"a finite number above {above:g}")
        return float(value) if self.has(name) else value

    def flag(self, name: str, default=REQUIRED):
        return self._checked(name, default, lambda v: type(v) is bool, "true or false")

    def text(self, name: str, default=REQUIRED, choices: tuple = ()):
        return self._checked(name, default, lambda v: isinstance(v, str) and (not choices or v in choices),
                             " or ".join(map(repr, choices)) or "a string")

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None when it is absent."""
        value = self._checked(name, None, lambda v: isinstance(v, dict), "an object")
        return None if value is None else Fields(value, self.file, path=f"{self.path}{name}.")

    def only(self, name: str, allowed: tuple, way: str) -> None:
        """Refuse a field that is present with a value other than those the engine implements."""
        if self.has(name) and not any(self.values[name] == value and type(self.values[name]) is type(value) for value in allowed):
            raise self.refuse(name, f"{'only ' if allowed else ''}{' or '.join(map(repr, allowed)) or 'not'} supported; {way}")
