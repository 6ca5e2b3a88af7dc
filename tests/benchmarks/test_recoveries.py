"""When a run counts as recovered."""

from benchmarks.recoveries import Event, of_rollout_worker, of_trainer
from system.processes import Death
from system.tiny_task import Execution


def test_a_trainer_is_back_when_the_runs_own_policy_is_published_again() -> None:
    """And not with an older version that rollouts still use."""
    events = [
        Event(12.0, "scheduled load_checkpoint", "load state-2"),
        Event(13.0, "started replay_step", "replay step 3"),
        Event(15.0, "completed replay_step", "replay step 3"),
        Event(16.0, "completed publish", "publish policy v3 again, for rollouts that use it"),
        Event(17.0, "started replay_step", "replay step 4"),
        Event(18.0, "completed replay_step", "replay step 4"),
        Event(19.5, "completed publish", "publish policy v4 again"),
        Event(30.0, "completed publish", "publish policy v9 again"),
    ]

    found = of_trainer(Death("trainer", 10.0), events)

    assert (found.seconds, found.redone_s) == (6.5, 3.0)


def test_a_death_that_cost_no_lease_has_no_recovery() -> None:
    assert of_trainer(Death("trainer", 10.0), []).seconds is None


def test_a_rollout_worker_is_back_when_the_last_of_its_completions_is_begun_again() -> None:
    """But for those that are dropped, and those that had returned."""
    calls = [
        Execution("begun", 0, 0, 1, 5.0),
        Execution("begun", 0, 1, 1, 6.0),
        Execution("begun", 1, 0, 1, 7.0),
        Execution("begun", 1, 1, 1, 8.0),
        Execution("returned", 0, 0, 1, 9.0),
        Execution("begun", 0, 1, 2, 12.0),
        Execution("begun", 1, 0, 2, 13.5),
        Execution("returned", 1, 0, 2, 20.0),
    ]
    assert of_rollout_worker(Death("rollout", 10.0), calls).seconds == 3.5
    assert of_rollout_worker(Death("rollout", 2.0), calls).seconds == 0.0
