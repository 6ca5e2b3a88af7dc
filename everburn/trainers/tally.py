"""The tally of a step's gradients: what was sent since the last update, and what the trainer took.

Gradients accumulate in the trainer's memory, and an update takes whatever is there: of some that
were lost meanwhile nothing else tells. A trainer that divides by the number of sequences knows it,
and where it reports it with the update (`num_sequences`, as the emulator does; whether Fireworks
does isn't known), it is compared. Doesn't own what a mismatch leads to: the lease ends.
"""

from collections.abc import Sequence

from everburn.learning.datums import Datum
from everburn.trainers.protocol import TrainerStateLostError


class Tally:
    def __init__(self) -> None:
        self._sent: int | None = 0
        """Datums with anything to learn from; None where that can't be told."""

    def add(self, datums: Sequence[Datum]) -> None:
        """Gradients of these are on their way."""
        if self._sent is not None:
            self._sent += sum(bool(datum.advantages.any()) for datum in datums)

    def lose_count(self) -> None:
        """Nothing is compared at the next update."""
        self._sent = None

    def clear(self) -> None:
        """Nothing is accumulated."""
        self._sent = 0

    def settle(self, metrics: dict[str, float]) -> None:
        """An update has taken what was accumulated, and reports this.

        Raises:
            TrainerStateLostError: it was made of something else than what was sent.
        """
        sent, self._sent = self._sent, 0
        taken = metrics.get("num_sequences")
        if sent is not None and taken is not None and taken != sent:
            raise TrainerStateLostError(
                f"the trainer's update was made of {taken:g} sequences, and {sent} were sent: "
                "gradients were lost, or come from somebody else"
            )
