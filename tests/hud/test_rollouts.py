"""HUD tasks as completions: segments, info, failures, and concurrent environments."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hud.agents.base import Agent
from hud.agents.types import AgentStep
from hud.agents.types import Sample as HudSample
from hud.eval.run import Run

from everburn.hud.agent import PolicyAgent
from everburn.hud.local import THREAD_NAME
from everburn.hud.prompts import make_format
from everburn.hud.rollouts import HudRunFailedError
from everburn.learning.rollout_file import CompletionRecord, read_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import rollout_key
from everburn.rollouts.contract import RolloutRun, RolloutSetup
from everburn.rollouts.failures import classify
from everburn.rollouts.runner import RolloutRunner
from everburn.rollouts.sampling import CompletionScope, current_scope
from hud import Environment
from support.hud_runs import ENV, Runs, a_task
from support.waiting import until

FIRST = GroupKey(cursor=0)


async def complete(
    runner: RolloutRunner, group: GroupKey = FIRST, completion: int = 0
) -> tuple[CompletionRecord, RolloutRun]:
    outcome = await runner.complete(group, completion, 0)
    assert outcome.status == "succeeded"
    return read_rollout(runner.store, rollout_key(group, completion))


async def test_an_environment_written_for_hud_is_rolled_out_unchanged(runs: Runs) -> None:
    runner = await runs.runner([a_task("variety", start="ab")], env_path=ENV)
    record, run = await complete(runner)

    (segment,) = run.segments
    prompt = runner._function.tokenizer.encode("ab")
    assert list(segment.tokens[: len(prompt)]) == prompt
    assert list(segment.loss_mask) == [0] * len(prompt) + [1] * record.output_tokens
    assert segment.reward == len(set(run.answer or "")) / 10
    assert record.prompt == "ab"
    assert run.info["got"] == len(set(run.answer or ""))


async def test_grade_and_trace_are_kept_with_the_rollout(runs: Runs) -> None:
    runner = await runs.runner([a_task("variety", start="ab")], env_path=ENV)
    _, run = await complete(runner)

    info = run.info["hud"]
    assert info["task"].startswith("variety-")
    assert info["evaluation"]["score"] == run.segments[0].reward
    assert [step["source"] for step in info["steps"]] == ["task", "user", "agent", "task"]
    assert info["steps"][2]["content"] == run.answer
    assert "sample" not in info["steps"][2]


async def test_hud_ids_are_derived_from_the_completion(runs: Runs) -> None:
    tasks = [a_task("variety", start="ab"), a_task("variety", start="cd")]
    runner = await runs.runner(tasks, env_path=ENV)

    async def ids(group: GroupKey, completion: int) -> tuple[str, str, str]:
        _, run = await complete(runner, group, completion)
        return tuple(run.info["hud"][name] for name in ("job", "group", "trace"))  # type: ignore[return-value]

    first, second = await ids(FIRST, 0), await ids(FIRST, 1)
    retried = await ids(GroupKey(cursor=0, attempt=1), 2)
    other = await ids(GroupKey(cursor=1), 0)
    assert {one[0] for one in (first, second, retried, other)} == {first[0]}
    assert first[1] == second[1]
    assert len({first[1], retried[1], other[1]}) == 3
    assert len({first[2], second[2], retried[2], other[2]}) == 4

    again = await runs.runner(tasks, "run-2", env_path=ENV)
    _, run = await complete(again)
    assert run.info["hud"]["job"] != first[0]


async def test_a_chat_prompt_is_rendered_by_the_format(runs: Runs) -> None:
    runner = await runs.runner([a_task("chat", start="ab")], env_path=ENV, renderer="plain")
    record, _ = await complete(runner)
    assert record.prompt == "be briefab"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("broken_start", "the database is down"),
        ("broken_grader", "the judge is out"),
        ("unsure_grader", "can't tell"),
        ("unknown_template", "unknown_template"),
    ],
)
async def test_a_failed_environment_is_recoverable_and_never_scores_zero(
    runs: Runs, template: str, problem: str
) -> None:
    runner = await runs.runner([a_task(template)], env_path=ENV)
    with pytest.raises(HudRunFailedError, match=problem) as caught:
        await runner.complete(FIRST, 0, 0)
    assert classify(caught.value) == "recoverable"


class Silent(Agent):
    async def __call__(self, run: Run) -> None:
        run.trace.content = "no sample"


class Broken(Agent):
    async def __call__(self, run: Run) -> None:
        raise KeyError("a bug of the agent")


class Overloaded(Agent):
    async def __call__(self, run: Run) -> None:
        raise ConnectionError("try later")


def silent(setup: RolloutSetup) -> Agent:
    return Silent()


def broken(setup: RolloutSetup) -> Agent:
    return Broken()


def overloaded(setup: RolloutSetup) -> Agent:
    return Overloaded()


async def test_a_completed_run_without_a_sample_is_a_failure(runs: Runs) -> None:
    runner = await runs.runner(
        [a_task("variety", start="ab")], env_path=ENV, agent=f"{__name__}:silent"
    )
    with pytest.raises(HudRunFailedError, match="without a recorded sample"):
        await runner.complete(FIRST, 0, 0)


@pytest.mark.parametrize(
    ("agent", "error", "kind"),
    [("broken", KeyError, "fatal"), ("overloaded", ConnectionError, "recoverable")],
)
async def test_an_agents_error_is_kept_although_hud_grades_the_run(
    runs: Runs, agent: str, error: type[Exception], kind: str
) -> None:
    runner = await runs.runner(
        [a_task("variety", start="ab")], env_path=ENV, agent=f"{__name__}:{agent}"
    )
    with pytest.raises(error) as caught:
        await runner.complete(FIRST, 0, 0)
    assert classify(caught.value) == kind


class ThreeTurns(Agent):
    """Each turn's prompt is the previous turn, its sample and a word of the environment."""

    def __init__(self, setup: RolloutSetup) -> None:
        super().__init__()
        self._setup = setup

    async def __call__(self, run: Run) -> None:
        tokens = self._setup.tokenizer.encode(run.prompt_text)
        for turn in range(3):
            sample = await self._setup.sampler.sample(tokens, max_tokens=3)
            run.record(
                AgentStep(
                    content=sample.text,
                    sample=HudSample(
                        prompt_token_ids=list(tokens),
                        output_token_ids=sample.tokens,
                        output_logprobs=sample.logprobs,
                    ),
                )
            )
            tokens = [*tokens, *sample.tokens, *self._setup.tokenizer.encode(str(turn))]
        run.trace.content = "done"


