"""The forms of references to trained state: checkpoints, adapters, models.

Owns the forms and the error texts. Doesn't own whether the referenced state exists: the training
service knows.
"""

import re
from typing import Annotated

from pydantic import AfterValidator

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(_LABEL)
_REFERENCE = re.compile(rf"{_LABEL}/run-[0-9a-f]{{32}}/(?P<name>{_LABEL})")
_CROSS_JOB = re.compile(rf"cross_job://{_LABEL}/{_LABEL}")
_SNAPSHOT = re.compile(r"policy-\d{4,}-e\d+(i\d+)?(-[0-9a-f]{8})?")
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
    """Text in none of the forms of a reference; the message names them."""


def check_checkpoint(text: str) -> str:
    """The text. Raises ReferenceFormError unless it refers to a checkpoint."""
    found = _REFERENCE.fullmatch(text)
    name = found["name"] if found else text
    if _SNAPSHOT.fullmatch(name) or _SESSION_RESOURCE.fullmatch(text):
        raise ReferenceFormError(
            f"{text!r} is a sampler snapshot, not a checkpoint: it holds no optimizer state, and "
            f"training can't continue from it; {CHECKPOINT_FORMS}"
        )
    if not (found or is_bare_name(text) or _CROSS_JOB.fullmatch(text)):
        raise ReferenceFormError(f"{text!r} isn't a checkpoint: {CHECKPOINT_FORMS}")
    return text


def is_bare_name(text: str) -> bool:
    """Whether a reference names a checkpoint within its own run."""
    return _NAME.fullmatch(text) is not None


def check_adapter(text: str) -> str:
    """The text. Raises ReferenceFormError unless it refers to an adapter."""
    if not _ADAPTER.fullmatch(text):
        raise ReferenceFormError(
            f"{text!r} isn't an adapter: write accounts/<account>/models/<id> of a LoRA model, or "
            "the gs:// folder of one in PEFT's format. A checkpoint goes into init_from_checkpoint"
        )
    return text


def check_model_id(text: str) -> str:
    """The text. Raises ReferenceFormError unless it can be the id of a promoted model."""
    if not _MODEL_ID.fullmatch(text):
        raise ReferenceFormError(
            f"{text!r} can't be the id of a model: 1 to 63 characters of a-z, 0-9 and '-'"
        )
    return text


CheckpointName = Annotated[str, AfterValidator(check_checkpoint)]
AdapterName = Annotated[str, AfterValidator(check_adapter)]
ModelId = Annotated[str, AfterValidator(check_model_id)]
