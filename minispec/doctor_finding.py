"""What a check of the doctor says. The words stand in doctor.md, whose table of findings is the only place for them. No tensors."""
import json
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from minispec.fields import printable

SEVERITIES = ("error", "warning", "note")       # worst first; a note does not make a pair unsound


@dataclass(frozen=True)
class Finding:
    """name: a stable slug. measured, expected, cause, cure: one line each; the cure names the flag, key or tensor to change."""
    name: str
    severity: str
    measured: str
    expected: str
    cause: str
    cure: str
    evidence: dict = field(default_factory=dict)

    def lines(self):
        return [f"{self.severity}: {self.name}", *(f"  {title:<9} {getattr(self, title)}" for title in ("measured", "expected", "cause", "cure")), ""]


@lru_cache
def catalogue():
    """name -> [severity, expected, cause, cure] from the table in doctor.md; {words} in them are filled by `finding`."""
    lines = Path(__file__).with_name("doctor.md").read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in rows}


def finding(name, measured, evidence=None, cure=None, **words):
    """The Finding `name` with what was measured. words: what the catalogue's {placeholders} stand for; cure: where the case knows a closer one."""
    severity, *cells = catalogue()[name]
    expected, cause, usual = (cell.format(**words) for cell in cells)
    return Finding(name, words.get("severity", severity), measured, expected, cause, cure or usual, evidence or {})


@dataclass(frozen=True)
class Diagnosis:
    """findings, worst first; facts: what was measured, as plain values. sound: no error and no warning."""
    findings: list
    facts: dict

    @classmethod
    def of(cls, findings, facts):
        return cls(sorted(findings, key=lambda one: SEVERITIES.index(one.severity)), facts)

    @property
    def sound(self):
        return all(one.severity == "note" for one in self.findings)

    def json(self):
        return json.dumps({"sound": self.sound, "findings": [asdict(one) for one in self.findings], "facts": self.facts})

    def text(self):
        serious, lines = sum(one.severity != "note" for one in self.findings), [line for one in self.findings for line in one.lines()]
        for name, value in self.facts.items():          # a line for each line of a report, and for each captured state
            inner = value if isinstance(value, list) else [f"{key}: {shown(v)}" for key, v in value.items()] if nested(value) else []
            lines += [f"{name.replace('_', ' ')}:", *(f"  {line}" for line in inner)] if inner else [f"{name.replace('_', ' ')}: {shown(value)}"]
        return "\n".join(map(printable, [*lines, f"{serious} finding{'s' * (serious > 1)}" if serious else "sound"]))


def nested(value):
    return isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values())


def shown(value):
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(inner)}" for key, inner in value.items())
    return f"{value:.3f}" if isinstance(value, float) else " ".join(map(shown, value)) if isinstance(value, (list, tuple)) else str(value)
