"""SIGINT and SIGTERM in a foreground command; previous handlers are restored."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """In the block, SIGTERM raises like Ctrl-C, so that started processes are stopped."""

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
