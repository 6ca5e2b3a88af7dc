"""What people see of a run: its status and result, and its page in the Temporal UI."""

import math
from typing import Any

from temporalio import workflow
from temporalio.common import SearchAttributeUpdate

with workflow.unsafe.imports_passed_through():
    from activities.search_attributes import POLICY_VERSION, REWARD, RUN, STEP
    from workflows.messages import RunResult, Status
    from workflows.run.state import RunState


class RunPage:
    """The run's page in the Temporal UI, and the attributes that its list is filtered by."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._shown: tuple[int, float | None] | None = None

    async def keep(self) -> None:
        """Show each change of phase, wait, stall and notes, forever; figures alone don't count."""
        while True:
            self.show()
            shown = self._text
            await workflow.wait_condition(lambda: self._text != shown)  # noqa: B023

    @property
    def _text(self) -> tuple[str, str, str, list[str]]:
        state = self._state
        return state.phase, state.waiting_for, state.stall(workflow.time()), state.notes

    def show(self) -> None:
        state, step = self._state, self._state.step
        workflow.set_current_details(describe(status_of(state)))
        shown = (step.committed, step.reward)
        if not state.search_attributes or shown == self._shown:
            return
        self._shown = shown
        attributes: list[SearchAttributeUpdate[Any]] = [
            RUN.value_set(state.run.id),
            STEP.value_set(step.committed),
            POLICY_VERSION.value_set(state.version),
        ]
        if step.reward is not None:
            attributes.append(REWARD.value_set(step.reward))
        workflow.upsert_search_attributes(attributes)


def status_of(state: RunState) -> Status:
    """The answer to the `status` query."""
    now, producer, step = workflow.time(), state.producer, state.step
    return Status(
        run=state.run.id,
        folder=state.run.folder,
        phase=state.phase,
        waiting_for=state.waiting_for,
        stall=state.stall(now),
        step=step.committed,
        total_steps=math.ceil(producer.cursor.total / producer.queue.batch_size),
        version=state.version,
        rows_total=producer.cursor.total,
        rows_resolved=producer.cursor.resolved_count,
        groups_in_flight=len(producer.out),
        samples_in_flight=producer.admission.in_flight,
        groups_ready=len(producer.queue.batch),
        batch_size=producer.queue.batch_size,
        staleness_capacity=producer.admission.staleness_capacity,
        reward=step.reward,
        step_seconds=step.seconds,
        elapsed_seconds=now - state.started_at,
        evaluations=state.evaluation.metrics,
        lease_epoch=state.lease.lease_epoch,
        recovered=state.recovered,
        checkpoint=state.checkpoints.last,
        saved=state.checkpoints.saved,
        model=state.model,
        error=state.fatal.error if state.fatal else None,
        origin=str(state.origin) if state.origin else None,
        notes=state.notes,
    )


def result_of(state: RunState) -> RunResult:
    return RunResult(
        run=state.run.id,
        folder=state.run.folder,
        steps=state.step.committed,
        version=state.version,
        rows=state.producer.cursor.resolved_count,
        stopped=state.commands.stop,
        seconds=workflow.time() - state.started_at,
        checkpoint=state.checkpoints.last,
        model=state.model,
        evaluations=state.evaluation.metrics,
        recovered=state.recovered,
    )


def describe(status: Status) -> str:
    """Current details of a run's workflow page."""
    lines = [
        f"### {status.phase}",
        f"Waiting for {status.waiting_for}." if status.waiting_for else "",
        f"**Stalled: {status.stall}.**" if status.stall else "",
        "",
        "| | |",
        "| --- | --- |",
        f"| steps | {status.step} of about {status.total_steps} |",
        f"| policy version | {status.version} |",
        f"| rows | {status.rows_resolved} of {status.rows_total} resolved |",
        f"| in flight | {status.samples_in_flight} rollouts of {status.groups_in_flight} rows |",
        f"| open batch | {status.groups_ready} of {status.batch_size} prompt groups |",
    ]
    if status.reward is not None:
        lines.append(f"| reward | {status.reward:.3f} |")
    if status.checkpoint is not None:
        lines.append(f"| checkpoint | `{status.checkpoint}` |")
    if status.recovered is not None:
        lines.append(f"| recovered | {status.recovered.text} |")
    if status.model is not None:
        lines.append(f"| model | `{status.model}` |")
    for version, metrics in sorted(status.evaluations.items()):
        if "eval/reward" in metrics:
            lines.append(f"| evaluation of v{version} | reward {metrics['eval/reward']:.3f} |")
    if status.origin is not None:
        lines.append(f"| forked from | {status.origin} |")
    lines.append(f"| folder | `{status.folder}` |")
    if status.error is not None:
        lines += ["", f"**{status.error}**"]
    lines += [f"- {note}" for note in status.notes]
    return "\n".join(lines)
