"""Hypothesis settings: the same examples in every run, or, with HYPOTHESIS_PROFILE=thorough, many
more and random ones."""

import os

from hypothesis import HealthCheck, settings

_SLOW_MACHINES = [HealthCheck.too_slow]

settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    max_examples=60,
    stateful_step_count=60,
    suppress_health_check=_SLOW_MACHINES,
)
settings.register_profile(
    "thorough",
    deadline=None,
    max_examples=1000,
    stateful_step_count=100,
    suppress_health_check=_SLOW_MACHINES,
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
