"""A run started by a test, on any kind of workers.

Owns waiting for it and reading its folder. Farms, backends and chaos tests extend it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from temporalio.client import WorkflowFailureError, WorkflowHandle
from temporalio.exceptions import ApplicationError

from everburn.learning.group import GroupManifest
from everburn.records.ids import RunRef
from everburn.records.ledger import LedgerEntry, read_ledger
from everburn.records.store import ArtifactStore
from support.waiting import PATIENCE, until
from system.processes import result_of
from workflows.messages import RunResult, Status
from workflows.run.train_run import TrainRun


@dataclass
class StartedRun:
    ref: RunRef
    handle: WorkflowHandle[Any, RunResult]

    patience: ClassVar[float] = PATIENCE
    """Maximum seconds to wait for a condition."""

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore.of(self.ref)

    @property
    def ledger(self) -> list[LedgerEntry]:
        return read_ledger(self.store)

    @property
    def groups(self) -> list[GroupManifest]:
        """All completed groups."""
        found = self.store.keys("groups")
        return [GroupManifest.model_validate(self.store.get_json(key)) for key in found]

    async def result(self, patience: float | None = None) -> RunResult:
        try:
            return await result_of(self.handle, patience or self.patience)
        except TimeoutError:
            raise AssertionError(f"the run doesn't end: {await self.status()!r}") from None

    async def failure(self) -> ApplicationError:
        """Why the run failed."""
        try:
            result = await self.result()
        except WorkflowFailureError as error:
            assert isinstance(error.cause, ApplicationError)
            return error.cause
        raise AssertionError(f"the run should have failed, and came to {result!r}")

    async def status(self) -> Status:
        return await self.handle.query(TrainRun.status)

    async def until(self, **fields: Any) -> Status:
        """Wait until the status has these fields; returns it."""
        seen: list[Status] = []

        async def holds() -> bool:
            seen[:] = [await self.status()]
            return all(getattr(seen[0], name) == value for name, value in fields.items())

        await until(holds, lambda: f"for {fields}, and the status is {seen}", self.patience)
        return seen[0]

    async def until_step(self, step: int) -> None:
        """Wait until a step has been committed."""
        await until(lambda: len(self.ledger) >= step, lambda: f"for step {step}", self.patience)
