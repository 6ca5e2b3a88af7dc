"""Admission, cursor, queue and breaker together, driven as by the workflow.

`Driver` does the workflow's part around the state machines, without tasks or time. Scenarios show
examples; in `Scheduler` hypothesis chooses the events, and all counts are compared with plain sets
after each event.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everburn.records.ids import GroupKey, GroupResult
from everburn.rollouts.dataset import RowOrder
from everburn.scheduling.admission import Admission
from everburn.scheduling.breaker import CircuitBreaker
from everburn.scheduling.cursor import Cursor
from everburn.scheduling.queue import GroupQueue


@dataclass
class Running:
    """An attempt of a row: its version stamp, and how many of its calls have ended."""

    version: int
    ended: int = 0


@dataclass
class Driver:
    group: int
    batch_size: int
    off_policy: int = 0
    concurrency: int | None = None
    rows: int = 10
    epochs: int = 1
    min_group_size: int = 1
    max_retries: int = 0
    first_version: int = 0

    running: dict[GroupKey, Running] = field(default_factory=dict)
    waiting: list[GroupKey] = field(default_factory=list)
    """Attempts that wait for free calls; their row keeps its reservation."""
    finished: list[GroupKey] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    """Number of attempts per row."""
    retries: dict[int, int] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    steps: list[list[GroupResult]] = field(default_factory=list)
    """The committed batches."""
    outcomes: list[bool] = field(default_factory=list)
    """All outcomes that the breaker recorded since its last reset."""
    publications: int = 0

    def __post_init__(self) -> None:
        self.admission = Admission(
            group=self.group,
            batch=self.group * self.batch_size,
            max_head_offpolicy_versions=self.off_policy,
            concurrency=self.concurrency,
            initial_version=self.first_version,
            version=self.first_version,
        )
        self.cursor = Cursor(total=self.rows * self.epochs)
        self.queue = GroupQueue(batch_size=self.batch_size)
        self.breaker = CircuitBreaker()
        self.refill()

    @property
    def published(self) -> bool:
        """Whether the current step is published and not committed."""
        return self.publications > len(self.steps)

    @property
    def sealed(self) -> bool:
        """Whether the current batch is final: full, or the last one."""
        nothing_comes = self.cursor.exhausted and not self.running and not self.waiting
        return self.queue.full or (nothing_comes and bool(self.queue.batch))

    @property
    def done(self) -> bool:
        return self.cursor.low == self.cursor.total

    def refill(self) -> None:
        if self.breaker.tripped:
            return
        while self.waiting and self.admission.can_retry():
            self._start(self.waiting.pop(0), self.admission.retry())
        while not self.waiting and self.admission.can_admit():
            row = self.cursor.take()
            if row is None:
                break
            self._start(self._next_attempt(row), self.admission.admit())

    def calls_ended(self, key: GroupKey, total: int) -> None:
        """total: the number of the group's calls that have ended."""
        attempt = self.running.get(key)
        if attempt is None or total <= attempt.ended:
            return
        self.admission.release(total - attempt.ended)
        attempt.ended = total
        self.refill()

    def group_ended(
        self, key: GroupKey, survivors: int, outcomes: Iterable[bool] = (), keep: bool = True
    ) -> None:
        """survivors: surviving completions. outcomes: for the breaker. keep: the dynamic filter's
        decision."""
        attempt = self._leave(key)
        if attempt is None:
            return
        outcomes = list(outcomes)
        self.breaker.record(outcomes)
        self.outcomes += outcomes
        incomplete = survivors < self.min_group_size
        if incomplete and self.retries.get(key.cursor, 0) < self.max_retries:
            self.retries[key.cursor] = self.retries.get(key.cursor, 0) + 1
            self.waiting.append(self._next_attempt(key.cursor))
        elif incomplete or not keep:
            self.admission.reject()
            self.cursor.resolve(key.cursor)
            self.rejected.append(key.cursor)
        else:
            self.admission.accept()
            self.accepted.append(key.cursor)
            self.queue.accept(
                GroupResult(
                    key=key,
                    version=attempt.version,
                    outcome="accepted",
                    survivors=survivors,
                    datums=survivors,
                )
            )
        self.refill()

    def group_cancelled(self, key: GroupKey) -> None:
        """The group has no outcome; its row will be issued again."""
        if self._leave(key) is not None:
            self.admission.reject()
            self.cursor.give_back(key.cursor)
            self.refill()

    def publish(self) -> None:
        assert self.sealed
        assert not self.queue.ready
        self.admission.publish()
        self.publications += 1
        self.refill()

    def commit(self) -> None:
        batch = self.queue.commit()
        for group in batch:
            self.cursor.resolve(group.key.cursor)
        self.steps.append(batch)

    def train(self) -> None:
        """The step transaction of a sealed batch."""
        while self.queue.ready:
            self.queue.take_submission()
        self.publish()
        self.commit()

    def resume(self) -> None:
        self.breaker.reset()
        self.outcomes = []
        self.refill()

    def state(self) -> list[str]:
        """The state that a workflow carries through continue-as-new."""
        machines = (self.admission, self.cursor, self.queue, self.breaker)
        return [machine.model_dump_json() for machine in machines]

    def _next_attempt(self, row: int) -> GroupKey:
        number = self.attempts.get(row, 0)
        self.attempts[row] = number + 1
        return GroupKey(cursor=row, attempt=number)

    def _start(self, key: GroupKey, version: int) -> None:
        self.running[key] = Running(version)

    def _leave(self, key: GroupKey) -> Running | None:
        attempt = self.running.pop(key, None)
        if attempt is not None:
            self.admission.release(self.group - attempt.ended)
            self.finished.append(key)
        return attempt


