"""Checks of a run on the local stack before anything is started.

The workers check the same (everburn/rollouts/task.py); on one machine the answer is known before a
server has started.
"""

from pathlib import Path

from everburn.config import RunConfig
from everburn.trainers.backends import MissingKeyError, api_key
from workers import dotenv
from workers.cli.run_file import missing_datasets
from workers.environment import imports_from
from workers.errors import BadInputError
from workers.signals import sigterm_interrupts


def prepare_local(config: RunConfig, folder: Path) -> None:
    """Check datasets and API key, and train the emulator's base model at its first use.

    folder: a base model's recipe of the user is imported from here.

    Raises:
        BadInputError: a dataset file, the API key or the base model is missing.
    """
    missing = missing_datasets(config)
    if missing:
        raise BadInputError("there is no dataset file " + " and no ".join(missing))
    dotenv.load(folder)
    try:
        api_key(config)
    except MissingKeyError as error:
        raise BadInputError(str(error)) from None
    if not config.local or config.base_url is not None:
        return
    from everburn.emulator.models import base_model

    try:
        with sigterm_interrupts(), imports_from(folder):
            base_model.ensure(config.base_model)
    except base_model.UnknownBaseModel as error:
        raise BadInputError(str(error)) from None
