"""The policy as a HUD agent of one turn, and the recording of an agent's error.

HUD turns an agent's exception into a status, but its type decides if the rollout is retried.
Doesn't own sampling or formats.
"""

from hud.agents.base import Agent
from hud.agents.types import AgentStep, Usage
from hud.agents.types import Sample as HudSample
from hud.eval.run import Run

from everburn.agentic.formats import Format
from everburn.hud.prompts import as_messages
from everburn.rollouts.contract import Sampler
from everburn.usercode.deadlines import user_timeout


class PolicyAgent(Agent):
    """Answers a task's prompt with one sample of the policy. Stateless: serves concurrent runs.

    sampling_timeout: seconds for the sample.
    """

    def __init__(self, sampler: Sampler, format: Format, sampling_timeout: float) -> None:
        super().__init__()
        self._sampler = sampler
        self._format = format
        self._timeout = sampling_timeout

    async def __call__(self, run: Run) -> None:
        prompt = self._format.render(as_messages(run.prompt))
        async with user_timeout(self._timeout, "sampling_timeout"):
            sample = await self._sampler.sample(prompt, stop=self._format.stop)
        text = self._format.parse(prompt, sample.tokens).content
        run.record(
            AgentStep(
                content=text,
                done=True,
                finish_reason=sample.finish_reason,
                sample=HudSample(
                    prompt_token_ids=prompt,
                    output_token_ids=sample.tokens,
                    output_logprobs=sample.logprobs,
                ),
                usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(sample.tokens)),
            )
        )
        run.trace.content = text


class ErrorRecorder(Agent):
    """Runs another agent on one run and records its error."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent.config)
        self._agent = agent
        self.error: Exception | None = None

    async def __call__(self, run: Run) -> None:
        try:
            await self._agent(run)
        except Exception as error:
            self.error = error
            raise
