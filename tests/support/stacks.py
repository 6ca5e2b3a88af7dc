"""A local stack for several tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.command_line import Everburn, free_ports, wait_until
from support.histories import replay_stack
from workers.stack.folder import StackFolder
from workers.stack.supervisor import START_TIMEOUT


@contextmanager
def running_stack(folder: Path, **environment: str) -> Iterator[Everburn]:
    """`everburn` in a folder with a running stack on its own ports. Its histories are replayed
    after its shutdown. environment: additional variables of all its processes."""
    everburn = Everburn(folder)
    stack = StackFolder(folder)
    try:
        dev = everburn.start("dev", *free_ports(), **environment)

        def is_up() -> bool:
            assert dev.poll() is None, everburn.told()
            state = stack.find()
            return state is not None and state.phase == "running"

        wait_until(is_up, "the stack to run", timeout=START_TIMEOUT + 30)
        yield everburn
    finally:
        everburn.close()
    replay_stack(folder)
