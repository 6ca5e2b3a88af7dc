"""Problems that the user can solve, reported without a traceback.

Owns the exit codes: 1 for a failure, 2 for bad input. The command line prints these errors and
exits.
"""


class UserError(Exception):
    """An expected problem; the message says what, where and what to do."""

    exit_code = 1


class BadInputError(UserError):
    """The user's input isn't valid. Nothing was started."""

    exit_code = 2
