"""The run's current configuration, shared by all parts, so that a change applies to all of them.

Doesn't own which fields may change (everburn/config/changes.py), nor what a change triggers
(producer.py).
"""

from dataclasses import dataclass

from everburn.config import RunConfig


@dataclass
class LiveConfig:
    config: RunConfig
    """As last reconfigured. Read it at each decision; keep no copy."""