def key(cursor: int, attempt: int = 0) -> GroupKey:
    return GroupKey(cursor=cursor, attempt=attempt)


def stamps(batch: list[GroupResult]) -> dict[int, int]:
    """The version at which each row of a batch was admitted."""
    return {group.key.cursor: group.version for group in batch}


def test_without_off_policy_versions_training_is_fully_on_policy():
    driver = Driver(group=4, batch_size=2, off_policy=0, rows=6)
    for step in (1, 2, 3):
        assert len(driver.running) == 2, "exactly one batch is running"
        for running in reversed(list(driver.running)):
            driver.group_ended(running, survivors=4)
        driver.train()
        assert set(stamps(driver.steps[-1]).values()) == {step - 1}
    assert driver.done


def test_without_off_policy_versions_retries_rejects_and_cancels_stay_on_policy():
    driver = Driver(group=2, batch_size=2, off_policy=0, rows=5, min_group_size=2, max_retries=1)
    driver.group_ended(key(0), survivors=0)
    driver.group_ended(key(1), survivors=2, keep=False)
    driver.group_cancelled(key(2))
    assert sorted(driver.running, key=str) == [key(0, 1), key(2, 1)]
    driver.group_ended(key(0, 1), survivors=2)
    driver.group_ended(key(2, 1), survivors=2)
    driver.train()
    driver.group_ended(key(4), survivors=2)
    driver.group_ended(key(3), survivors=2)
    driver.train()
    assert [stamps(batch) for batch in driver.steps] == [{0: 0, 2: 0}, {4: 1, 3: 1}]
    assert driver.rejected == [1]
    assert driver.done


def test_with_one_off_policy_version_the_next_batch_runs_during_training():
    driver = Driver(group=4, batch_size=2, off_policy=1, rows=6)
    assert len(driver.running) == 4
    driver.group_ended(key(0), survivors=4)
    driver.group_ended(key(1), survivors=4)
    assert driver.sealed
    assert set(driver.running) == {key(2), key(3)}
    driver.group_ended(key(3), survivors=4)
    assert driver.queue.ready == 2, "an early group of the next step isn't ready"
    driver.train()
    assert set(driver.running) == {key(2), key(4), key(5)}
    assert driver.queue.ready == 1


def test_a_straggler_is_trained_however_old_it_is():
    driver = Driver(group=2, batch_size=1, off_policy=1, rows=9)
    while len(driver.steps) < 8:
        newest = max(driver.running, key=lambda running: running.cursor)
        driver.group_ended(newest, survivors=2)
        driver.train()
    driver.group_ended(key(0), survivors=2)
    driver.train()
    assert stamps(driver.steps[8]) == {0: 0}
    assert driver.done


def test_each_finished_call_refills_if_concurrency_is_limited():
    driver = Driver(group=4, batch_size=4, off_policy=0, concurrency=8, rows=4)
    assert set(driver.running) == {key(0), key(1)}
    driver.calls_ended(key(0), 2)
    driver.calls_ended(key(1), 1)
    assert len(driver.running) == 2
    driver.calls_ended(key(1), 2)
    assert set(driver.running) == {key(0), key(1), key(2)}
    driver.calls_ended(key(1), 2)
    driver.calls_ended(key(1), 1)
    assert driver.admission.in_flight == 8, "repeated and late reports free no capacity"


def test_the_last_partial_batch_is_trained():
    driver = Driver(group=2, batch_size=3, off_policy=1, rows=5)
    for running in list(driver.running):
        driver.group_ended(running, survivors=1)
    driver.train()
    assert driver.sealed
    driver.train()
    assert [len(batch) for batch in driver.steps] == [3, 2]
    assert driver.done


