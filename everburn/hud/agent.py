"""The policy as a HUD agent: one turn, its exact tokens recorded on the run.

Owns what our own agent does, and how another's failure is kept: HUD turns every exception into a
status, and what it was decides whether a rollout is tried again. Doesn't own sampling or formats.
"""

from hud.agents.base import Agent
from hud.agents.types import AgentStep, Usage
from hud.agents.types import Sample as HudSample
from hud.eval.run import Run

from everburn.agentic.formats import Format
from everburn.hud.prompts import as_messages
from everburn.rollouts.contract import Sampler
from everburn.usercode.deadlines import within


class PolicyAgent(Agent):
    """Answers a task's prompt by one sample of the run's policy.

    sampling_timeout: seconds for the sample. Stateless: serves any number of runs at once.
    """

    def __init__(self, sampler: Sampler, format: Format, sampling_timeout: float) -> None:
        super().__init__()
        self._sampler = sampler
        self._format = format
        self._timeout = sampling_timeout

    async def __call__(self, run: Run) -> None:
        prompt = self._format.render(as_messages(run.prompt))
        async with within(self._timeout, "sampling_timeout"):
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


class Witness(Agent):
    """Lets another agent work on one run, and remembers the error it ended in."""

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
