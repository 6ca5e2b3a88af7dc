"""Tables of a run's evaluations before and after training.

Doesn't own the figures (everburn/rollouts/evaluation.py).
"""

from dataclasses import dataclass, field

from rich.table import Table

from everburn.records.ids import RunRef
from everburn.records.store import ArtifactStore
from everburn.rollouts.evaluation import (
    AFTER_KEY,
    BEFORE_KEY,
    EvaluationReport,
    load_report,
    summarize,
)

COUNTS = {
    "correct": "correct",
    "at_token_limit": "at the token limit",
    "wrong": "wrong",
    "invalid": "invalid",
}
OUTPUT_TOKENS = "output_tokens"


@dataclass(frozen=True)
class Comparison:
    """The evaluations of the initial and the final policy; either may be missing."""

    before: EvaluationReport | None
    after: EvaluationReport | None

    @classmethod
    def of(cls, run: RunRef) -> "Comparison":
        store = ArtifactStore.of(run)
        return cls(load_report(store, BEFORE_KEY), load_report(store, AFTER_KEY))

    def table(self) -> Table | None:
        """Counts with their share of the rows, and the mean length; None without reports."""
        figures = [_Figures.of(report) for report in (self.before, self.after)]
        if not any(figure.values for figure in figures):
            return None
        table = _before_after()
        for key, name in COUNTS.items():
            if any(key in figure.values for figure in figures):
                table.add_row(name, *(figure.count(key) for figure in figures))
        if any(figure.has_partial_rewards for figure in figures):
            table.add_row("mean reward", *(figure.mean("reward", 3) for figure in figures))
        table.add_row("mean output tokens", *(figure.mean(OUTPUT_TOKENS) for figure in figures))
        return table

    def conditions(self) -> str | None:
        """The conditions of the table's figures."""
        report = self.after or self.before
        if report is None:
            return None
        return (
            f"{len(report.samples)} held-out rows, temperature {report.temperature:g}, "
            f"at most {report.max_tokens} tokens"
        )


@dataclass(frozen=True)
class _Figures:
    values: dict[str, float] = field(default_factory=dict)
    has_partial_rewards: bool = False
    """If true, counts of full rewards are incomplete without the mean."""

    @classmethod
    def of(cls, report: EvaluationReport | None) -> "_Figures":
        if report is None or not report.samples:
            return cls()
        partial = any(sample.reward not in (0, 1) for sample in report.samples)
        return cls(summarize(report), partial)

    def count(self, key: str) -> str:
        if key not in self.values:
            return ""
        return f"{self.values[key]:.0f} ({self.values[key] / self.values['samples']:.1%})"

    def mean(self, key: str, digits: int = 1) -> str:
        return f"{self.values[key]:.{digits}f}" if key in self.values else ""


def metrics_table(evaluations: dict[int, dict[str, float]]) -> Table | None:
    """The metrics of an evaluation function at the first and the last evaluated version."""
    if not evaluations:
        return None
    first, last = evaluations[min(evaluations)], evaluations[max(evaluations)]
    table = _before_after()
    for key in sorted(first.keys() | last.keys()):
        table.add_row(key, _number(first.get(key)), _number(last.get(key)))
    return table


def duration(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _before_after() -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
