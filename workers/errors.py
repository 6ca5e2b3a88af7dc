"""Problems that a person can solve: told in words, without a traceback.

Owns the exit codes: 1 for what failed, 2 for bad input. The command line prints these errors and
exits; nothing else catches them.
"""


class UserError(Exception):
    """An expected problem; the message says what, where and what to do."""

    exit_code = 1


class BadInputError(UserError):
    """What the person typed or wrote can't be used. Nothing was started."""

    exit_code = 2
