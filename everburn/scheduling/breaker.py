"""The circuit breaker: when failing rollouts stop being bad luck.

A pure state machine over the outcomes of completions in the order in which they were reported.
It doesn't own what a failure is (dropped draws and lost workers aren't counted by its caller).
"""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

MAX_CONSECUTIVE = 5
WINDOW = 20
MIN_OBSERVED = 10
MAX_FAILURE_RATE = 0.5


class CircuitBreaker(BaseModel):
    """Trips after 5 recoverable failures in a row, or when at least half of the last 20 outcomes
    are failures, once 10 were seen."""

    model_config = ConfigDict(extra="forbid")

    consecutive: int = 0
    window: list[bool] = Field(default_factory=list)
    """The last outcomes, true for a failure."""
    tripped: str | None = None
    """Why it tripped, once it has."""

    def record(self, failures: Iterable[bool]) -> None:
        """Count outcomes, true for a failure, in the order in which they were reported."""
        for failed in failures:
            self.consecutive = self.consecutive + 1 if failed else 0
            self.window = [*self.window, failed][-WINDOW:]
            self.tripped = self.tripped or self._reason()

    def reset(self) -> None:
        """A person has looked at it: start counting anew."""
        self.consecutive, self.window, self.tripped = 0, [], None

    def _reason(self) -> str | None:
        if self.consecutive >= MAX_CONSECUTIVE:
            return f"{self.consecutive} rollouts failed in a row"
        failed, seen = sum(self.window), len(self.window)
        if seen >= MIN_OBSERVED and failed >= MAX_FAILURE_RATE * seen:
            return f"{failed} of the last {seen} rollouts failed"
        return None
