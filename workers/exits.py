"""The end of a process that talked to a Temporal server.

Owns one rule: such a process doesn't wait for the interpreter to be taken down. The SDK's runtime
has threads of its own, and one of them that asks for the interpreter in that moment aborts the
process (temporalio/sdk-python issue 300): a command that did its work would end with SIGABRT.
"""

import atexit
import contextlib
import os
import sys
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process with `code`, after what was registered for its end and with its output
    written."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # A reader that is gone (`everburn list | head -1`) takes nothing more.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def exit_code(error: SystemExit) -> int:
    """The code that the interpreter would end with; it also writes what isn't a number."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1
