"""The emulator's errors and how each reaches a client.

An error in the content of a training operation (data, checkpoint reference, numbers) is returned as
its result: the SDK raises `RequestFailedError`, and the client stays usable. An error in the
address of a request (unknown session, model, snapshot) is an HTTP status: after a 4xx at submission
the SDK's client refuses all further work, as it should, since its model is gone.
"""

from typing import Any, ClassVar, Literal

Category = Literal["user", "server"]


class EmulatorError(Exception):
    """Base of all errors with a defined shape on the wire."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "INTERNAL"
    """The gateway's code."""
    category: ClassVar[Category] = "server"
    """In the result of a training operation."""


class InvalidInput(EmulatorError):
    """Invalid content: shape, length, range, name or setting."""

    status = 400
    code = "INVALID_ARGUMENT"
    category = "user"


class NonFinite(InvalidInput):
    """An input or a result is NaN or infinite."""


class ContextExceeded(InvalidInput):
    """More tokens than the base model has positions."""


class CheckpointNotFound(InvalidInput):
    """No checkpoint has this reference."""

    status = 404
    code = "NOT_FOUND"


class CheckpointMismatch(InvalidInput):
    """The checkpoint doesn't fit the model that loads it."""


class NameTaken(InvalidInput):
    """Checkpoints and snapshots are immutable: a name is used once per run."""


class UnsupportedOperation(InvalidInput):
    """A model of this kind doesn't support the operation."""


class NotFound(EmulatorError):
    """Unknown session, model, snapshot or request, possibly lost in a restart."""

    status = 404
    code = "NOT_FOUND"
    category = "user"


class AlreadyExists(EmulatorError):
    """The id is taken; ids of deleted trainer jobs stay taken."""

    status = 409
    code = "ALREADY_EXISTS"
    category = "user"


class NotReady(EmulatorError):
    """The deployment is loading weights or has no replica."""

    status = 425
    code = "TOO_EARLY"


class SessionExpired(EmulatorError):
    """The session has ended, with everything it held."""

    status = 410
    code = "SESSION_EXPIRED"


class SequenceBroken(EmulatorError):
    """An earlier operation of this model never arrived, so later ones can't run."""


def http_body(error: EmulatorError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": type(error).__name__, "code": error.code}}


def failed_result(error: Exception) -> dict[str, Any]:
    """The JSON result of a failed training operation."""
    if isinstance(error, EmulatorError):
        message, category = str(error), error.category
    else:
        message, category = f"the emulator failed: {type(error).__name__}: {error}", "server"
    return {"error": message, "category": category, "error_class": type(error).__name__}
