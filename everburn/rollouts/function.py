"""The user's rollout function, loaded for one run in one process.

Owns the setup that the user's factory receives, and the texts of a returned rollout. Doesn't own
the call's deadline and cleanup (attempt.py), or the rules for what is returned (validation.py).
"""

import copy
from typing import Any

from everburn.config import RunConfig
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutFn, RolloutRun, RolloutSetup
from everburn.rollouts.dataset import Row
from everburn.rollouts.sampling import PolicySampler
from everburn.rollouts.sandboxes import Sandboxes
from everburn.rollouts.tokenizers import load_tokenizer, tokenizer_name
from everburn.rollouts.validation import context_parameters
from everburn.usercode.entrypoints import call, resolve


class RolloutFunction:
    """A run's rollout function, with the tokenizer and the sampler that it uses.

    Raises:
        EntrypointError, and whatever the user's factory raises.
    """

    def __init__(self, config: RunConfig, store: ArtifactStore) -> None:
        self.config = config
        self.store = store
        self.tokenizer = load_tokenizer(config)
        self.vocab_size = len(self.tokenizer)
        self.sampler = PolicySampler(store, config, self.tokenizer)
        setup = RolloutSetup(
            tokenizer=self.tokenizer,
            tokenizer_id=tokenizer_name(config),
            sampling_kwargs={
                "max_tokens": config.max_completion_tokens,
                "temperature": config.temperature,
            },
            sampler=self.sampler,
            model=config.base_model,
            completions_per_prompt=config.completions_per_prompt,
            extras=dict(config.extras),
            sandboxes=Sandboxes(store),
        )
        self._function: RolloutFn = call(config.rollout, setup)
        self._parameters = context_parameters(self._function)

    async def __call__(self, row: Row, context: dict[str, Any]) -> Any:
        """Call it with a copy of the row, which user code may change, and the context parameters
        that it declares."""
        declared = {name: value for name, value in context.items() if name in self._parameters}
        return await self._function(copy.deepcopy(row), **declared)

    def prompt_text(self, rollout: RolloutRun) -> str:
        """The tokens before the first trained one, decoded."""
        first = rollout.segments[0]
        start = list(first.loss_mask).index(1)
        return str(self.tokenizer.decode(list(first.tokens[:start])))

    def answer_text(self, rollout: RolloutRun) -> str:
        """The rollout's answer; by default its trained tokens, decoded."""
        if rollout.answer is not None:
            return rollout.answer
        trained = [
            token
            for segment in rollout.segments
            for token, flag in zip(segment.tokens, segment.loss_mask, strict=True)
            if flag
        ]
        return str(self.tokenizer.decode(trained, skip_special_tokens=True))


def resolve_names(config: RunConfig) -> None:
    """Import all callables that a configuration names. Raises EntrypointError."""
    for entrypoint in (*config.rollout_entrypoints, *config.trainer_entrypoints):
        resolve(entrypoint)
