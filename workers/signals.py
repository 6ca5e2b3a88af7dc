"""SIGINT and SIGTERM to a command in the foreground; what was there before is put back."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """SIGTERM, where it is treated as Ctrl-C is."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In the block, SIGTERM raises as Ctrl-C does, so that what was started is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def interrupts_call(callback: Callable[[signal.Signals], None]) -> Iterator[None]:
    """In the block, the running event loop calls `callback` for each SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in INTERRUPTS}
    for number in INTERRUPTS:
        loop.add_signal_handler(number, callback, number)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
