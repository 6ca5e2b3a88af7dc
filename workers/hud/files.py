"""The output files and lines of the HUD x Fireworks recipe, made from the run folder.

Owns the output folder (config.json, metrics.jsonl, eval-before.json, eval-after.json), the recipe's
names of snapshots and checkpoints, and its lines about steps and the end. All of it can be made
again from the run folder at any time. Doesn't own the options (recipe.py).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everburn.records.checkpoints import find_checkpoint
from everburn.records.ids import RunRef
from everburn.records.ledger import LedgerEntry, find_entry
from everburn.records.publications import find_publication
from everburn.records.store import ArtifactStore, StoreError
from everburn.rollouts.evaluation import AFTER_KEY, BEFORE_KEY, EvaluationReport, load_report
from workers.errors import BadInputError
from workers.hud.recipe import HudOptions
from workflows.messages import RolloutsFailed, RunResult

CONFIG = "config.json"
METRICS = "metrics.jsonl"
OFFSET = "metrics_offset"
"""In config.json: bytes of metrics.jsonl that belong to the run that this one resumes from."""
EVALUATIONS = {BEFORE_KEY: "initial", AFTER_KEY: "final"}
"""The recipe's names of the evaluated snapshots, by file."""
FINAL = "final-state"


class RecipeFiles:
    """The output folder of one run.

    offset: bytes of metrics.jsonl that belong to the run that this one resumes from.
    """

    def __init__(self, options: HudOptions, run: RunRef, folder: Path, offset: int = 0) -> None:
        self._options = options
        self._run = run
        self._store = ArtifactStore.of(run)
        self._folder = folder
        self._offset = offset
        self._steps = 0
        """Steps in metrics.jsonl."""
        self._written = 0
        """Bytes of complete lines in metrics.jsonl."""
        self._printed: set[str] = set()
        """Training checkpoints."""

    @classmethod
    def open(cls, folder: Path) -> "RecipeFiles":
        """The existing output folder of a run; its metrics are written again.

        Raises:
            BadInputError: `folder` isn't an output folder.
        """
        path = folder / CONFIG
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            run = RunRef.model_validate(known.pop("run"))
            offset = int(known.pop(OFFSET))
            options = HudOptions.model_validate(known)
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise BadInputError(
                f"{folder} isn't the output folder of an `everburn hud train`: {error}"
            ) from None
        files = cls(options, run, folder, offset)
        files._write_beginning()
        return files

    @property
    def run(self) -> RunRef:
        return self._run

    def begin(self) -> None:
        """Write the options and remove the files of an earlier run.

        A run that resumes from a checkpoint appends to the existing metrics.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in EVALUATIONS:
            (self._folder / name).unlink(missing_ok=True)
        self._offset = len(self._metrics()) if self._options.resume_from is not None else 0
        self._write_beginning()

    def news(self) -> Iterator[str]:
        """Write the metrics of newly committed steps; yields a line for each step and checkpoint.

        After an error, the next call continues where this one failed.

        Raises:
            OSError, StoreError
        """
        while (entry := find_entry(self._store, self._steps + 1)) is not None:
            metric = self._metric(entry)
            self._append(metric)
            self._steps += 1
            yield self._step_line(metric)
            if entry.checkpoint is not None:
                name = f"state-{entry.step:04d}"
                last = entry.step == self._options.steps
                yield from self._checkpoint(entry.checkpoint, f"{name}, {FINAL}" if last else name)

    def epilogue(self, result: RunResult | None, failed: RolloutsFailed | None) -> Iterator[str]:
        """Write the evaluations; yields the recipe's last lines.

        Raises:
            OSError, StoreError
        """
        yield from self.news()
        reports = {name: load_report(self._store, name) for name in EVALUATIONS}
        for name, report in reports.items():
            if report is not None:
                _write_json(self._folder / name, _evaluation(report, EVALUATIONS[name]))
        if (final := self._final_state(result)) is not None:
            yield from self._checkpoint(final, FINAL)
        after = reports[AFTER_KEY]
        if after is not None:
            reward = sum(sample.reward for sample in after.samples) / len(after.samples)
            yield f"Evaluation reward={reward:.3f} on {len(after.samples)} held-out tasks"
            yield f"Sampler checkpoint: {after.snapshot} ({EVALUATIONS[AFTER_KEY]})"
        if failed is not None:
            yield self._failed_phase(failed)
        yield f"Metrics: {self._folder / METRICS}"

    def _write_beginning(self) -> None:
        """Write the options, and cut the metrics to the lines of the run that was resumed."""
        earlier = self._metrics()[: self._offset]
        self._offset = len(earlier)  # 0 if the file was removed meanwhile
        run = {"run": self._run.model_dump(), OFFSET: self._offset}
        _write_json(self._folder / CONFIG, self._options.model_dump() | run)
        (self._folder / METRICS).write_bytes(earlier)
        self._written = len(earlier)

    def _append(self, metric: dict[str, Any]) -> None:
        line = json.dumps(metric, sort_keys=True).encode() + b"\n"
        with (self._folder / METRICS).open("ab") as file:
            if file.tell() > self._written:
                file.truncate(self._written)  # part of a line, cut off by a full disk
            file.write(line)
        self._written += len(line)

    def _metrics(self) -> bytes:
        path = self._folder / METRICS
        return path.read_bytes() if path.exists() else b""

    def _metric(self, entry: LedgerEntry) -> dict[str, Any]:
        sampled = find_publication(self._store, entry.version - 1)
        return {
            "step": entry.step,
            "reward": entry.metrics.get("rollout/raw_reward"),
            "reward_std_within_group": entry.metrics["rollout/reward_std_within_group"],
            "rollouts": len(entry.groups) * self._options.group_size,
            "valid_rollouts": entry.metrics["rollout/raw_samples"],
            "kept_groups": entry.metrics["rollout/kept_groups"],
            "training_datums": entry.metrics["rollout/datums"],
            "updated": entry.updated,
            "loss": _loss(entry),
            "snapshot": _policy(entry.step),
            "snapshot_path": None if sampled is None else sampled.snapshot,
            "seconds": entry.seconds,
        }

    def _step_line(self, metric: dict[str, Any]) -> str:
        reward = "n/a" if metric["reward"] is None else f"{metric['reward']:.3f}"
        loss = "n/a" if metric["loss"] is None else f"{metric['loss']:.6g}"
        return (
            f"step {metric['step']:02d}/{self._options.steps} reward={reward} "
            f"kept_groups={metric['kept_groups']}/{self._options.tasks_per_step} "
            f"datums={metric['training_datums']} updated={metric['updated']} loss={loss} "
            f"elapsed={metric['seconds']:.1f}s"
        )

    def _checkpoint(self, path: str, name: str) -> list[str]:
        """The line of a training checkpoint, once."""
        if path in self._printed:
            return []
        self._printed.add(path)
        return [f"Training checkpoint: {path} ({name})"]

    def _final_state(self, result: RunResult | None) -> str | None:
        """The checkpoint after the last step, also if the run failed afterwards."""
        if result is not None:
            return result.checkpoint
        if self._steps < self._options.steps:
            return None
        saved = find_checkpoint(self._store, self._steps)
        return None if saved is None else saved.path

    def _failed_phase(self, failed: RolloutsFailed) -> str:
        options = self._options
        if not failed.evaluation:
            count, phase = options.tasks_per_step * options.group_size, _policy(failed.version + 1)
        elif failed.version == 0 and options.eval_before:
            count, phase = options.eval_tasks, EVALUATIONS[BEFORE_KEY]
        else:
            count, phase = options.eval_tasks, EVALUATIONS[AFTER_KEY]
        return f"{failed.failed}/{count} rollouts failed during {phase}: {failed.first}"


class TolerantFiles:
    """An output folder whose write errors don't end the run: a new error is reported once, and
    again at the end."""

    def __init__(self, files: RecipeFiles, folder: str) -> None:
        self._files = files
        self._folder = folder
        self._problem: str | None = None

    def news(self) -> list[str]:
        lines, problem = self._written(self._files.news())
        if problem is not None and self._problem is None:
            lines.append(problem)
        self._problem = problem
        return lines

    def epilogue(self, result: RunResult | None, failed: RolloutsFailed | None) -> list[str]:
        lines, problem = self._written(self._files.epilogue(result, failed))
        return lines if problem is None else [*lines, problem]

    def _written(self, lines: Iterator[str]) -> tuple[list[str], str | None]:
        """The lines up to the first error, and the error."""
        written: list[str] = []
        try:
            for line in lines:
                written.append(line)
        except (OSError, StoreError) as error:
            return written, (
                f"the files in {self._folder} aren't up to date: {error}. The run doesn't need "
                f"them; `everburn hud files {self._folder}` writes them again"
            )
        return written, None


def _policy(step: int) -> str:
    """The recipe's name of the snapshot that a step samples from, numbered by steps."""
    return f"policy-{step:04d}"


def _loss(entry: LedgerEntry) -> float | None:
    """The trainer's loss:sum / total_tokens:sum; None if it reports neither or trained nothing."""
    loss, trained = entry.metrics.get("train/loss"), entry.metrics.get("train/tokens")
    total = entry.metrics.get("train/total_tokens")
    return None if loss is None or not trained or not total else loss * trained / total


def _evaluation(report: EvaluationReport, name: str) -> dict[str, Any]:
    """The report without HUD's own record, which stays in the run folder. name: the recipe's name
    of the snapshot."""
    values = report.model_dump(mode="json")
    values = {"snapshot": name, "snapshot_path": values.pop("snapshot")} | values
    for sample in values["samples"]:
        sample["info"].pop("hud", None)
    return values


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
