"""What an audit says: what was asked, what was proven, and by name what was not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Finding(NamedTuple):
    """One thing that was not proven. ``check`` is a short stable name, ``layer`` is empty for the whole model."""

    check: str
    layer: str
    message: str

    def __str__(self) -> str:
        return f"{self.check}: {self.layer + ': ' if self.layer else ''}{self.message}"


@dataclass
class Audit:
    """The result of ``nt.audit``. Plain data: numbers, text, lists and dicts, ready for JSON.

    ``proven``: what was shown, one line a claim, with the number of cases that stand behind it. ``findings``: what was
    asked for and not shown. ``notes``: what a reader should know and no claim depends on.
    """

    recipe: str
    findings: list[Finding] = field(default_factory=list)
    proven: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    coverage: dict[str, Any] = field(default_factory=dict)
    weights: list[dict[str, Any]] = field(default_factory=list)  # Fprop's weight against Dgrad's, layer by layer
    statistics: list[dict[str, Any]] = field(default_factory=list)
    sensitivity: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything asked for was proven."""
        return not self.findings

    def to_dict(self) -> dict[str, Any]:
        return {
            "recipe": self.recipe,
            "ok": self.ok,
            "findings": [finding._asdict() for finding in self.findings],
            "proven": self.proven,
            "notes": self.notes,
            "coverage": self.coverage,
            "weights": self.weights,
            "statistics": self.statistics,
            "sensitivity": self.sensitivity,
        }

    def __str__(self) -> str:
        lines = [f"audit of {self.recipe}: {self.coverage.get('sentence', 'nothing was counted')}"]
        lines += [f"  proven      {row['claim']} ({row['cases']})" for row in self.proven]
        lines += [f"  NOT PROVEN  {finding}" for finding in self.findings]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)


class Verdicts:
    """Gathers findings and proofs while checks run: each claim is proven as often as it was shown to hold."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._proven: dict[str, int] = {}

    def failed(self, check: str, layer: str, message: str) -> None:
        finding = Finding(check, layer, message)
        if finding not in self.findings:
            self.findings.append(finding)

    def held(self, claim: str, cases: int = 1) -> None:
        self._proven[claim] = self._proven.get(claim, 0) + cases

    @property
    def proven(self) -> list[dict[str, Any]]:
        return [{"claim": claim, "cases": cases} for claim, cases in self._proven.items() if cases]
