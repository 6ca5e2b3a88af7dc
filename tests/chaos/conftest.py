"""One stack for all chaos tests; each test has its own troubles and runs."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.harness import Chaos, open_stack, process_command
from system.processes import Stack


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chaos_stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with open_stack(tmp_path_factory.mktemp("chaos")) as opened:
        yield opened


@pytest.fixture(params=["serverless", pytest.param("dedicated", marks=pytest.mark.chaos)])
def backend(request: pytest.FixtureRequest) -> str:
    """Each test runs on both backends unless it requests one of them."""
    return str(request.param)


@pytest_asyncio.fixture(loop_scope="session")
async def chaos(chaos_stack: Stack, backend: str) -> AsyncIterator[Chaos]:
    """The stack with all processes up and nothing planned."""
    opened = Chaos(chaos_stack, chaos_stack.processes.folder, backend)
    await opened.emulator_answers()
    await opened.begin()
    yield opened
    await opened.close()


@pytest_asyncio.fixture(loop_scope="session")
async def standby(chaos_stack: Stack) -> AsyncIterator[None]:
    """A second trainer worker: one holds the lease, the other stands by."""
    command = process_command("worker", "trainer", "--address", chaos_stack.address)
    chaos_stack.processes.start("trainer-2", command)
    yield
    chaos_stack.processes.stop("trainer-2")
