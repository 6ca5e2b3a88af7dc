"""What commands print to, and staying with a run that one has started.

Doesn't own the watching (run.py). Light: what is heavy is imported inside.
"""

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from workers.cli.run import Launch
    from workers.stack.attachment import Stack

console = Console()


def print_line(onto: Console, text: str) -> None:
    """A line that can be copied: never wrapped, coloured or read as markup."""
    onto.print(text, highlight=False, markup=False, soft_wrap=True)


def say(text: str) -> None:
    print_line(console, text)


def stay_with(order: "Launch", stack: "Stack | None" = None) -> int:
    """Launch, and say what still runs when the person leaves it; the exit code."""
    from workers.cli.run import RunLeft, launch

    if stack is not None and not stack.started_here:
        # As it is now: its workers may have been started again.
        order = replace(order, found=stack.folder.find() or stack.state)
    try:
        return asyncio.run(launch(order, console))
    except RunLeft as left:
        if stack is not None:
            stack.stay()
        for line in left.description(order.server, stack):
            say(line)
        return left.exit_code
