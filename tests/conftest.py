"""Fixtures for all tests: servers, an address without a server, and a tokenizer."""

import os
import socket

# As in workers of a stack (workers/stack/supervisor.py). Otherwise each session that is closed
# sends telemetry for half a minute to a service that is gone.
os.environ.setdefault("TINKER_TELEMETRY", "0")

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.temporal import running_temporal
from workers.exits import leave

if TYPE_CHECKING:
    from support.command_line import Everburn
    from support.emulator import RunningEmulator

HERE = Path(__file__).parent
ENDING = pytest.StashKey[int]()
"""The exit code of the session."""
LONG_LIVED = frozenset({"backends", "chaos", "workflows"})
"""Folders whose workers and stacks outlive a test: all their tests share an event loop."""
STACKS = frozenset({"chaos_stack", "shared_stack"})
"""Fixtures that start a stack for a session: one parallel process runs all of its tests."""
SLOWEST = ("workers", "backends", "workflows")
"""Folders whose tests start first among parallel processes, so that no long test starts last."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _folder(item) in LONG_LIVED and item.get_closest_marker("asyncio"):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
        for stack in STACKS.intersection(item.fixturenames):
            item.add_marker(pytest.mark.xdist_group(stack))
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    """Sort key: when a test starts among parallel processes."""
    if item.get_closest_marker("xdist_group"):
        return -1
    return (*SLOWEST, _folder(item)).index(_folder(item))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).parts[0]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[ENDING] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # This process has been a client and a worker: exits.py says why it ends like one.
    if ENDING in config.stash:
        leave(config.stash[ENDING])


@pytest.fixture(scope="session")
def temporal_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Temporal dev server with Everburn's own settings."""
    with running_temporal(tmp_path_factory.mktemp("temporal")) as address:
        yield address


@pytest.fixture(scope="session")
def shared_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator["RunningEmulator"]:
    from support.emulator import running_emulator

    with running_emulator(tmp_path_factory.mktemp("emulator")) as running:
        yield running


@pytest.fixture
def emulator(shared_emulator: "RunningEmulator") -> Iterator["RunningEmulator"]:
    """A running emulator, without planned faults."""
    yield shared_emulator
    shared_emulator.admin("DELETE", "faults")


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Everburn"]:
    """`everburn` with a running local stack, for tests that don't test the stack itself. Each test
    uses its own names of files and runs there."""
    from support.stacks import running_stack

    with running_stack(tmp_path_factory.mktemp("stack").resolve()) as everburn:
        yield everburn


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK retries without waiting."""
    from support.retries import hurry

    hurry(monkeypatch)


@pytest.fixture
def dead_url() -> Iterator[str]:
    """An address where no server listens: the port is bound, so that no other process takes it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of sixteen words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    words = {"<end>": 0} | {f"w{number}": number for number in range(1, 16)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<end>")), eos_token="<end>"
    ).save_pretrained(folder)
    return folder
