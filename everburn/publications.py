"""Publication records: which sampler handle serves (run, version), and under which lease epoch.

Owns the record and the rule that an older epoch never overwrites a newer one. Doesn't own
snapshots themselves (trainers/) or sampling (sampling.py).
"""

from pydantic import BaseModel, ConfigDict

from everburn.refs import publication_key
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


def publish(store: ArtifactStore, publication: Publication) -> None:
    """Record who serves a version from now on.

    Raises:
        StaleEpochError: a newer lease has published this version.
    """
    key = publication_key(publication.version)
    found = find_publication(store, publication.version)
    if found is not None and found.epoch > publication.epoch:
        raise StaleEpochError(
            f"version {publication.version} is served under epoch {found.epoch}; a publication of "
            f"epoch {publication.epoch} is refused"
        )
    store.put_json(key, publication.model_dump(mode="json"))


def find_publication(store: ArtifactStore, version: int) -> Publication | None:
    found = store.find_json(publication_key(version))
    return None if found is None else Publication.model_validate(found)


def carry_publication(store: ArtifactStore, version: int) -> Publication:
    """Let the snapshot of version - 1 serve `version` too: its step changed nothing.

    Raises:
        FileNotFoundError: version - 1 was never published.
    """
    previous = Publication.model_validate(store.get_json(publication_key(version - 1)))
    carried = previous.model_copy(update={"version": version})
    publish(store, carried)
    return carried
