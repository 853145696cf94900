"""`head`, the document that scripts read first, as both pages share it. docs/report-data.md describes its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensortap.core import statistics
from tensortap.core.records import Comparison, HealthReport
from tensortap.report.html.data.environment import Setting
from tensortap.report.html.data.outline import TableOutline
from tensortap.report.wording import clean

__all__ = ["Head"]


@dataclass(frozen=True)
class Head:
    """The data of a page, except its columns."""

    result: Comparison | HealthReport
    """The result whose verdict, sentence, policy and counts the page shows."""
    outline: TableOutline
    start: int | None
    """The row that is selected first."""
    first: int | None
    """Index of the birth that the sentence names."""
    births: Sequence[Mapping[str, Any]]
    by_step: Mapping[str, Sequence[Any]]
    own: Mapping[str, Any]
    """Keys that only this page has."""
    runs: Mapping[str, str]
    """Paths by side."""
    settings: Sequence[Setting]
    notes: Sequence[str]
    definitions: Mapping[str, str]

    def object(
        self, page: str, columns: Sequence[Any], words: Mapping[str, Sequence[str]], details: Mapping[int, str]
    ) -> dict[str, Any]:
        nonfinite = (at for at, birth in enumerate(self.births) if birth["status"] == "nonfinite")
        return {
            "page": page,
            **self.outline.object(),
            "statistics": [
                {"name": each.name, "label": each.label, "form": each.show.form, "added": each.is_added}
                for each in statistics.stored()
            ],
            "columns": columns,
            "words": {name: [clean(word) for word in each] for name, each in words.items()},
            "verdict": self.result.verdict,
            "sentence": clean(self.result.sentence),
            "policy": clean(self.result.policy),
            "counts": dict(self.result.counts),
            "start": self.outline.start(self.start),
            "first": self.first,
            "first_nonfinite": next(nonfinite, None),
            "births": self.births,
            "by_step": self.by_step,
            **self.own,
            "details": {str(row): block for row, block in details.items()},
            "runs": [{"side": side, "path": clean(path)} for side, path in self.runs.items()],
            "environment": [setting.object() for setting in self.settings],
            "notes": [clean(note) for note in self.notes],
            "definitions": [
                {"term": term, "text": text}
                for term, text in [
                    *self.definitions.items(),
                    *((each.label, each.sentence) for each in statistics.added()),
                ]
            ],
        }
