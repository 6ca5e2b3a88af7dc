"""Every way in which the emulator says no, and how each reaches a client.

A training operation is submitted, then its result is fetched. What is wrong with the *content* of
an operation (its data, its checkpoint reference, its numbers) is a **result**: the SDK raises
`RequestFailedError` with the message, and the client stays usable. What is wrong with the
*address* of a request (unknown session, model, snapshot) is an **HTTP status**: at submission a
4xx makes the SDK's client refuse all further work, which is right, since there is nothing left to
talk to.

Owns the classes and their two JSON shapes. Does not own when they are raised.
"""

from typing import Any, ClassVar, Literal

Category = Literal["user", "server"]


class EmulatorError(Exception):
    """Base of all errors with a defined shape on the wire."""

    status: ClassVar[int] = 500
    """HTTP status when it answers a request directly."""
    code: ClassVar[str] = "INTERNAL"
    """The gateway's code beside that status."""
    category: ClassVar[Category] = "server"
    """Category when it is the result of a training operation."""


class InvalidInput(EmulatorError):
    """The request's content can't be used: shape, length, range, name or setting."""

    status = 400
    code = "INVALID_ARGUMENT"
    category = "user"


class NonFinite(InvalidInput):
    """A number that came in, or would have come out, is NaN or infinite."""


class ContextExceeded(InvalidInput):
    """More tokens than the base model has positions."""


class CheckpointNotFound(InvalidInput):
    """No checkpoint answers to the reference."""

    status = 404
    code = "NOT_FOUND"


class CheckpointMismatch(InvalidInput):
    """The checkpoint belongs to another kind of model than the one that loads it."""


class NameTaken(InvalidInput):
    """Checkpoints and snapshots are immutable: a name is used once per run."""


class UnsupportedOperation(InvalidInput):
    """The model, as it was created, can't do this."""


class NotFound(EmulatorError):
    """Unknown session, model, snapshot or request: never existed, or lost in a restart."""

    status = 404
    code = "NOT_FOUND"
    category = "user"


class AlreadyExists(EmulatorError):
    """A resource of this id exists, or existed: ids of deleted trainer jobs stay taken."""

    status = 409
    code = "ALREADY_EXISTS"
    category = "user"


class NotReady(EmulatorError):
    """A deployment that loads weights, or has no replica, can't answer yet."""

    status = 425
    code = "TOO_EARLY"


class SessionExpired(EmulatorError):
    """The session existed and is gone, with everything it held."""

    status = 410
    code = "SESSION_EXPIRED"


class SequenceBroken(EmulatorError):
    """An earlier operation of this model never arrived, so later ones can't run in order."""


def http_body(error: EmulatorError) -> dict[str, Any]:
    """The JSON body of an error response, in the gateway's envelope."""
    return {"error": {"message": str(error), "type": type(error).__name__, "code": error.code}}


def failed_result(error: Exception) -> dict[str, Any]:
    """The JSON result of a training operation that failed, by an error of any kind."""
    if isinstance(error, EmulatorError):
        message, category = str(error), error.category
    else:
        message, category = f"the emulator failed: {type(error).__name__}: {error}", "server"
    return {"error": message, "category": category, "error_class": type(error).__name__}
