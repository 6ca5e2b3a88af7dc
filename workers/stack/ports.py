"""Ports of 127.0.0.1: which are free, and which process uses the others.

A default port that is in use is replaced, with a note. A requested port is never replaced.
"""

import contextlib
import random
import socket
from dataclasses import dataclass

from workers.errors import BadInputError

HOST = "127.0.0.1"
PICKED = range(20_000, 30_000)
"""Free ports come from here: below the range that kernels use for outgoing connections, which could
take a port before its server listens."""
_claims: list[socket.socket] = []
"""The claims of this process, kept open; see free_port()."""


@dataclass(frozen=True)
class Wish:
    """A port for `purpose`: the usual one, or the one requested by `option`."""

    purpose: str
    usual: int
    option: str
    asked: int | None = None


@dataclass(frozen=True)
class PortWishes:
    """The requested ports, if any."""

    temporal: int | None = None
    ui: int | None = None
    emulator: int | None = None

    def wishes(self) -> tuple[Wish, Wish, Wish]:
        """For the Temporal server, its UI and the emulator."""
        return (
            Wish("the Temporal server", 7233, "--port", self.temporal),
            Wish("the Temporal UI", 8233, "--ui-port", self.ui),
            Wish("the emulator", 8780, "--emulator-port", self.emulator),
        )


def choose(wish: Wish) -> tuple[int, str | None]:
    """A free port, and a note if it isn't the usual one.

    Raises:
        BadInputError: the requested port is in use.
    """
    port = wish.asked if wish.asked is not None else wish.usual
    if is_free(port):
        return port, None
    if wish.asked is not None:
        raise BadInputError(
            f"port {port} for {wish.purpose} is in use{_by(port)}: "
            f"free it, or choose another with {wish.option}"
        )
    other = free_port()
    return other, f"port {port} is in use{_by(port)}: {wish.purpose} takes {other}"


def is_free(port: int) -> bool:
    """True if a server could listen there."""
    with socket.socket() as probe:
        # As servers do, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    # On macOS, bind succeeds even if a server listens on all addresses.
    return not is_open(port)


def is_open(port: int) -> bool:
    """True if a process accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0


def free_port() -> int:
    """A port that no other call returns while this process lives, in any process of the machine: a
    UDP socket bound to the same number claims it."""
    for port in random.SystemRandom().sample(PICKED, len(PICKED)):
        claim = socket.socket(type=socket.SOCK_DGRAM)
        try:
            claim.bind((HOST, port))
        except OSError:
            claim.close()
            continue
        _claims.append(claim)
        if is_free(port):
            return port
    raise OSError(f"no free port from {PICKED.start} to {PICKED.stop - 1}")


def occupant(port: int) -> str | None:
    """The process that listens there, `name, pid 123`; None if the system doesn't say."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and connection.pid and connection.laddr[1:2] == (port,):
                return f"{psutil.Process(connection.pid).name()}, pid {connection.pid}"
    return None


def _by(port: int) -> str:
    found = occupant(port)
    return f" ({found})" if found else ""
