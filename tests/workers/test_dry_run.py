"""What a run would do, said without doing it."""

import json
from typing import Any

from support.command_line import ROOT, Everburn

CONFIG: dict[str, Any] = {
    "rollout": "sums:make_rollout_fn",
    "dataset": {"name": "sums:rows"},
    "evaluation_dataset": {"name": "sums:rows"},
    "evaluation_interval": 2,
    "backend": "serverless",
    "base_model": "accounts/fireworks/models/some",
    "tokenizer_model": "Some/Tokenizer",
    "lora_rank": 8,
    "epochs": 2,
    "completions_per_prompt": 4,
    "prompt_groups_per_step": 3,
    "max_head_offpolicy_versions": 1,
    "max_completion_tokens": 100,
    "dcp_save_interval": 3,
    "output_model_id": "my-model",
}
TASK = """
def make_rollout_fn(setup):
    raise RuntimeError("a dry run calls no rollout factory")

def rows():
    return [{"row": row} for row in range(10)]
"""


def test_everything_a_run_would_do(everburn: Everburn) -> None:
    (everburn.folder / "sums.py").write_text(TASK)
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG))
    before = sorted(everburn.folder.iterdir())
    done = everburn("run", "run.json", "--dry-run", "--id", "first", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    told = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    told = {name: text.strip() for name, text in told.items()}
    assert told["folder"] == str(everburn.folder / "runs" / "first")
    assert told["trains"] == "a LoRA adapter of rank 8 on accounts/fireworks/models/some"
    assert told["key"] == "read from FIREWORKS_API_KEY by the workers"
    assert told["rows"] == "10 x 2 epochs = 20"
    assert told["steps"] == "7 optimizer steps of 3 rows x 4"
    assert told["rollouts"].startswith("80 completions")
    assert told["tokens"].startswith("at most 8,000 sampled")
    assert told["in flight"].startswith("at most 24 completions")
    assert told["checkpoints"] == "4: state-0, state-3, state-6, state-7"
    assert told["evaluations"] == "5 of 10 held-out rows each: at most 5,000 sampled tokens"
    assert "8 policy versions" in told["session"]
    assert "'my-model'" in told["promotes"]
    assert sorted(everburn.folder.iterdir()) == before
    assert everburn.processes() == []


def test_the_initial_policy_is_evaluated_unless_that_is_not_wanted(everburn: Everburn) -> None:
    (everburn.folder / "sums.py").write_text(TASK)
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG))
    done = everburn("run", "run.json", "--dry-run", "--set", "initial_evaluation=false")
    assert done.returncode == 0, done.stderr
    # Versions 2, 4, 6 and the last, 7.
    assert "4 of 10 held-out rows each: at most 4,000 sampled tokens" in done.stdout


def test_the_examples_can_be_looked_at(everburn: Everburn) -> None:
    path = ROOT / "examples" / "arithmetic" / "run.json"
    done = everburn("run", str(path), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "40 optimizer steps of 8 rows x 8" in done.stdout


def test_what_cannot_run_is_said(everburn: Everburn) -> None:
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG))
    done = everburn("run", "run.json", "--dry-run")
    assert done.returncode == 2
    assert "can't import 'sums'" in done.stderr


def test_a_checkpoints_bare_name_is_for_resume(everburn: Everburn) -> None:
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG))
    done = everburn("run", "run.json", "--dry-run", "--set", "init_from_checkpoint=state-4")
    assert done.returncode == 2
    assert "everburn resume RUN --set init_from_checkpoint=state-4" in done.stderr
