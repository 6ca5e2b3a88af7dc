"""The circuit breaker: holds the run when too many rollouts fail.

Owns the rule over the outcomes of completions, in the order of their reports. Doesn't own what
counts as a failure: the caller omits dropped completions and worker failures.
"""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

MAX_CONSECUTIVE = 5
WINDOW = 20
MIN_OBSERVED = 10
MAX_FAILURE_RATE = 0.5


class CircuitBreaker(BaseModel):
    """Trips after 5 recoverable failures in a row, or if at least half of the last 20 outcomes are
    failures (with at least 10 outcomes)."""

    model_config = ConfigDict(extra="forbid")

    consecutive: int = 0
    window: list[bool] = Field(default_factory=list)
    """The last outcomes, True for a failure."""
    tripped: str | None = None

    def record(self, failures: Iterable[bool]) -> None:
        """Count outcomes, True for a failure, in order."""
        for failed in failures:
            self.consecutive = self.consecutive + 1 if failed else 0
            self.window = [*self.window, failed][-WINDOW:]
            self.tripped = self.tripped or self._reason()

    def reset(self) -> None:
        """Start counting again, after a person resumed the run."""
        self.consecutive, self.window, self.tripped = 0, [], None

    def _reason(self) -> str | None:
        if self.consecutive >= MAX_CONSECUTIVE:
            return f"{self.consecutive} rollouts failed in a row"
        failed, observed = sum(self.window), len(self.window)
        if observed >= MIN_OBSERVED and failed >= MAX_FAILURE_RATE * observed:
            return f"{failed} of the last {observed} rollouts failed"
        return None
