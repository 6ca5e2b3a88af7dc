"""Parsing of the final integer in an answer, shared by several tasks. Doesn't own rewards."""

import re

_INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)")


def final_integer(answer: str) -> int | None:
    """The integer on the answer's last line; None if the line isn't an integer.

    The line must consist of an optional sign and digits, optionally with well-grouped thousands: a
    number inside a sentence doesn't count.
    """
    lines = answer.strip().splitlines()
    final = lines[-1].strip() if lines else ""
    return int(final.replace(",", "")) if _INTEGER.fullmatch(final) else None