def three_turns(setup: RolloutSetup) -> Agent:
    return ThreeTurns(setup)


async def test_turns_of_an_agent_become_one_segment_with_exact_tokens(runs: Runs) -> None:
    runner = await runs.runner(
        [a_task("variety", start="ab")], env_path=ENV, agent=f"{__name__}:three_turns"
    )
    record, run = await complete(runner)

    (segment,) = run.segments
    assert len(record.versions) == 3
    assert sum(segment.loss_mask) == record.output_tokens
    assert all(
        (p == 0.0) == (not m) or m for p, m in zip(segment.logprobs, segment.loss_mask, strict=True)
    )
    assert run.info["hud"]["boundaries"]["appends"] == 2
    assert run.answer == "done"


async def test_a_blocking_grader_delays_neither_sampling_nor_the_rollout_loop(
    runs: Runs, tmp_path: Path
) -> None:
    runner = await runs.runner([a_task("blocking_grader", folder=str(tmp_path))], env_path=ENV)
    blocked = asyncio.create_task(complete(runner))
    await until((tmp_path / "blocks").exists)
    current_scope.set(CompletionScope("a test", 0))
    sample = await runner._function.sampler.sample([2, 3, 4])
    assert sample.tokens
    assert not blocked.done()
    (tmp_path / "unblock").touch()
    _, run = await blocked
    assert run.segments[0].reward == 0.5


class Slow(PolicyAgent):
    """Starts to sample one second after another environment's grader blocks."""

    blocks: Path

    async def __call__(self, run: Run) -> None:
        if run.prompt == "slow":
            await until(self.blocks.exists)
            await asyncio.sleep(1)
        await super().__call__(run)


def slow(setup: RolloutSetup) -> Agent:
    return Slow(setup.sampler, make_format("plain", setup.tokenizer), 60)


