"""The files and lines of the HUD x Fireworks recipe, made from a run's own folder.

Owns the output folder (config.json, metrics.jsonl, eval-before.json, eval-after.json) and what the
recipe says of a step and of the end. All of it can be made again from the run's folder at any time;
nothing here is the run's record. Doesn't own the options (hud_recipe.py).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from everburn.evaluation import AFTER_KEY, BEFORE_KEY, EvaluationReport, load_report
from everburn.ledger import LedgerEntry, find_entry
from everburn.publications import find_publication
from everburn.refs import RunRef
from everburn.store import ArtifactStore
from workers.errors import BadInputError
from workers.hud_recipe import HudOptions
from workflows.messages import ROLLOUT_FAILED, RunResult

CONFIG = "config.json"
METRICS = "metrics.jsonl"
EVALUATIONS = (BEFORE_KEY, AFTER_KEY)


class RecipeFiles:
    """The output folder of one run."""

    def __init__(self, options: HudOptions, run: RunRef, folder: Path) -> None:
        self._options = options
        self._run = run
        self._store = ArtifactStore.of(run)
        self._folder = folder
        self._told = 0
        """Steps in metrics.jsonl."""

    @classmethod
    def open(cls, folder: Path) -> "RecipeFiles":
        """The output folder of a run that was started some time ago; its metrics are made anew.

        Raises:
            BadInputError: it isn't one.
        """
        path = folder / CONFIG
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            run = RunRef.model_validate(known.pop("run"))
            options = TypeAdapter(HudOptions).validate_python(known)
        except (OSError, ValueError, KeyError, AttributeError, ValidationError) as error:
            raise BadInputError(
                f"{folder} isn't the output folder of an `everburn hud train`: {error}"
            ) from None
        files = cls(options, run, folder)
        if options.resume_from is None:
            (folder / METRICS).write_text("", encoding="utf-8")
        return files

    @property
    def run(self) -> RunRef:
        return self._run

    def begin(self) -> None:
        """Write the options, and take away what an earlier run has left.

        A run that resumes from a checkpoint adds to the metrics that are there.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        options = asdict(self._options) | {"run": self._run.model_dump()}
        _write_json(self._folder / CONFIG, options)
        for name in EVALUATIONS:
            (self._folder / name).unlink(missing_ok=True)
        if self._options.resume_from is None:
            (self._folder / METRICS).write_text("", encoding="utf-8")

    def news(self) -> list[str]:
        """Write the metrics of steps that have been committed since; what there is to say."""
        lines = []
        while (entry := find_entry(self._store, self._told + 1)) is not None:
            metric = self._metric(entry)
            with (self._folder / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(metric, sort_keys=True) + "\n")
            self._told += 1
            lines.append(self._step_line(metric))
            if entry.checkpoint is not None:
                lines.append(f"Training checkpoint: {entry.checkpoint}")
        return lines

    def epilogue(self, result: RunResult | None, failure: str | None) -> list[str]:
        """Write the evaluations; the recipe's last words."""
        lines = self.news()
        reports = {name: load_report(self._store, name) for name in EVALUATIONS}
        for name, report in reports.items():
            if report is not None:
                _write_json(self._folder / name, _evaluation(report))
        after = reports[AFTER_KEY]
        if after is not None:
            reward = sum(sample.reward for sample in after.samples) / len(after.samples)
            lines.append(f"Evaluation reward={reward:.3f} on {len(after.samples)} held-out tasks")
            lines.append(f"Sampler checkpoint: {after.snapshot}")
        if result is not None and result.checkpoint is not None:
            lines.append(f"Training checkpoint: {result.checkpoint}")
        if failure is not None and failure.startswith(ROLLOUT_FAILED):
            lines.append(self._failed_phase(failure))
        return [*lines, f"Metrics: {self._folder / METRICS}"]

    def _metric(self, entry: LedgerEntry) -> dict[str, Any]:
        sampled = find_publication(self._store, entry.version - 1)
        return {
            "step": entry.step,
            "reward": entry.metrics.get("rollout/raw_reward", 0.0),
            "reward_std_within_group": entry.metrics["rollout/reward_std_within_group"],
            "rollouts": len(entry.groups) * self._options.group_size,
            "valid_rollouts": entry.metrics["rollout/raw_samples"],
            "kept_groups": entry.metrics["rollout/kept_groups"],
            "training_datums": entry.metrics["rollout/datums"],
            "updated": entry.updated,
            "loss": entry.metrics.get("train/loss"),
            "snapshot": None if sampled is None else sampled.snapshot,
            "seconds": entry.seconds,
        }

    def _step_line(self, metric: dict[str, Any]) -> str:
        loss = "n/a" if metric["loss"] is None else f"{metric['loss']:.6g}"
        return (
            f"step {metric['step']:02d}/{self._options.steps} reward={metric['reward']:.3f} "
            f"kept_groups={metric['kept_groups']}/{self._options.tasks_per_step} "
            f"datums={metric['training_datums']} updated={metric['updated']} loss={loss} "
            f"elapsed={metric['seconds']:.1f}s"
        )

    def _failed_phase(self, failure: str) -> str:
        """A run stops at its first failed rollout; how many more would have failed isn't known."""
        options = self._options
        detail = failure.partition("is 'fail': ")[2] or failure
        if "evaluation of version 0 " in failure:
            count, phase = options.eval_tasks, "initial"
        elif "evaluation of version " in failure:
            count, phase = options.eval_tasks, "final"
        else:
            count, phase = (
                options.tasks_per_step * options.group_size,
                f"policy-{self._told + 1:04d}",
            )
        return f"1/{count} rollouts failed during {phase}: {detail}"


def _evaluation(report: EvaluationReport) -> dict[str, Any]:
    """The report with what the grader says as info; HUD's own record stays in the run's folder."""
    values = report.model_dump(mode="json")
    for sample in values["samples"]:
        sample["info"].pop("hud", None)
    return values


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
