"""User code that hangs in threads."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

POOL = 32
"""As many threads as asyncio.to_thread has at most, on any machine."""


class Hanging:
    """Takes all threads that asyncio.to_thread has on a loop, for good."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def take_all(self) -> None:
        """Those of the running loop."""
        for _ in range(POOL):
            asyncio.get_running_loop().run_in_executor(None, self.free.wait, 60)


@contextmanager
def hanging() -> Iterator[Hanging]:
    """Let go after the block."""
    hanging = Hanging()
    try:
        yield hanging
    finally:
        hanging.free.set()