def test_a_partial_batch_is_not_sealed_while_rows_are_running():
    driver = Driver(group=2, batch_size=3, rows=2)
    driver.group_ended(key(0), survivors=2)
    assert not driver.sealed
    driver.group_cancelled(key(1))
    assert not driver.sealed
    assert set(driver.running) == {key(1, 1)}
    driver.group_ended(key(1, 1), survivors=2)
    assert driver.sealed


def test_a_run_with_only_rejected_rows_ends_without_a_step():
    driver = Driver(group=2, batch_size=2, rows=7, epochs=3)
    while driver.running:
        driver.group_ended(next(iter(driver.running)), survivors=2, keep=False)
    assert driver.done
    assert (driver.steps, driver.admission.version) == ([], 0)


def test_a_tripped_breaker_stops_admission_until_the_run_is_resumed():
    driver = Driver(group=2, batch_size=1, rows=9, min_group_size=1)
    for row in (0, 1, 2):
        driver.group_ended(key(row), survivors=0, outcomes=[True, True])
    assert driver.breaker.tripped
    assert not driver.running
    assert driver.admission.can_admit()
    driver.resume()
    assert set(driver.running) == {key(3)}


class Scheduler(RuleBasedStateMachine):
    """Random events, in any order, with repeated reports."""

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(2, 4), "G")
        batch_size = data.draw(st.integers(1, 4), "P")
        limits = st.one_of(st.none(), st.integers(group, 3 * group * batch_size))
        self.driver = Driver(
            group=group,
            batch_size=batch_size,
            off_policy=data.draw(st.integers(0, 3), "O"),
            concurrency=data.draw(limits, "C"),
            rows=data.draw(st.integers(1, 12), "rows"),
            epochs=data.draw(st.integers(1, 3), "epochs"),
            min_group_size=data.draw(st.integers(1, group), "min_group_size"),
            max_retries=data.draw(st.integers(0, 2), "max_incomplete_group_retries"),
            first_version=data.draw(st.sampled_from([0, 5]), "initial version"),
        )

    def pick_running(self, data: st.DataObject) -> GroupKey:
        return data.draw(st.sampled_from(list(self.driver.running)), "group")

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data())
    def some_calls_end(self, data: st.DataObject) -> None:
        self.driver.calls_ended(
            self.pick_running(data), data.draw(st.integers(0, self.driver.group), "total")
        )

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data(), keep=st.booleans())
    def a_group_ends(self, data: st.DataObject, keep: bool) -> None:
        survivors = data.draw(st.integers(0, self.driver.group), "survivors")
        failed = data.draw(st.integers(0, self.driver.group - survivors), "failed, not dropped")
        outcomes = data.draw(st.permutations([True] * failed + [False] * survivors), "order")
        self.driver.group_ended(self.pick_running(data), survivors, outcomes, keep)

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data())
    def a_group_succeeds(self, data: st.DataObject) -> None:
        size = self.driver.group
        self.driver.group_ended(self.pick_running(data), size, [False] * size)

    @precondition(lambda self: self.driver.running)
    @rule(data=st.data())
    def a_group_is_cancelled(self, data: st.DataObject) -> None:
        self.driver.group_cancelled(self.pick_running(data))

    @precondition(lambda self: self.driver.finished)
    @rule(data=st.data(), what=st.sampled_from(["accepted", "rejected", "cancelled", "calls"]))
    def an_old_report_is_repeated(self, data: st.DataObject, what: str) -> None:
        group = data.draw(st.sampled_from(self.driver.finished), "group")
        before = self.driver.state()
        if what == "cancelled":
            self.driver.group_cancelled(group)
        elif what == "calls":
            self.driver.calls_ended(group, self.driver.group)
        else:
            self.driver.group_ended(group, self.driver.group, [True] * 5, keep=what == "accepted")
        assert self.driver.state() == before

    @precondition(lambda self: self.driver.queue.ready)
    @rule()
    def ready_groups_are_submitted(self) -> None:
        before = self.driver.queue.ready
        assert len(self.driver.queue.take_submission()) == before

    @precondition(lambda self: self.driver.queue.submitted and not self.driver.published)
    @rule()
    def the_lease_fails(self) -> None:
        self.driver.queue.restart()
        assert self.driver.queue.ready == len(self.driver.queue.batch)

    @precondition(
        lambda self: (
            self.driver.sealed and not self.driver.queue.ready and not self.driver.published
        )
    )
    @rule()
    def the_step_publishes(self) -> None:
        self.driver.publish()

    @precondition(lambda self: self.driver.published)
    @rule()
    def the_step_is_committed(self) -> None:
        self.driver.commit()

    @precondition(lambda self: self.driver.breaker.tripped)
    @rule()
    def the_run_is_resumed(self) -> None:
        self.driver.resume()

    @rule()
    def the_workflow_continues_as_new(self) -> None:
        for name in ("admission", "cursor", "queue", "breaker"):
            machine = getattr(self.driver, name)
            restored = type(machine).model_validate_json(machine.model_dump_json())
            assert restored == machine
            setattr(self.driver, name, restored)

    @invariant()
    def capacity_follows_the_formula(self) -> None:
        driver = self.driver
        batch = driver.group * driver.batch_size
        reserved = driver.group * (len(driver.running) + len(driver.waiting))
        accepted = driver.group * len(driver.accepted)
        staleness = (driver.publications + driver.off_policy + 1) * batch - accepted - reserved
        in_flight = sum(driver.group - attempt.ended for attempt in driver.running.values())
        free = math.inf if driver.concurrency is None else driver.concurrency - in_flight
        admission = driver.admission
        assert admission.capacity == min(staleness, free)
        assert admission.can_admit() == (min(staleness, free) >= driver.group)
        assert (admission.accepted, admission.reserved) == (accepted, reserved)
        assert admission.in_flight == in_flight
        assert staleness >= 0
        assert free >= 0

    @invariant()
    def every_row_is_in_one_place(self) -> None:
        driver = self.driver
        cursor = driver.cursor
        trained = [group.key.cursor for batch in driver.steps for group in batch]
        out = [attempt.cursor for attempt in (*driver.running, *driver.waiting)]
        queued = [group.key.cursor for group in driver.queue.groups]
        fresh = list(range(cursor.next, cursor.total))
        places = trained + driver.rejected + out + queued + cursor.returned + fresh
        assert sorted(places) == list(range(cursor.total))
        assert cursor.resolved_count == len(trained) + len(driver.rejected)

    @invariant()
    def the_run_is_never_deadlocked(self) -> None:
        driver = self.driver
        held = driver.breaker.tripped is not None
        waits_for_an_event = bool(driver.running) or driver.sealed or driver.published
        assert held or waits_for_an_event or driver.done, "deadlock"

    @invariant()
    def the_breaker_counts_each_outcome_once(self) -> None:
        breaker = CircuitBreaker()
        breaker.record(self.driver.outcomes)
        assert self.driver.breaker == breaker

    @invariant()
    def versions_fit_their_steps(self) -> None:
        first = self.driver.first_version
        for step, batch in enumerate(self.driver.steps):
            newest = first + step
            assert all(group.version <= newest for group in batch)
            if self.driver.off_policy == 0:
                assert all(group.version == newest for group in batch), "fully on-policy"

    def teardown(self) -> None:
        """Finish the run: each row of each epoch gets exactly one outcome."""
        driver = self.driver
        while not driver.done:
            if driver.breaker.tripped:
                driver.resume()
            if driver.published:
                driver.commit()
            elif driver.running:
                driver.group_ended(list(driver.running)[-1], driver.group)
            else:
                driver.train()
            self.capacity_follows_the_formula()
            self.the_run_is_never_deadlocked()
        self.versions_fit_their_steps()

        trained = [group.key.cursor for batch in driver.steps for group in batch]
        order = RowOrder(rows=driver.rows, shuffle=True, seed=0)
        positions = [order.position(cursor) for cursor in trained + driver.rejected]
        assert sorted((p.epoch, p.row_index) for p in positions) == [
            (epoch, row) for epoch in range(driver.epochs) for row in range(driver.rows)
        ]
        sizes = [len(batch) for batch in driver.steps]
        assert all(size == driver.batch_size for size in sizes[:-1])
        assert all(0 < size <= driver.batch_size for size in sizes)
        assert driver.admission.version == driver.first_version + len(sizes)
        assert (driver.admission.reserved, driver.admission.in_flight) == (0, 0)
        assert driver.admission.accepted == driver.group * len(trained)
        assert (driver.queue.groups, driver.cursor.above, driver.cursor.returned) == ([], [], [])


TestScheduler = Scheduler.TestCase


@pytest.mark.parametrize("off_policy", [0, 1, 3])
@pytest.mark.parametrize("concurrency", [None, 4, 6, 16])
def test_a_long_run_uses_all_its_capacity(off_policy: int, concurrency: int | None):
    """Steady state: after each step, as many rows run as the limits allow."""
    driver = Driver(group=4, batch_size=2, off_policy=off_policy, concurrency=concurrency, rows=64)
    rows_allowed = 2 * (off_policy + 1)
    if concurrency is not None:
        rows_allowed = min(rows_allowed, concurrency // 4)
    while len(driver.steps) < 20:
        while not driver.sealed:
            driver.group_ended(next(iter(driver.running)), survivors=4)
        driver.train()
        assert len(driver.running) == rows_allowed
