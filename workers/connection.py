"""The Temporal server of a command: that of the folder's stack, or one given by address."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workers.errors import UserError
from workers.stack.folder import StackFolder, StackState

if TYPE_CHECKING:
    from temporalio.client import Client

CONNECT_TIMEOUT = 10.0
DEFAULT_NAMESPACE = "default"
DEFAULT_ADDRESS = "127.0.0.1:7233"


@dataclass(frozen=True)
class Server:
    """ui: the base URL of its web pages, if known. of_folder: True for the server of the folder's
    stack, which commands find without options."""

    address: str
    namespace: str = DEFAULT_NAMESPACE
    ui: str | None = None
    of_folder: bool = False

    @classmethod
    def of_stack(cls, state: StackState) -> "Server":
        return cls(state.temporal, DEFAULT_NAMESPACE, state.ui, of_folder=True)

    @classmethod
    def find(cls, address: str | None, namespace: str, folder: Path) -> "Server":
        """The server at `address`, else that of the folder's stack.

        Raises:
            UserError: neither is given.
        """
        if address is not None:
            return cls(address, namespace)
        state = StackFolder(folder).find()
        if state is None:
            raise UserError(
                "no local stack runs in this folder: start one with `everburn dev`, or give a "
                "Temporal server with --address HOST:PORT"
            )
        return cls.of_stack(state)

    async def connect(self) -> "Client":
        """Raises UserError: no Temporal server answers there."""
        from temporalio.service import RPCError

        try:
            return await asyncio.wait_for(connect(self.address, self.namespace), CONNECT_TIMEOUT)
        except (RuntimeError, RPCError, TimeoutError, ValueError) as error:
            raise UserError(
                f"Temporal doesn't answer at {self.address}: {_first_line(error)}. Start a local "
                "one with `everburn dev`, or check --address"
            ) from None

    def page(self, run_id: str) -> str | None:
        """The run's page in the Temporal UI."""
        if self.ui is None:
            return None
        return f"{self.ui}/namespaces/{self.namespace}/workflows/{run_id}"

    @property
    def options(self) -> str:
        """Options of the `temporal` CLI for this server."""
        return f"--address {self.address} --namespace {self.namespace}"

    @property
    def everburn_options(self) -> str:
        """Options of `everburn` commands for this server, with a leading space."""
        if self.of_folder:
            return ""
        default = self.namespace == DEFAULT_NAMESPACE
        return f" --address {self.address}" + ("" if default else f" --namespace {self.namespace}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0] or type(error).__name__


async def connect(address: str, namespace: str) -> "Client":
    """A client with Everburn's plugin."""
    from temporalio.client import Client

    from workers.plugin import everburn_plugin

    return await Client.connect(address, namespace=namespace, plugins=[everburn_plugin()])
