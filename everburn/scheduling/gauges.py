"""Time-weighted means of the scheduler's gauges over a publication window.

The caller provides the time. Doesn't own what the gauges measure.
"""

from pydantic import BaseModel, ConfigDict, Field


class Gauges(BaseModel):
    """Values that hold from one `set` to the next. Times are seconds on a monotonic clock."""

    model_config = ConfigDict(extra="forbid")

    start: float
    last: float
    values: dict[str, float] = Field(default_factory=dict)
    areas: dict[str, float] = Field(default_factory=dict)

    @classmethod
    def starting(cls, now: float) -> "Gauges":
        return cls(start=now, last=now)

    def set(self, now: float, values: dict[str, float]) -> None:
        self._advance(now)
        self.values = dict(values)

    def close_window(self, now: float) -> dict[str, float]:
        """The mean of each gauge since the window began (the current value if no time has passed);
        begins the next window."""
        self._advance(now)
        span = self.last - self.start
        means = {
            name: self.areas.get(name, 0.0) / span if span > 0 else value
            for name, value in self.values.items()
        }
        self.start, self.areas = self.last, {}
        return means

    def _advance(self, now: float) -> None:
        elapsed = max(0.0, now - self.last)
        for name, value in self.values.items():
            self.areas[name] = self.areas.get(name, 0.0) + value * elapsed
        self.last = max(self.last, now)
