"""References to trained state: checkpoints, adapters, models, in each form that people write.

Owns the forms and the text that refuses another one. Doesn't own whether what is referred to
exists: the training service says.
"""

import re

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(_LABEL)
_REFERENCE = re.compile(rf"{_LABEL}/run-[0-9a-f]{{32}}/(?P<name>{_LABEL})")
_CROSS_JOB = re.compile(rf"cross_job://{_LABEL}/{_LABEL}")
_SNAPSHOT = re.compile(r"policy-\d{4,}-e\d+(-[0-9a-f]{8})?")
"""Names that Everburn gives to sampler snapshots, as the SDK completes them."""
_SESSION_RESOURCE = re.compile(r"accounts/[^/]+/trainingSessions/.*")
_MODEL_ID = re.compile(r"[a-z0-9-]{1,63}")
_ADAPTER = re.compile(r"accounts/[^/]+/models/[^/]+|gs://.+")

CHECKPOINT_FORMS = (
    "write <account>/run-<32 hex digits>/<name>, as it is printed when a checkpoint is saved, or "
    "cross_job://<job>/<name> for a trainer job's, or for `everburn resume` the bare name of one "
    "of the run's own, for example state-10"
)


class ReferenceFormError(ValueError):
    """Text that can't refer to what is wanted; says what could."""


def check_checkpoint(text: str) -> None:
    """Raises ReferenceFormError for what is no reference to a checkpoint."""
    found = _REFERENCE.fullmatch(text)
    name = found["name"] if found else text
    if _SNAPSHOT.fullmatch(name) or _SESSION_RESOURCE.fullmatch(text):
        raise ReferenceFormError(
            f"{text!r} is a sampler snapshot, not a checkpoint: it holds no optimizer state, and "
            f"training can't go on from it; {CHECKPOINT_FORMS}"
        )
    if not (found or is_bare_name(text) or _CROSS_JOB.fullmatch(text)):
        raise ReferenceFormError(f"{text!r} isn't a checkpoint: {CHECKPOINT_FORMS}")


def is_bare_name(text: str) -> bool:
    """Whether a reference names a checkpoint within its own run."""
    return _NAME.fullmatch(text) is not None


def check_adapter(text: str) -> None:
    """Raises ReferenceFormError for what is no reference to an adapter."""
    if not _ADAPTER.fullmatch(text):
        raise ReferenceFormError(
            f"{text!r} isn't an adapter: write accounts/<account>/models/<id> of a LoRA model, or "
            "the gs:// folder of one in PEFT's format. A checkpoint goes into init_from_checkpoint"
        )


def check_model_id(text: str) -> None:
    """Raises ReferenceFormError for what can't be the id of a promoted model."""
    if not _MODEL_ID.fullmatch(text):
        raise ReferenceFormError(
            f"{text!r} can't be the id of a model: 1 to 63 characters of a-z, 0-9 and '-'"
        )
