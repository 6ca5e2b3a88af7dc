"""Reading an answer: what several tasks grade by.

Owns one rule, the final integer. Doesn't own what an answer is worth.
"""

import re

_INTEGER = re.compile(r"[+-]?(?:\d+|\d{1,3}(?:,\d{3})+)")


def final_integer(answer: str) -> int | None:
    """The integer that is the answer's whole last line; None where it is none.

    The line must be an optional sign and digits, or digits with well-grouped thousands, and
    nothing else: a number inside a sentence doesn't count.
    """
    lines = answer.strip().splitlines()
    final = lines[-1].strip() if lines else ""
    return int(final.replace(",", "")) if _INTEGER.fullmatch(final) else None
