"""The end of a process that talked to a Temporal server.

Owns two rules. Such a process skips the interpreter's shutdown: a thread of the SDK's runtime that
needs the interpreter then aborts the process (temporalio/sdk-python issue 300), so that a
successful command would end with SIGABRT. And a worker that user code blocks permanently ends at
once, with an exit code of its own.
"""

import atexit
import contextlib
import logging
import os
import sys
from typing import NoReturn

log = logging.getLogger(__name__)


def leave(code: int) -> NoReturn:
    """End the process with `code`, after its exit functions, with its output flushed."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # The reader may be gone: `everburn list | head -1`.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


BLOCKED = 75
"""Exit code of a worker that user code blocked (EX_TEMPFAIL of sysexits.h): restart it."""


def leave_blocked(stack: str) -> NoReturn:
    """End the process, since a blocked thread can't be ended alone; log the thread's stack."""
    log.critical(
        "user code blocks this worker:\n%sthe worker ends with exit code %d: it was blocked for "
        "longer than any rollout may take. Let rollout functions await, or run blocking calls in a "
        "thread (everburn.agentic.in_thread)",
        stack,
        BLOCKED,
    )
    os._exit(BLOCKED)


def exit_code(error: SystemExit) -> int:
    """The exit code that the interpreter would use; prints `error.code` if it isn't a number."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
