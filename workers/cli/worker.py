"""`everburn worker`: the process of one role.

Owns the environment of user code (the import path, the local `.env`), logging, and the choice of
the server. Doesn't own what a role serves (workers/processes.py).
"""

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from everburn.secrets import keep_environment_secret, redact_logs
from everburn.trainers.backends import EMULATOR_URL_ENV
from workers import dotenv
from workers.connection import DEFAULT_ADDRESS, Server
from workers.environment import let_import_from
from workers.stack.folder import StackFolder

if TYPE_CHECKING:
    from workers.processes import Role


def serve(
    role: "Role",
    address: str | None,
    namespace: str,
    slots: int,
    folder: Path,
    build: str | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: the server at `address`, else that of the folder's stack, else
    DEFAULT_ADDRESS. build: the build id of versioned workers.

    Raises:
        UserError: no Temporal server answers.
    """
    from workers.processes import run_worker

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    dotenv.load(folder)
    keep_environment_secret()
    redact_logs()
    stack = StackFolder(folder).find()
    if stack is not None:
        os.environ.setdefault(EMULATOR_URL_ENV, stack.emulator)
    if role != "orchestrator":
        let_import_from(folder)
    found = address or (stack.temporal if stack is not None else DEFAULT_ADDRESS)

    async def connect_and_serve() -> None:
        await run_worker(role, await Server(found, namespace).connect(), slots, build)

    asyncio.run(connect_and_serve())
