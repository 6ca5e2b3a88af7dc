"""The console that commands print to."""

from rich.console import Console

console = Console()


def print_line(onto: Console, text: str) -> None:
    """Print a line that can be copied: never wrapped, colored or parsed as markup."""
    onto.print(text, highlight=False, markup=False, soft_wrap=True)


def say(text: str) -> None:
    print_line(console, text)
