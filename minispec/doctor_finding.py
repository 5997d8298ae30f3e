"""What a check of the doctor says, and nothing else. No tensors."""
from dataclasses import dataclass, field

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
        yield f"{self.severity}: {self.name}"
        for title in ("measured", "expected", "cause", "cure"):
            yield f"  {title:<9} {getattr(self, title)}"


def worst_first(findings):
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
