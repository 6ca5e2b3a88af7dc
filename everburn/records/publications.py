"""Publication records: which sampler handle serves (run, version), and under which lease.

Owns the records (separate per lease), the refusal of superseded leases, and the rule for serving a
version whose snapshot ended with its session. Doesn't own snapshots (trainers/) or sampling
(rollouts/sampling.py).

A paused writer may write late. The record of the current version only says where to start looking
for newer versions, so a late write is harmless.
"""

from collections.abc import Callable

from everburn.records.ids import Leased, LeaseKey
from everburn.records.keys import PUBLICATIONS, current_publication_key, publication_key
from everburn.records.store import ArtifactStore


class StaleLeaseError(RuntimeError):
    """A superseded lease tried to change what its successor owns."""


class Publication(Leased):
    """handle: without credentials; usable for sampling until the lease ends. shared: the handle is
    a deployment's, which serves the version published last."""

    version: int
    snapshot: str
    handle: str
    shared: bool = False


def publish(store: ArtifactStore, publication: Publication, *, current: bool = True) -> None:
    """Record the sampler that serves a version. `current` makes the version the run's policy,
    unless a later version already is.

    Raises:
        StaleLeaseError: a newer lease publishes.
    """
    _check_lease(store, publication)
    value = publication.model_dump(mode="json")
    store.put_json(publication_key(publication.version, publication.lease_key), value)
    if current:
        _make_current(store, publication)


def find_publication(store: ArtifactStore, version: int) -> Publication | None:
    """The newest record of a version, even if its session has ended."""
    return _newest(store, lambda lease: _find(store, publication_key(version, lease)))


def current_publication(store: ArtifactStore) -> Publication | None:
    """The run's current policy: the version published last."""
    return _newest(store, lambda lease: _current(store, lease))


def serving(store: ArtifactStore, version: int) -> Publication | None:
    """The publication that serves a version now.

    Its own snapshot; or the current policy's, if its own ended with a superseded lease and wasn't
    replayed, or on a deployment, which serves one version.
    """

    def own_or_current(lease: LeaseKey) -> Publication | None:
        own = _find(store, publication_key(version, lease))
        if own is not None and not own.shared:
            return own
        return _current(store, lease) or own

    found = _newest(store, own_or_current)
    # An earlier version doesn't serve an unpublished one.
    return found if found is not None and found.version >= version else None


def carry_publication(store: ArtifactStore, version: int) -> Publication:
    """Serve `version`, whose step changed no weights, from the snapshot of version - 1. An existing
    publication of the version stays.

    Raises:
        FileNotFoundError: version - 1 was never published.
        StaleLeaseError: a newer lease publishes.
    """
    current = current_publication(store)
    if current is not None and current.version >= version:
        return find_publication(store, version) or current
    previous = find_publication(store, version - 1)
    if previous is None:
        raise FileNotFoundError(f"version {version - 1} was never published")
    carried = previous.model_copy(update={"version": version})
    _check_lease(store, carried)
    key = publication_key(version, carried.lease_key)
    store.put_json(key, carried.model_dump(mode="json"), once=True)
    carried = Publication.model_validate(store.get_json(key))
    _make_current(store, carried)
    return carried


def _check_lease(store: ArtifactStore, publication: Publication) -> None:
    newest = max(publishing_leases(store), default=publication.lease_key)
    if newest > publication.lease_key:
        raise StaleLeaseError(
            f"lease {newest.text} publishes now; a publication of version {publication.version} "
            f"under lease {publication.lease_key.text} is refused"
        )


def _make_current(store: ArtifactStore, publication: Publication) -> None:
    """Make the version current, unless a later one already is."""
    found = _current(store, publication.lease_key)
    # `found` may be this version itself: its record was written before.
    if found is None or found.version <= publication.version:
        value = publication.model_dump(mode="json")
        store.put_json(current_publication_key(publication.lease_key), value)


def _current(store: ArtifactStore, lease: LeaseKey) -> Publication | None:
    """The version published last under a lease.

    A lease publishes versions in ascending order, and recovery republishes older ones before the
    lease's first current version: records with numbers after the current version are newer.
    """
    found = _find(store, current_publication_key(lease))
    while found is not None:
        later = _find(store, publication_key(found.version + 1, lease))
        if later is None:
            break
        found = later
    return found


def publishing_leases(store: ArtifactStore) -> list[LeaseKey]:
    """The leases that have published anything, the newest first."""
    names = (key.rpartition("/")[2] for key in store.keys(PUBLICATIONS))
    return sorted((LeaseKey.named(name) for name in names), reverse=True)


def _newest(
    store: ArtifactStore, find: Callable[[LeaseKey], Publication | None]
) -> Publication | None:
    return next((found for lease in publishing_leases(store) if (found := find(lease))), None)


def _find(store: ArtifactStore, key: str) -> Publication | None:
    found = store.find_json(key)
    return None if found is None else Publication.model_validate(found)
