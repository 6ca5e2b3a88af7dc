"""What a run goes by: one configuration that all its parts read, so that a change holds for all.

Owns the present configuration. Doesn't own what may change (everburn/config/fields.py), nor what
follows from a change beyond reading it (producer.py).
"""

from dataclasses import dataclass

from everburn.config import RunConfig


@dataclass
class Settings:
    config: RunConfig
    """As it was last reconfigured; read it where a decision is made, and keep no copy."""
