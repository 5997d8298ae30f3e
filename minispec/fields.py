"""Typed reading of config.json: every refusal names the file, the field, the value found and the way out."""

import json
import math
import os

from minispec.errors import MinispecError

REQUIRED = object()


def read_json(path: str) -> dict:
    """The JSON object in `path`. MinispecError when it is missing, not UTF-8, not JSON, or not an object."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except FileNotFoundError:
        raise MinispecError(f"{path}: no such file; give a folder that holds a checkpoint with a config.json") from None
    except OSError as error:
        raise MinispecError(f"{path}: cannot be read ({error.strerror}); give a folder that holds a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise MinispecError(f"{path}: not valid JSON ({error}); download the file again") from None
    if not isinstance(values, dict):
        raise MinispecError(f"{path}: holds a JSON {type(values).__name__}, not an object; download the file again")
    return values


class Fields:
    """One JSON object of a config file. `None` in the file reads as absent; `defaults` are those of the file's own format."""

    def __init__(self, values: dict, file: str, *, path: str = "", defaults: dict | None = None):
        self.values, self.file, self.path, self.defaults = values, file, path, defaults or {}

    @classmethod
    def read(cls, folder: str, name: str = "config.json") -> "Fields":
        if not os.path.isdir(folder):
            raise MinispecError(f"{folder}: no such folder; give the folder of a checkpoint")
        path = os.path.join(folder, name)
        return cls(read_json(path), path)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def refuse(self, name: str, why: str) -> MinispecError:
        """The error for a field: `raise fields.refuse("hidden_act", "only silu is supported; ...")`."""
        found = f"is {short(self.values[name])}" if name in self.values else "is missing"
        where = self.path + name
        return MinispecError(f"{self.file}: {where if where.isprintable() else ascii(where)} {found}: {why}")

    def get(self, name: str, default=REQUIRED):
        value = self.values.get(name)
        if value is None:
            if name in self.defaults and (name not in self.values or default is REQUIRED):
                return self.defaults[name]
            if default is REQUIRED:
                raise self.refuse(name, "this field is needed; take the config.json that belongs to the weights")
            return default
        return value

    def integer(self, name: str, default=REQUIRED, low: int = 1, high: int = 2**31 - 1):
        value = self.get(name, default)
        if name in self.values and value is not default:
            if type(value) is not int or not low <= value <= high:
                raise self.refuse(name, f"an integer from {low} to {high} is expected; correct the config")
        return value

    def number(self, name: str, default=REQUIRED, above: float = 0.0):
        value = self.get(name, default)
        if value is default:
            return value
        if type(value) not in (int, float) or abs(value) > 1e30 or not math.isfinite(value) or value <= above:
            raise self.refuse(name, f"a finite number above {above:g} is expected; correct the config")
        return float(value)

    def flag(self, name: str, default=REQUIRED):
        value = self.get(name, default)
        if value is not default and type(value) is not bool:
            raise self.refuse(name, "true or false is expected; correct the config")
        return value

    def text(self, name: str, default=REQUIRED, choices: tuple = ()):
        value = self.get(name, default)
        if value is default:
            return value
        if not isinstance(value, str) or choices and value not in choices:
            wanted = " or ".join(map(repr, choices)) if choices else "a string"
            raise self.refuse(name, f"{wanted} is expected; correct the config, or use another checkpoint")
        return value

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None when it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object is expected; correct the config")
        return Fields(value, self.file, path=f"{self.path}{name}.")

    def only(self, name: str, allowed: tuple, why: str) -> None:
        """Refuse a field that is present with a value other than those the engine implements."""
        if self.has(name) and not any(self.values[name] == value and type(self.values[name]) is type(value) for value in allowed):
            raise self.refuse(name, why)


def short(value, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