async def test_a_blocking_grader_ends_no_other_run(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HUD checks an environment every two minutes and gives it up after five silent seconds."""
    monkeypatch.setattr("hud.clients.client._CONTROL_HEARTBEAT_INTERVAL_SECONDS", 0.1)
    monkeypatch.setattr("hud.clients.client._CONTROL_HEARTBEAT_TIMEOUT_SECONDS", 0.5)
    monkeypatch.setattr(Slow, "blocks", tmp_path / "blocks", raising=False)
    tasks = [a_task("blocking_grader", folder=str(tmp_path)), a_task("variety", start="slow")]
    runner = await runs.runner(tasks, env_path=ENV, agent=f"{__name__}:slow")
    other = asyncio.create_task(complete(runner, GroupKey(cursor=1)))
    blocked = asyncio.create_task(complete(runner))
    try:
        record, _ = await other
        assert record.prompt == "slow" and not blocked.done()
    finally:
        (tmp_path / "unblock").touch()
    await blocked


async def test_an_environment_that_blocks_after_cancellation_keeps_its_slot(
    runs: Runs, tmp_path: Path
) -> None:
    """So there are never more threads than the limit on concurrent environments."""
    tasks = [a_task("blocking_grader", folder=str(tmp_path)), a_task("variety", start="ab")]
    runner = await runs.runner(tasks, env_path=ENV, max_environments=1)
    blocked = asyncio.create_task(complete(runner))
    await until((tmp_path / "blocks").exists)
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked
    other = asyncio.create_task(complete(runner, GroupKey(cursor=1)))
    done, _ = await asyncio.wait({other}, timeout=1)
    assert not done
    (tmp_path / "unblock").touch()
    await other


class Pairs(PolicyAgent):
    """Waits until another environment is up before it samples."""

    barrier: asyncio.Barrier

    async def __call__(self, run: Run) -> None:
        await asyncio.wait_for(self.barrier.wait(), 60)
        await super().__call__(run)


def pairs(setup: RolloutSetup) -> Agent:
    return Pairs(setup.sampler, make_format("plain", setup.tokenizer), 60)


@pytest.mark.parametrize(("isolation", "threads"), [("thread", 2), ("shared", 1)])
async def test_environments_have_their_own_threads_unless_shared(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, isolation: str, threads: int
) -> None:
    monkeypatch.setattr(Pairs, "barrier", asyncio.Barrier(2), raising=False)
    tasks = [a_task("where", start=start) for start in "ab"]
    runner = await runs.runner(tasks, env_path=ENV, agent=f"{__name__}:pairs", isolation=isolation)
    done = await asyncio.gather(*(complete(runner, GroupKey(cursor=n)) for n in range(2)))
    idents = {run.info["thread"] for _, run in done}
    assert len(idents) == threads and threading.get_ident() not in idents


_shared = Environment("counting")


@_shared.template()
async def variety(start: str) -> AsyncIterator[Any]:
    await asyncio.sleep(0.05)
    yield start
    yield 1.0


def shared_environment() -> Environment:
    return _shared


async def test_an_environment_object_of_all_tasks_serves_one_at_a_time(runs: Runs) -> None:
    running = most = 0

    async def up() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)

    async def down() -> None:
        nonlocal running
        running -= 1

    _shared.initialize(up)
    _shared.shutdown(down)
    tasks = [a_task("variety", start=start) for start in "abcd"]
    runner = await runs.runner(tasks, environment=f"{__name__}:shared_environment")
    await asyncio.gather(*(complete(runner, GroupKey(cursor=n)) for n in range(4)))
    assert (most, running) == (1, 0)


async def test_threads_of_environments_end_with_them(runs: Runs, tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == THREAD_NAME and t not in before]

    tasks = [a_task("blocking_grader", folder=str(tmp_path))]
    runner = await runs.runner(tasks, env_path=ENV)
    completion = asyncio.create_task(complete(runner))
    await until((tmp_path / "blocks").exists)
    assert len(threads()) == 1
    (tmp_path / "unblock").touch()
    await completion
    await until(lambda: not threads())


class Together(PolicyAgent):
    """Waits until 64 environments are up before it samples."""

    barrier = asyncio.Barrier(64)

    async def __call__(self, run: Run) -> None:
        await asyncio.wait_for(self.barrier.wait(), 60)
        await super().__call__(run)


def together(setup: RolloutSetup) -> Agent:
    return Together(setup.sampler, make_format("plain", setup.tokenizer), 60)


async def test_sixty_four_environments_at_once(runs: Runs) -> None:
    tasks = [a_task("variety", start=f"{chr(97 + n % 26)}{n}") for n in range(64)]
    runner = await runs.runner(tasks, env_path=ENV, agent=f"{__name__}:together")
    done = await asyncio.gather(*(complete(runner, GroupKey(cursor=n)) for n in range(64)))
    assert len({record.prompt for record, _ in done}) == 64


async def test_concurrent_environments_are_limited(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hud.eval import LocalRuntime

    running = 0
    most = 0
    lock = threading.Lock()
    serve = LocalRuntime.__call__

    def counted(self: LocalRuntime, task: Any) -> Any:
        from contextlib import asynccontextmanager

        @asynccontextmanager
        async def within() -> Any:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            try:
                async with serve(self, task) as runtime:
                    yield runtime
            finally:
                with lock:
                    running -= 1

        return within()

    monkeypatch.setattr(LocalRuntime, "__call__", counted)
    tasks = [a_task("variety", start="ab")] * 6
    runner = await runs.runner(tasks, env_path=ENV, max_environments=2)
    await asyncio.gather(*(complete(runner, GroupKey(cursor=i)) for i in range(6)))
    assert (most, running) == (2, 0)


async def test_a_grader_that_exits_ends_its_own_rollout_only(runs: Runs) -> None:
    tasks = [a_task("leaving_grader"), a_task("variety", start="ab")]
    runner = await runs.runner(tasks, env_path=ENV)
    with pytest.raises(HudRunFailedError):
        await asyncio.wait_for(runner.complete(FIRST, 0, 0), 30)
    await complete(runner, GroupKey(cursor=1))


async def test_without_a_key_nothing_leaves_the_machine(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also with a key in a `.env` file, of which hud reads two by default."""
    import socket

    from hud.settings import settings

    settings.api_key = "sk-hud-from-a-file"
    from everburn.hud.package import import_hud

    import_hud()
    addresses: list[Any] = []
    connect = socket.socket.connect

    def recorded(self: socket.socket, address: Any) -> None:
        addresses.append(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", recorded)
    runner = await runs.runner([a_task("variety", start="ab")], env_path=ENV)
    await complete(runner)
    assert addresses
    hosts = {address[0] for address in addresses if isinstance(address, tuple)}
    assert hosts <= {"127.0.0.1", "::1"}
