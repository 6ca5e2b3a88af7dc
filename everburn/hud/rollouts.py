"""A run of a HUD task as a completion: `hud.eval.rollout` with the run's policy as the agent.

Owns what a finished HUD run means (a reward, or a failure that is never a reward of zero), what is
kept of it, and the ids it has on the HUD platform. Doesn't own agents (agent.py, tool_agent.py),
placement (environments.py), or how calls become segments (agentic/assembly.py).
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
from everburn.hud.agent import PolicyAgent, Witness
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
"""Namespace of Everburn's ids at HUD."""


class HudRunFailedError(RecoverableRolloutError):
    """A HUD run that wasn't completed, or couldn't be graded, or holds no sample: that says
    nothing about the policy, so it is tried again, and never a reward of zero."""


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

    env_path, environment, hosted, isolation, max_environments (in this worker, whatever has been
    admitted): see environments.place. renderer: see prompts.make_format. turns: above 1, the
    policy is offered the environment's tools, and answers so often at most. agent:
    `module:function`, called with `setup`, that returns a HUD agent to use in place of these; what
    it samples by `setup.sampler` it records as the `sample` of an AgentStep. sampling_timeout:
    seconds for the sample of an only turn.

    Raises:
        PlacementError, FormatError, HudKeyMissingError, EntrypointError, ValueError
    """
    placement = place(
        setup.resources,
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
        witness = Witness(policy)
        if hud_key() is not None and ids.job not in announced:
            announced.add(ids.job)
            await job_enter(ids.job, name=ids.run, group=setup.completions_per_prompt)
        run = await rollout(
            task,
            witness,
            runtime=placement,
            job_id=ids.job,
            group_id=ids.group,
            trace_id=ids.trace,
        )
        if witness.error is not None:
            # What it was decides whether the completion is tried again.
            raise witness.error
        return completion_of(run)

    return rollout_fn


class HudIds:
    """Ids of a completion at HUD, the same however often it is tried: the run is HUD's job, the
    prompt group its group, the completion its trace."""

    def __init__(self, run: str, group: str, completion: str) -> None:
        self.run = run
        self.job = uuid.uuid5(_IDS, run).hex
        self.group = uuid.uuid5(_IDS, group).hex
        self.trace = uuid.uuid5(_IDS, completion).hex

    @classmethod
    def of(cls, scope: CompletionScope) -> "HudIds":
        # A held-out row is rolled out once: it is a group of its own.
        group, _, _ = scope.name.partition(".completion-")
        return cls(scope.run, f"{scope.run}/{group}", f"{scope.run}/{scope.name}")


def completion_of(run: Run) -> RolloutRun:
    """The completion that a finished HUD run makes, with its grade and its trace.

    Raises:
        HudRunFailedError: saying what failed.
    """
    problem = failure_of(run)
    if problem is not None:
        raise HudRunFailedError(f"HUD task {run.slug}: {problem}")
    assembled = assemble(_calls(run), run.reward)
    return RolloutRun(assembled.segments, answer=run.trace.content, info=_info(run, assembled))


def failure_of(run: Run) -> str | None:
    """Why a run says nothing about the policy; None for one that was completed and graded.

    Its status and its grade are looked at both: after an agent's exception HUD grades all the
    same, with a reward of 0 and no error.
    """
    if run.trace.status != "completed":
        return f"{run.trace.status or 'not completed'}: {run.trace.error or 'no reason given'}"
    if run.grade.is_error:
        return f"its grader failed: {run.grade.content or 'no reason given'}"
    if not any(sample.output_token_ids for sample in _samples(run)):
        return "it was completed without a recorded sample"
    return None


def _samples(run: Run) -> list[HudSample]:
    return run.trace.collect(lambda step: step.sample if isinstance(step, AgentStep) else None)


def _calls(run: Run) -> list[Call]:
    return [
        Call(sample.prompt_token_ids, sample.output_token_ids, sample.output_logprobs)
        for sample in _samples(run)
    ]


def _info(run: Run, assembled: Assembled) -> dict[str, Any]:
    """What the grader says, and under `hud` what HUD knows; token ids are in the segments."""
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
    made = call(Entrypoint(name=agent), setup)
    if not isinstance(made, Agent):
        raise ValueError(f"{agent} returned {type(made).__name__}, not a hud.agents.base.Agent")
    if not hasattr(made, "config"):
        raise ValueError(f"{agent}: its agent's __init__ must call super().__init__()")
    return made
