"""Publication records: which sampler handle serves (run, version), and under which lease epoch.

Owns the records, the rule that an older epoch never overwrites a newer one, and the rule by which
a version is served whose snapshot died with its session. Doesn't own snapshots themselves
(trainers/) or sampling (sampling.py).
"""

from pydantic import BaseModel, ConfigDict

from everburn.refs import CURRENT_KEY, publication_key
from everburn.store import ArtifactStore


class StaleEpochError(RuntimeError):
    """A superseded lease tried to change what its successor owns."""


class Publication(BaseModel):
    """`handle` carries no credentials; it may sample until the lease `epoch` has ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    epoch: int
    snapshot: str
    handle: str


def publish(store: ArtifactStore, publication: Publication, *, current: bool = True) -> None:
    """Record who serves a version from now on; `current` makes it the policy of the run.

    Raises:
        StaleEpochError: a newer lease has published this version, or the current one.
    """
    key = publication_key(publication.version)
    for found in (find_publication(store, publication.version), current_publication(store)):
        if found is not None and found.epoch > publication.epoch:
            raise StaleEpochError(
                f"version {found.version} is served under epoch {found.epoch}; a publication of "
                f"epoch {publication.epoch} is refused"
            )
    value = publication.model_dump(mode="json")
    store.put_json(key, value)
    if current:
        store.put_json(CURRENT_KEY, value)


def find_publication(store: ArtifactStore, version: int) -> Publication | None:
    """The record of a version, whether or not its session still lives."""
    found = store.find_json(publication_key(version))
    return None if found is None else Publication.model_validate(found)


def current_publication(store: ArtifactStore) -> Publication | None:
    """The policy of the run: what was published last."""
    found = store.find_json(CURRENT_KEY)
    return None if found is None else Publication.model_validate(found)


def serving(store: ArtifactStore, version: int) -> Publication | None:
    """Who serves a version now: its own snapshot, or, once that died with a superseded lease that
    nobody replayed it for, the current policy's."""
    own, current = find_publication(store, version), current_publication(store)
    if own is not None and current is not None and own.epoch < current.epoch:
        return current
    return own


def carry_publication(store: ArtifactStore, version: int) -> Publication:
    """Let the snapshot of version - 1 serve `version` too: its step changed nothing.

    Raises:
        FileNotFoundError: version - 1 was never published.
    """
    previous = Publication.model_validate(store.get_json(publication_key(version - 1)))
    carried = previous.model_copy(update={"version": version})
    publish(store, carried)
    return carried
