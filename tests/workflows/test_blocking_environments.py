"""HUD environments whose graders block, on a real rollout worker."""

import json
from datetime import timedelta
from pathlib import Path

import pytest

from everburn.emulator.models.base_model import TINY
from everburn.learning.rollout_file import read_rollout
from everburn.records.keys import rollout_key
from support.emulator import RunningEmulator
from support.farm import Farm, Start
from support.histories import run_histories
from support.script import Script
from workflows.children import prompt_group

pytest.importorskip("hud", reason="needs the extra: pip install 'everburn[hud]'")

ENV = Path(__file__).parents[1] / "hud" / "waves" / "env.py"
ROWS, COMPLETIONS, WAVES, SECONDS = 16, 4, 4, 1.5
HEARTBEAT_TIMEOUT = 3.0


async def test_graders_may_together_block_for_longer_than_a_heartbeat_timeout(
    start_tuned: Start,
    tunable_farm: Farm,
    emulator: RunningEmulator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prompt_group, "HEARTBEAT_TIMEOUT", timedelta(seconds=HEARTBEAT_TIMEOUT))
    log, rows = tmp_path / "log", tmp_path / "rows.jsonl"
    write(rows, [a_task(row, log) for row in range(ROWS)])
    rollout = {
        "name": "everburn.hud.rollouts:make_rollout_fn",
        "kwargs": {"env_path": str(ENV), "renderer": "plain"},
    }
    run = await start_tuned(
        Script(),
        rollout=rollout,
        dataset=str(rows),
        base_model=TINY,
        tokenizer_model=None,
        base_url=emulator.base_url,
        lora_rank=4,
        max_completion_tokens=6,
        completions_per_prompt=COMPLETIONS,
        prompt_groups_per_step=ROWS,
    )
    await run.result()

    blocks = sorted(tuple(map(float, line.split())) for line in lines(log))
    assert len(blocks) == ROWS * COMPLETIONS, "nothing was graded twice"
    ends = [end for _, end in blocks]
    assert max(ends) - blocks[0][0] > HEARTBEAT_TIMEOUT
    assert all(begin < max(ends[:n]) for n, (begin, _) in enumerate(blocks) if n), "no pause"
    assert sum(begin < ends[0] for begin, _ in blocks) > ROWS * COMPLETIONS / WAVES, "side by side"

    histories = await run_histories(tunable_farm.client, run.id, run.first_execution)
    scheduled = [
        event.activity_task_scheduled_event_attributes.activity_type.name
        for history in histories
        for event in history.events
    ]
    assert scheduled.count("rollout") == ROWS * COMPLETIONS, "nothing was tried again"

    graded = 0
    for group in run.groups:
        for member in group.members:
            _, completion = read_rollout(run.store, rollout_key(group.key, member.completion))
            right = len(set(completion.answer or "")) / 10
            assert [segment.reward for segment in completion.segments] == [right]
            graded += 1
    assert graded == ROWS * COMPLETIONS


def a_task(row: int, log: Path) -> dict[str, object]:
    start = f"{chr(97 + row)}b"
    args = {"start": start, "wave": row % WAVES, "seconds": SECONDS, "log": str(log)}
    return {"env": "waves", "id": "letters", "slug": f"letters-{row}", "args": args}


def write(path: Path, tasks: list[dict[str, object]]) -> None:
    path.write_text("\n".join(map(json.dumps, tasks)))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
