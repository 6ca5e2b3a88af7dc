r"""Grading an answer: the content of the last \boxed{} against the ground truth.

Owns the extraction of the box, the normal form of compared strings, and the order of the judges:
equal strings, then math_verify if it is installed, then equal numbers. math_verify runs in its own
process, because a model's expression can keep it busy forever.
"""

import asyncio
import contextlib
import importlib.util
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

TOLERANCE = Decimal("1e-6")
VERIFY_SECONDS = 10.0
"""Maximum seconds of one judgment; nearly all take milliseconds."""
JUDGE = (sys.executable, str(Path(__file__).with_name("judge.py")))

_WORDS = re.compile(r"\\(left|right|displaystyle|limits|,|!|;|:|\s)|\\?\$|\s+")
_TEXT = re.compile(r"\\(text|mathrm|mbox|textbf|mathbf)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete \boxed{...}; braces may be nested."""
    start = text.rfind(r"\boxed{")
    while start >= 0:
        first = start + len(r"\boxed{")
        depth = 1
        for position in range(first, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[first:position]
        # Cut off at the token limit: an earlier one may be complete.
        start = text.rfind(r"\boxed{", 0, start)
    return None


def normalised(answer: str) -> str:
    """The normal form, in which spelling variants of an answer are equal."""
    text = _TEXT.sub(r"\2", answer)
    text = _WORDS.sub("", text)
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = _THOUSANDS.sub("", text)
    return text.rstrip(".").lower()


def equal_numbers(answer: str, truth: str) -> bool:
    """Whether both are decimal numbers that differ by at most 1e-6 in absolute terms, so integers
    must be equal."""
    try:
        # Exact for close numbers, unlike floats above 2**53.
        difference = Decimal(normalised(answer)) - Decimal(normalised(truth))
    except ArithmeticError:
        return False
    return difference.is_finite() and abs(difference) <= TOLERANCE


@dataclass(frozen=True)
class Grade:
    """reward: 1 or 0. by: the judge that decided. answer: the parsed answer, None without a box."""

    reward: float
    by: str
    answer: str | None


class UndecidedError(Exception):
    """No judge could decide in time: that isn't a reward of zero."""


class Grader:
    """Grades answers with one math_verify process, which is replaced if it hangs or dies."""

    def __init__(
        self, command: Sequence[str] | None = None, seconds: float = VERIFY_SECONDS
    ) -> None:
        installed = importlib.util.find_spec("math_verify") is not None
        self._command = command if command is not None else JUDGE if installed else None
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def grade(self, answer: str | None, truth: str) -> Grade:
        """Raises UndecidedError if math_verify didn't judge in time and the others can't."""
        if answer is None:
            return Grade(0.0, "no box", None)
        if normalised(answer) == normalised(truth):
            return Grade(1.0, "string", answer)
        verdict = await self._verify(answer, truth) if self._command else False
        if verdict:
            return Grade(1.0, "math_verify", answer)
        if equal_numbers(answer, truth):
            return Grade(1.0, "number", answer)
        if verdict is None:
            raise UndecidedError(f"math_verify didn't judge {answer[:80]!r} in {self._seconds:g} s")
        return Grade(0.0, "all", answer)

    async def close(self) -> None:
        """Stop the math_verify process, if any."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _verify(self, answer: str, truth: str) -> bool | None:
        """math_verify's verdict; None if it took too long."""
        question = json.dumps({"answer": answer, "truth": truth}).encode() + b"\n"
        async with self._turn:
            try:
                return await asyncio.wait_for(self._ask(question), self._seconds)
            except (TimeoutError, OSError, ValueError):
                await self.close()
                return None
            except asyncio.CancelledError:
                # A late answer would be read as the answer to the next question.
                await self.close()
                raise

    async def _ask(self, question: bytes) -> bool:
        if self._process is None or self._process.returncode is not None:
            assert self._command is not None
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(question)
        await process.stdin.drain()
        return bool(json.loads(await process.stdout.readline()))
