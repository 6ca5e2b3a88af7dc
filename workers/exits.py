"""The end of a process that talked to a Temporal server.

Owns two rules. Such a process doesn't wait for the interpreter to be taken down: the SDK's runtime
has threads of its own, and one of them that asks for the interpreter in that moment aborts the
process (temporalio/sdk-python issue 300), so that a command that did its work would end with
SIGABRT. And a worker that user code blocks for good ends at once, with a status of its own.
"""

import atexit
import contextlib
import logging
import os
import sys
from typing import NoReturn

log = logging.getLogger(__name__)


def leave(code: int) -> NoReturn:
    """End the process with `code`, after what was registered for its end and with its output
    written."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A reader that is gone (`everburn list | head -1`) takes nothing more.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


BLOCKED = 75
"""The status of a worker that user code blocked (EX_TEMPFAIL of sysexits.h): start it again."""


def leave_blocked(stack: str) -> NoReturn:
    """End the process, and with it the thread that can't be ended; the log says where that is."""
    log.critical(
        "user code blocks this worker:\n%sthe worker ends, with exit code %d: it was blocked for "
        "longer than any rollout may take. Let rollout functions await, or block in a thread "
        "(everburn.agentic.in_thread)",
        stack,
        BLOCKED,
    )
    os._exit(BLOCKED)


def exit_code(error: SystemExit) -> int:
    """The code that the interpreter would end with; it also writes what isn't a number."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
