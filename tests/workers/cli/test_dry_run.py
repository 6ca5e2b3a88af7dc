"""The report of what a run would do."""

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
    shown = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    shown = {name: text.strip() for name, text in shown.items()}
    assert shown["folder"] == str(everburn.folder / "runs" / "first")
    assert shown["trains"] == "a LoRA adapter of rank 8 on accounts/fireworks/models/some"
    assert shown["key"] == "read from FIREWORKS_API_KEY by the workers"
    assert shown["rows"] == "10 x 2 epochs = 20"
    assert shown["steps"] == "7 optimizer steps of 3 rows x 4"
    assert shown["rollouts"].startswith("80 completions")
    assert shown["tokens"].startswith("at most 8,000 sampled")
    assert shown["in flight"].startswith("at most 24 completions")
    assert shown["checkpoints"] == "4: state-0, state-3, state-6, state-7"
    assert shown["evaluations"] == "5 of 10 held-out rows each: at most 5,000 sampled tokens"
    assert "8 policy versions" in shown["session"]
    assert "'my-model'" in shown["promotes"]
    assert sorted(everburn.folder.iterdir()) == before
    assert everburn.processes() == []


def test_resources_that_a_dedicated_run_would_create(everburn: Everburn) -> None:
    path = ROOT / "examples" / "arithmetic" / "run.dedicated.json"
    trainer = {
        "training_shape": "accounts/fireworks/trainingShapes/some",
        "region": "US_IOWA_1",
        "replicas": 2,
        "pending_timeout": 5400.0,
    }
    changes = [f"trainer={json.dumps(trainer)}", "deployment.cleanup=scale_to_zero"]
    changes += ["deployment.replicas=3"]
    shown = {}
    for given in ([], ["--id", "My run"]):
        settings = [part for change in changes for part in ("--set", change)]
        done = everburn("run", str(path), "--dry-run", *given, *settings)
        assert done.returncode == 0, done.stderr
        shown[len(given)] = done.stdout
    assert "as eb-arithmetic-dedicated-<time>-<8 hex digits>; at its end: delete" in shown[0]
    assert "as eb-my-run-<8 hex digits>; at its end: scale to zero" in shown[2]
    for text in (
        "at           https://api.fireworks.ai (dedicated)\n",
        "shape accounts/fireworks/trainingShapes/some, region US_IOWA_1, replicas 2",
        "waits up to 90 min for capacity, then up to 1 h until it is ready",
        "tokenizer Qwen/Qwen3-4B, shape the training shape's",
        "replicas 3, weight sync scope per_trainer, transition type sync",
        "provisioning.json in the run's folder has both ids",
    ):
        assert text in shown[2]


def test_resources_that_a_dedicated_run_would_use(everburn: Everburn) -> None:
    path = ROOT / "examples" / "arithmetic" / "run.dedicated.json"
    changes = ["trainer.job_id=our-job", "deployment.deployment_id=our-deployment"]
    settings = [part for change in changes for part in ("--set", change)]
    done = everburn("run", str(path), "--dry-run", *settings)
    assert done.returncode == 0, done.stderr
    assert "trainer job  our-job, which exists already and is kept\n" in done.stdout
    assert "deployment   our-deployment, which exists already and is kept\n" in done.stdout
    assert "provisioning.json" not in done.stdout
    assert "region" not in done.stdout  # nothing is created


def test_the_initial_evaluation_can_be_disabled(everburn: Everburn) -> None:
    (everburn.folder / "sums.py").write_text(TASK)
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG))
    done = everburn("run", "run.json", "--dry-run", "--set", "initial_evaluation=false")
    assert done.returncode == 0, done.stderr
    # Versions 2, 4, 6 and the last, 7.
    assert "4 of 10 held-out rows each: at most 4,000 sampled tokens" in done.stdout


def test_dry_runs_of_the_examples(everburn: Everburn) -> None:
    path = ROOT / "examples" / "arithmetic" / "run.json"
    done = everburn("run", str(path), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "40 optimizer steps of 8 rows x 8" in done.stdout


def test_a_run_that_cannot_start_is_reported(everburn: Everburn) -> None:
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG))
    done = everburn("run", "run.json", "--dry-run")
    assert done.returncode == 2
    assert "can't import 'sums'" in done.stderr


def test_a_checkpoint_name_without_a_path_is_for_resume_only(everburn: Everburn) -> None:
    (everburn.folder / "run.json").write_text(json.dumps(CONFIG))
    done = everburn("run", "run.json", "--dry-run", "--set", "init_from_checkpoint=state-4")
    assert done.returncode == 2
    assert "everburn resume RUN --set init_from_checkpoint=state-4" in done.stderr
