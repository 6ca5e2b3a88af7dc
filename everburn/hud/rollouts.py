"""A run of a HUD task as a completion: `hud.eval.rollout` with the policy as the agent.

Owns the result of a HUD run (a reward, or a failure that is never a reward of zero), its info and
its ids on the HUD platform. Doesn't own agents (agent.py, tool_agent.py), placement
(environments.py) or segments (agentic/assembly.py).
"""

import uuid
from typing import Any

from hud.agents.base import Agent
from hud.agents.types import AgentStep
from hud.agents.types import Sample as HudSample
from hud.eval import Task, rollout
from hud.eval.job import job_enter
from hud.eval.run import Run

from everburn.agentic.assembly import Assembled, Call, assemble
from everburn.agentic.tool_loop import Limits
from everburn.config import Entrypoint
from everburn.hud.agent import ErrorRecorder, PolicyAgent
from everburn.hud.environments import MAX_ENVIRONMENTS, Isolation, place
from everburn.hud.package import hud_key
from everburn.hud.prompts import make_format
from everburn.hud.tool_agent import ToolAgent
from everburn.rollouts.contract import RecoverableRolloutError, RolloutFn, RolloutRun, RolloutSetup
from everburn.rollouts.sampling import CompletionScope, current_scope
from everburn.usercode.entrypoints import call

SAMPLING_TIMEOUT = 600.0
"""Seconds."""
_IDS = uuid.UUID("8d0f6bd2-6f0c-4e0b-9a3c-0d0a8f5d7c11")
"""Namespace of Everburn's ids on the HUD platform."""


class HudRunFailedError(RecoverableRolloutError):
    """The HUD run wasn't completed, wasn't graded, or has no sample. It says nothing about the
    policy, so it is retried instead of getting a reward of zero."""


def make_rollout_fn(
    setup: RolloutSetup,
    *,
    env_path: str | None = None,
    environment: str | None = None,
    hosted: bool = False,
    isolation: Isolation = "thread",
    renderer: str | None = None,
    turns: int = 1,
    agent: str | None = None,
    max_environments: int = MAX_ENVIRONMENTS,
    sampling_timeout: float = SAMPLING_TIMEOUT,
) -> RolloutFn:
    """Rollouts of HUD tasks.

    env_path, environment, hosted, isolation, max_environments (per worker): see environments.place.
    renderer: see prompts.make_format.
    turns: largest number of the policy's turns; above 1 it has the environment's tools.
    agent: `module:function`, called with `setup`, that returns a HUD agent in place of the built-in
    ones. It samples with `setup.sampler` and records each sample as the `sample` of an AgentStep.
    sampling_timeout: seconds for the sample if turns is 1.

    Raises:
        PlacementError, FormatError, HudKeyMissingError, EntrypointError, ValueError
    """
    placement = place(
        setup.sandboxes,
        env_path=env_path,
        environment=environment,
        hosted=hosted,
        isolation=isolation,
        max_environments=max_environments,
    )
    policy = _agent(setup, agent, renderer, turns, sampling_timeout)
    announced: set[str] = set()

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        task = Task.model_validate(sample_prompt)
        ids = HudIds.of(current_scope.get())
        recorder = ErrorRecorder(policy)
        if hud_key() is not None and ids.job not in announced:
            announced.add(ids.job)
            await job_enter(ids.job, name=ids.run, group=setup.completions_per_prompt)
        run = await rollout(
            task,
            recorder,
            runtime=placement,
            job_id=ids.job,
            group_id=ids.group,
            trace_id=ids.trace,
        )
        if recorder.error is not None:
            # Its type decides if the completion is retried.
            raise recorder.error
        return completion_of(run)

    return rollout_fn


class HudIds:
    """Ids of a completion on the HUD platform, the same for all its attempts. The run is a HUD
    job, the prompt group a HUD group, the completion a HUD trace."""

    def __init__(self, run: str, group: str, completion: str) -> None:
        self.run = run
        self.job = uuid.uuid5(_IDS, run).hex
        self.group = uuid.uuid5(_IDS, group).hex
        self.trace = uuid.uuid5(_IDS, completion).hex

    @classmethod
    def of(cls, scope: CompletionScope) -> "HudIds":
        # A held-out row has one completion, which is its own group.
        group, _, _ = scope.name.partition(".completion-")
        return cls(scope.run, f"{scope.run}/{group}", f"{scope.run}/{scope.name}")


def completion_of(run: Run) -> RolloutRun:
    """The completion of a finished HUD run. Raises HudRunFailedError."""
    problem = failure_of(run)
    if problem is not None:
        raise HudRunFailedError(f"HUD task {run.slug}: {problem}")
    assembled = assemble(_calls(run), run.reward)
    return RolloutRun(assembled.segments, answer=run.trace.content, info=_info(run, assembled))


def failure_of(run: Run) -> str | None:
    """The reason why a run failed; None if it was completed and graded.

    Checks both status and grade: after an agent's exception HUD still grades the run, with a reward
    of 0 and no error.
    """
    if run.trace.status != "completed":
        return f"{run.trace.status or 'not completed'}: {run.trace.error or 'no reason given'}"
    if run.grade.is_error:
        return f"its grader failed: {run.grade.content or 'no reason given'}"
    if not any(sample.output_token_ids for sample in _samples(run)):
        return "it completed without a recorded sample"
    return None


def _samples(run: Run) -> list[HudSample]:
    return run.trace.collect(lambda step: step.sample if isinstance(step, AgentStep) else None)


def _calls(run: Run) -> list[Call]:
    return [
        Call(sample.prompt_token_ids, sample.output_token_ids, sample.output_logprobs)
        for sample in _samples(run)
    ]


def _info(run: Run, assembled: Assembled) -> dict[str, Any]:
    """The grader's info and, under `hud`, HUD's record of the run without token ids."""
    steps = run.trace.model_dump(mode="json", exclude_none=True)["steps"]
    for step in steps:
        step.pop("sample", None)
    return run.grade.info | {
        "hud": {
            "task": run.slug,
            "job": run.job_id,
            "group": run.group_id,
            "trace": run.trace_id,
            "stop_reason": run.trace.stop_reason,
            "evaluation": run.evaluation,
            "boundaries": assembled.boundaries.as_info(),
            "steps": steps,
        }
    }


def _agent(
    setup: RolloutSetup,
    agent: str | None,
    renderer: str | None,
    turns: int,
    sampling_timeout: float,
) -> Agent:
    if turns < 1:
        raise ValueError(f"turns is {turns}; it must be at least 1")
    if agent is None:
        format = make_format(renderer, setup.tokenizer)
        if turns > 1:
            return ToolAgent(setup, format, Limits(turns=turns))
        return PolicyAgent(setup.sampler, format, sampling_timeout)
    custom = call(Entrypoint(name=agent), setup)
    if not isinstance(custom, Agent):
        raise ValueError(f"{agent} returned {type(custom).__name__}, not a hud.agents.base.Agent")
    if not hasattr(custom, "config"):
        raise ValueError(f"{agent}: its agent's __init__ must call super().__init__()")
    return custom
