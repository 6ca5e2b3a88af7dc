"""User code that hangs in threads."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

POOL = 32
"""Maximum threads of asyncio.to_thread on any machine."""


class Hanging:
    """Occupies all asyncio.to_thread threads of a loop until released."""

    def __init__(self) -> None:
        self.free = threading.Event()

    def take_all(self) -> None:
        """Occupy the threads of the running loop."""
        for _ in range(POOL):
            asyncio.get_running_loop().run_in_executor(None, self.free.wait, 60)


@contextmanager
def hanging() -> Iterator[Hanging]:
    """Release the threads after the block."""
    hanging = Hanging()
    try:
        yield hanging
    finally:
        hanging.free.set()
