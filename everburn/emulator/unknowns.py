"""What nobody has tried on the live service yet, as switches: off, the kinder answer; on, the
worst.

Tests train with all of them on. Owns only the switches; each is obeyed where it says.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknowns:
    applies_repetitions: bool = False
    """A submission that is sent again, because its answer was lost, is applied again: nothing is
    de-duplicated (service.py). An optimizer step, too, on a gradient of zero if there is none: the
    momentum is applied twice (emulator/training/operations.py)."""
    shares_full_parameters: bool = False
    """All full-parameter models of a dedicated job are one: weights, optimizer and accumulated
    gradients (service.py)."""
    keeps_gradients: bool = False
    """Loading a state, with optimizer or without, leaves what is accumulated
    (emulator/training/operations.py)."""


KINDEST = Unknowns()
WORST = Unknowns(applies_repetitions=True, shares_full_parameters=True, keeps_gradients=True)
