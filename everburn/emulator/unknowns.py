"""Switches for behavior of the live service that hasn't been tested: off is the best case, on the
worst case.

Tests train with all of them on. Doesn't own the behavior, which is in the named files.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknowns:
    applies_repetitions: bool = False
    """A submission that the client repeats after a lost response is applied again (service.py). A
    repeated optimizer step without gradients applies Adam's momentum again
    (training/operations.py)."""
    shares_full_parameters: bool = False
    """All full-parameter models of a dedicated job share weights, optimizer and accumulated
    gradients (service.py)."""
    keeps_gradients: bool = False
    """Loading a state keeps the accumulated gradients (training/operations.py)."""


BEST_CASE = Unknowns()
WORST_CASE = Unknowns(applies_repetitions=True, shares_full_parameters=True, keeps_gradients=True)
