import dataclasses
from pathlib import Path

import pytest
import torch

from everburn.emulator.errors import CheckpointNotFound, InvalidInput, NameTaken
from everburn.emulator.training.checkpoints import CheckpointRef, CheckpointStore, digest
from everburn.emulator.training.engine import TrainingState
from everburn.emulator.training.spec import ModelSpec

RUN = "run-" + "0123456789abcdef" * 2
SPEC = ModelSpec(base_model="base", rank=2, alpha=4, seed=1)
STATE = TrainingState(
    weights={"a": torch.tensor([1.0, 2.0]), "b": torch.eye(2)},
    first_moment={"a": torch.tensor([0.1, 0.2]), "b": torch.zeros(2, 2)},
    second_moment={"a": torch.tensor([0.3, 0.4]), "b": torch.ones(2, 2)},
    step=3,
)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, "acme")


def ref(name: str = "step-1") -> CheckpointRef:
    return CheckpointRef("acme", RUN, name)


def test_a_loaded_checkpoint_equals_the_saved_one(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(ref(), SPEC, STATE)
    reopened = CheckpointStore(tmp_path, "acme")
    loaded = reopened.load(ref())
    assert reopened.info(ref()).spec == SPEC
    assert loaded.step == 3
    for field in ("weights", "first_moment", "second_moment"):
        saved, read = getattr(STATE, field), getattr(loaded, field)
        assert saved.keys() == read.keys()
        assert all(torch.equal(saved[name], read[name]) for name in saved)


def test_names_are_used_once(store: CheckpointStore) -> None:
    store.save(ref(), SPEC, STATE)
    with pytest.raises(NameTaken, match="step-1 exists"):
        store.save(ref(), SPEC, STATE)


def test_a_failed_save_leaves_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    shared = torch.zeros(4)
    broken = dataclasses.replace(STATE, weights={"a": shared, "b": shared})  # safetensors refuses
    with pytest.raises(RuntimeError):
        store.save(ref(), SPEC, broken)
    assert store.list() == []
    assert list((tmp_path / "checkpoints").iterdir()) == []
    store.save(ref(), SPEC, STATE)


def test_checkpoints_are_listed_by_full_reference(store: CheckpointStore) -> None:
    for name in ("step-1", "step-2"):
        store.save(ref(name), SPEC, STATE)
    assert store.list() == [f"acme/{RUN}/step-1", f"acme/{RUN}/step-2"]


def test_the_error_for_a_missing_checkpoint_explains_snapshots(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointNotFound, match=r"step-9\. Sampler snapshots are not checkpoints"):
        store.load(ref("step-9"))


def test_weights_and_optimizer_have_separate_digests(store: CheckpointStore) -> None:
    first = store.save(ref("a"), SPEC, STATE)
    same = store.save(ref("b"), SPEC, STATE)
    later = store.save(ref("c"), SPEC, dataclasses.replace(STATE, step=4))
    moved = dataclasses.replace(STATE, weights={**STATE.weights, "a": torch.tensor([1.0, 2.1])})
    changed = store.save(ref("d"), SPEC, moved)
    assert first.weights_sha256 == same.weights_sha256 == later.weights_sha256
    assert first.weights_sha256 != changed.weights_sha256
    assert first.optimizer_sha256 == same.optimizer_sha256 == changed.optimizer_sha256
    assert first.optimizer_sha256 != later.optimizer_sha256


def test_a_digest_depends_on_names_and_shapes() -> None:
    values = torch.arange(4.0)
    assert digest({"a": values}) != digest({"b": values})
    assert digest({"a": values}) != digest({"a": values.view(2, 2)})


def test_bare_names_belong_to_a_run() -> None:
    assert CheckpointRef.parse("step-1", account="acme", run=RUN) == ref()
    assert CheckpointRef.parse(f"acme/{RUN}/step-1", account="acme") == ref()


@pytest.mark.parametrize(
    "text",
    ["step-1", "", "a/b", f"acme/{RUN}/Step", "acme/run-1/step-1", f"{RUN}/../x", "gs://x/y"],
)
def test_invalid_references_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a checkpoint reference"):
        CheckpointRef.parse(text, account="acme")


def test_another_account_is_refused() -> None:
    with pytest.raises(InvalidInput, match="belongs to account 'other'"):
        CheckpointRef.parse(f"other/{RUN}/step-1", account="acme")
