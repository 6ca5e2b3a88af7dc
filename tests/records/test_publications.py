"""Which sampler serves a policy version, and under which lease."""

from pathlib import Path

import pytest

from everburn.records.ids import LeaseKey, RunRef
from everburn.records.publications import (
    Publication,
    StaleLeaseError,
    carry_publication,
    current_publication,
    find_publication,
    publish,
    serving,
)
from everburn.records.store import ArtifactStore


def a_publication(version: int, lease_epoch: int = 1, incarnation: int = 0) -> Publication:
    name = f"policy-{version:04d}-e{LeaseKey(incarnation, lease_epoch).text}"
    return Publication(
        incarnation=incarnation,
        lease_epoch=lease_epoch,
        version=version,
        snapshot=name,
        handle=f"handle of {name}",
    )


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path))


def test_each_version_is_served_by_its_own_snapshot(store: ArtifactStore) -> None:
    publish(store, a_publication(0))
    publish(store, a_publication(1))

    assert serving(store, 0) == a_publication(0)
    assert serving(store, 1) == a_publication(1)
    assert serving(store, 2) is None
    assert current_publication(store) == a_publication(1)


def test_an_older_lease_never_overwrites_a_newer_one(store: ArtifactStore) -> None:
    publish(store, a_publication(3, lease_epoch=2))

    with pytest.raises(StaleLeaseError, match="lease 2 publishes now"):
        publish(store, a_publication(3, lease_epoch=1))
    with pytest.raises(StaleLeaseError):
        publish(store, a_publication(4, lease_epoch=1))
    assert find_publication(store, 4) is None


def test_an_older_incarnation_never_overwrites_a_newer_one(store: ArtifactStore) -> None:
    """The last leases of the older one may have higher lease epochs than the newer one knows."""
    publish(store, a_publication(3, lease_epoch=7))
    publish(store, a_publication(3, lease_epoch=5, incarnation=1))

    assert find_publication(store, 3) == a_publication(3, lease_epoch=5, incarnation=1)
    with pytest.raises(StaleLeaseError, match="lease 5i1 publishes now"):
        publish(store, a_publication(4, lease_epoch=8))
    with pytest.raises(StaleLeaseError):
        publish(store, a_publication(4, lease_epoch=7))
    assert current_publication(store) == a_publication(3, lease_epoch=5, incarnation=1)


def test_a_version_lost_with_its_lease_is_served_by_the_current_policy(
    store: ArtifactStore,
) -> None:
    for version in range(4):
        publish(store, a_publication(version))
    publish(store, a_publication(2, lease_epoch=2), current=False)

    assert serving(store, 1) == a_publication(1), "the new lease doesn't serve yet"
    assert serving(store, 2) == a_publication(2, lease_epoch=2)

    publish(store, a_publication(3, lease_epoch=2))

    assert serving(store, 1) == a_publication(3, lease_epoch=2), "version 1 was not replayed"
    assert serving(store, 2) == a_publication(2, lease_epoch=2), "it was replayed for version 2"


def test_a_step_without_update_is_served_by_the_previous_snapshot(store: ArtifactStore) -> None:
    publish(store, a_publication(5))
    carried = carry_publication(store, 6)

    assert carried.snapshot == a_publication(5).snapshot
    assert serving(store, 6) == carried
    assert current_publication(store) == carried


def test_a_late_repeat_of_a_carried_publication_reverts_nothing(store: ArtifactStore) -> None:
    """Its activity was given up and retried elsewhere, and the run has continued since."""
    publish(store, a_publication(1))
    carried = carry_publication(store, 2)
    publish(store, a_publication(3))

    assert carry_publication(store, 2) == carried
    assert current_publication(store) == a_publication(3)
    assert find_publication(store, 2) == carried


@pytest.mark.parametrize("key", ["publications/lease-000001/000002.json", "current.json"])
def test_a_carried_publication_that_is_written_late_reverts_nothing(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    publish(store, a_publication(1))
    write = ArtifactStore.put

    def write_late(late: ArtifactStore, name: str, data: bytes, *, once: bool = False) -> object:
        if name.endswith(key):
            monkeypatch.undo()
            carry_publication(store, 2)
            publish(store, a_publication(3))
        return write(late, name, data, once=once)

    monkeypatch.setattr(ArtifactStore, "put", write_late)
    carry_publication(store, 2)

    assert current_publication(store) == a_publication(3)
    carried = find_publication(store, 2)
    assert carried is not None
    assert carried.snapshot == a_publication(1).snapshot
    assert serving(store, 3) == a_publication(3)
    publish(store, a_publication(4))
    assert current_publication(store) == a_publication(4)


def test_a_late_publication_of_an_earlier_version_isnt_current(store: ArtifactStore) -> None:
    for version in (1, 3):
        publish(store, a_publication(version))
    publish(store, a_publication(2))

    assert current_publication(store) == a_publication(3)


def test_a_deployment_serves_the_last_published_version(tmp_path: Path) -> None:
    store = ArtifactStore.of(RunRef(store=str(tmp_path), id="run"))
    for version in (1, 2):
        publish(
            store,
            Publication(
                incarnation=0,
                lease_epoch=1,
                version=version,
                snapshot=f"s{version}",
                handle="deployment",
                shared=True,
            ),
        )
    old, new, coming = (serving(store, version) for version in (1, 2, 3))
    assert old == new
    assert new is not None
    assert new.version == 2
    assert coming is None
