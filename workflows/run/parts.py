"""The parts of a run that its stages (start, step, recovery, shutdown, watchdog) share."""

from dataclasses import dataclass

from everburn.config import RunConfig
from workflows.run.checkpoints import Checkpoints
from workflows.run.evaluations import Evaluations
from workflows.run.live_config import LiveConfig
from workflows.run.producer import Producer
from workflows.run.recorder import Recorder
from workflows.run.session import TrainerSession
from workflows.run.state import RunState


@dataclass(frozen=True)
class RunParts:
    state: RunState
    live: LiveConfig
    recorder: Recorder
    producer: Producer
    trainer: TrainerSession
    checkpoints: Checkpoints
    evaluations: Evaluations

    @classmethod
    def wired(cls, state: RunState, live: LiveConfig) -> "RunParts":
        recorder = Recorder(state)
        trainer = TrainerSession(state, live.config)
        return cls(
            state=state,
            live=live,
            recorder=recorder,
            producer=Producer(state, live, recorder),
            trainer=trainer,
            checkpoints=Checkpoints(state, trainer),
            evaluations=Evaluations(state, live, recorder),
        )

    @property
    def config(self) -> RunConfig:
        return self.live.config
