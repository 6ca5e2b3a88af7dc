from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from everburn.records.ids import RunRef
from everburn.records.store import ArtifactStore
from everburn.rollouts.evaluation import AFTER_KEY, BEFORE_KEY, EvaluationReport, EvaluationSample
from workers.cli.report import Comparison, duration, metrics_table


def sample(reward: float, tokens: int, at_limit: bool = False, **info: Any) -> EvaluationSample:
    return EvaluationSample(
        prompt="47+85=",
        reward=reward,
        info=info,
        answer="132",
        output_tokens=tokens,
        at_token_limit=at_limit,
    )


def report(*samples: EvaluationSample) -> EvaluationReport:
    return EvaluationReport(
        snapshot="policy", temperature=0.0, max_tokens=10, samples=list(samples)
    )


def rows(table: Table | None) -> dict[str, list[str]]:
    """The printed rows by first column."""
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    lines = [line.split("   ") for line in capture.get().splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {cell[0]: cell[1:] for cell in cells[1:] if cell}


BEFORE = report(
    sample(1, 4, got=132),
    sample(0, 10, True, got=None),
    sample(0, 10, True, got=None),
    sample(0, 4, got=131),
)
AFTER = report(
    sample(1, 4, got=132), sample(1, 4, got=99), sample(1, 4, got=7), sample(0, 5, got=8)
)


def test_counts_and_shares_before_and_after() -> None:
    assert rows(Comparison(BEFORE, AFTER).table()) == {
        "correct": ["1 (25.0%)", "3 (75.0%)"],
        "at the token limit": ["2 (50.0%)", "0 (0.0%)"],
        "wrong": ["1 (25.0%)", "1 (25.0%)"],
        "invalid": ["2 (50.0%)", "0 (0.0%)"],
        "mean output tokens": ["7.0", "4.2"],
    }
    assert Comparison(BEFORE, AFTER).conditions() == (
        "4 held-out rows, temperature 0, at most 10 tokens"
    )


def test_rows_without_figures_are_omitted() -> None:
    """Without the parsed answer, wrong and invalid answers can't be distinguished."""
    plain = report(sample(1, 4), sample(0, 5))
    assert list(rows(Comparison(None, plain).table())) == [
        "correct",
        "at the token limit",
        "mean output tokens",
    ]
    assert Comparison(None, None).table() is None


def test_partial_rewards_have_a_mean() -> None:
    before, after = report(sample(0, 4), sample(0.5, 4)), report(sample(1, 4), sample(0.75, 4))
    assert rows(Comparison(before, after).table())["mean reward"] == ["0.250", "0.875"]


def test_the_comparison_reads_the_files_of_a_run(tmp_path: Path) -> None:
    run = RunRef(store=str(tmp_path), id="sums-1")
    assert Comparison.of(run).table() is None
    store = ArtifactStore.of(run)
    store.put_json(BEFORE_KEY, BEFORE.model_dump(mode="json"))
    store.put_json(AFTER_KEY, AFTER.model_dump(mode="json"))
    assert Comparison.of(run) == Comparison(BEFORE, AFTER)


def test_an_evaluation_functions_metrics_at_the_first_and_last_version() -> None:
    evaluations = {0: {"eval/accuracy": 0.5}, 8: {"eval/accuracy": 0.75, "eval/cost": 1234.5}}
    assert rows(metrics_table(evaluations)) == {
        "eval/accuracy": ["0.5", "0.75"],
        "eval/cost": ["1234"],
    }
    assert metrics_table({}) is None


def test_durations_are_formatted_like_clocks() -> None:
    assert [duration(s) for s in (7.4, 754, 3723)] == ["0:07", "12:34", "1:02:03"]
