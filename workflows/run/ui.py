"""What the Temporal UI shows of a run: its status as Markdown."""

from workflows.messages import Status


def describe(status: Status) -> str:
    """Current details of a run's workflow page."""
    lines = [
        f"### {status.phase}",
        f"Waiting for {status.waiting_for}." if status.waiting_for else "",
        f"**Standstill: {status.standstill}.**" if status.standstill else "",
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
