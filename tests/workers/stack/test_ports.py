import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from workers.errors import BadInputError
from workers.stack import ports
from workers.stack.ports import Wish, choose, free_port, is_free


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_the_usual_port_is_used_without_a_note() -> None:
    port = free_port()
    assert choose(Wish("the emulator", port, "--emulator-port")) == (port, None)


def test_a_free_port_is_returned_once_among_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(ports, "PICKED", range(port, port + 1))
    with pytest.raises(OSError, match="no free port"):
        free_port()
    only = f"from workers.stack import ports; ports.PICKED = range({port}, {port + 1})"
    pick = [sys.executable, "-c", f"{only}; ports.free_port()"]
    other = subprocess.run(pick, capture_output=True, text=True)
    assert "OSError: no free port" in other.stderr


def test_a_usual_port_in_use_is_replaced_with_a_note(taken: int) -> None:
    port, note = choose(Wish("the Temporal server", taken, "--port"))
    assert port != taken
    assert is_free(port)
    assert note is not None
    assert f"port {taken} is in use" in note
    assert f"the Temporal server takes {port}" in note


def test_a_requested_port_is_never_replaced(taken: int) -> None:
    with pytest.raises(BadInputError) as caught:
        choose(Wish("the Temporal server", free_port(), "--port", asked=taken))
    text = str(caught.value)
    assert f"port {taken} for the Temporal server is in use" in text
    assert f"pid {os.getpid()}" in text
    assert "--port" in text
