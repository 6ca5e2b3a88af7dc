"""The configuration of a run: every field, its default, its rule.

| file | owns |
| --- | --- |
| fields, provisioning, sources | names, types, bounds and defaults |
| rules | combinations of fields |
| run_config | a configuration read whole, with all problems at once |
| problems | the text of those problems |
| changes | what may change while a run continues, and in a fork |
| names | the forms of references to trained state |

Doesn't own checks that need the outside world (does an entry point import, a dataset exist, a
server answer?): the run's first activity makes them, before anything is provisioned.
"""

from everburn.config.changes import (
    FIXED_IN_FORKS,
    RECONFIGURABLE,
    changed_fields,
    forked,
    reconfigured,
)
from everburn.config.fields import MAX_COMPLETIONS
from everburn.config.problems import ConfigError, describe_problems
from everburn.config.run_config import MAX_CONFIG_BYTES, RunConfig, parse_config
from everburn.config.sources import (
    AdvantageName,
    AdvantageSource,
    DatasetSource,
    Entrypoint,
    LossSource,
)

__all__ = [
    "FIXED_IN_FORKS",
    "MAX_COMPLETIONS",
    "MAX_CONFIG_BYTES",
    "RECONFIGURABLE",
    "AdvantageName",
    "AdvantageSource",
    "ConfigError",
    "DatasetSource",
    "Entrypoint",
    "LossSource",
    "RunConfig",
    "changed_fields",
    "describe_problems",
    "forked",
    "parse_config",
    "reconfigured",
]
