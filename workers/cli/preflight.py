"""What a run on the local stack needs before anything is started.

The workers check all of it again (everburn/rollouts/task.py); here it is checked because on one
machine the answer is known at once, not after a server has started.
"""

from pathlib import Path

from everburn.config import RunConfig
from everburn.trainers.backends import MissingKeyError, api_key
from workers import dotenv
from workers.cli.run_file import missing_datasets
from workers.environment import imports_from
from workers.errors import BadInputError


def check_local(config: RunConfig, folder: Path) -> None:
    """Raises BadInputError: a dataset file isn't there, or no API key."""
    missing = missing_datasets(config)
    if missing:
        raise BadInputError("there is no dataset file " + " and no ".join(missing))
    dotenv.load(folder)
    try:
        api_key(config)
    except MissingKeyError as error:
        raise BadInputError(str(error)) from None


def make_base_model(config: RunConfig, folder: Path) -> None:
    """Make the emulator's base model on its first use: it takes a while, and shows how far it is.

    folder: where a recipe that the run brings along is imported from.

    Raises:
        BadInputError: the emulator has no such model.
    """
    if not config.local or config.base_url is not None:
        return
    from everburn.emulator.models import base_model

    try:
        with imports_from(folder):
            base_model.ensure(config.base_model)
    except base_model.UnknownBaseModel as error:
        raise BadInputError(str(error)) from None
