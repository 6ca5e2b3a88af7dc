"""`everburn calibrate`: one batch from the initial policy, without a run.

Owns where it samples (on the emulator: the stack's, else a temporary one) and the printed report.
Doesn't own the figures (everburn/rollouts/calibration.py).
"""

import asyncio
import tempfile
from contextlib import nullcontext
from pathlib import Path

from everburn.config import RunConfig
from everburn.records.ids import RunRef
from everburn.rollouts.calibration import Calibration, CalibrationFailedError, Rollout, calibrate
from everburn.trainers.backends import on_shared_emulator
from workers.cli.preflight import prepare_local
from workers.environment import imports_from
from workers.errors import UserError
from workers.stack.folder import StackFolder
from workers.stack.temporary_emulator import temporary_emulator


def calibrate_here(config: RunConfig, folder: Path) -> Calibration:
    """Sample a batch; its rollouts and its trainer session aren't kept.

    Raises:
        BadInputError: a dataset file, the API key or the base model is missing.
        UserError: rollouts failed, or no session was available.
    """
    prepare_local(config, folder)
    if config.dedicated and not config.local:
        raise UserError(
            "calibration doesn't provision a trainer job and a deployment for one batch: calibrate "
            "with --set backend=serverless if it offers the same base model"
        )
    if config.dedicated:
        config = on_shared_emulator(config)
    own = config.local and config.base_url is None
    emulator = temporary_emulator(StackFolder(folder)) if own else nullcontext()
    folder_of_run = tempfile.TemporaryDirectory(prefix="everburn-calibration-")
    with imports_from(folder), emulator, folder_of_run as store:
        return asyncio.run(_calibrate(RunRef(store=store, id="calibration"), config))


async def _calibrate(run: RunRef, config: RunConfig) -> Calibration:
    from everburn.rollouts.contract import InvalidRolloutError, PromptTooLongError
    from everburn.rollouts.dataset import DatasetError
    from everburn.rollouts.tokenizers import TokenizerError
    from everburn.trainers.protocol import TrainerError
    from everburn.trainers.serverless import ServerlessTrainer
    from everburn.usercode.entrypoints import EntrypointError

    try:
        return await calibrate(run, config, ServerlessTrainer.open)
    except (
        CalibrationFailedError,
        DatasetError,
        EntrypointError,
        InvalidRolloutError,
        PromptTooLongError,
        TokenizerError,
        TrainerError,
    ) as error:
        raise UserError(str(error)) from error


def report(calibration: Calibration) -> list[str]:
    """Lines with the figures, and what to change."""
    rollouts, tokens = calibration.rollouts, calibration.output_tokens
    lines = [
        f"{len(calibration.groups)} rows x {calibration.config.completions_per_prompt} completions "
        "from the initial policy",
        f"  completed           {len(rollouts)}/{calibration.asked}{_missing(calibration)}",
    ]
    if rollouts:
        lines += [
            f"  reward              {calibration.reward_mean:.3f} on average",
            f"  within groups       {calibration.reward_std_within_group:.3f} standard deviation "
            "on average",
            f"  flat groups         {calibration.flat_groups}/{len(calibration.groups)}",
            f"  at the token limit  {calibration.at_token_limit}/{len(rollouts)}",
            f"  output tokens       {sum(tokens) / len(tokens):.1f} on average, {max(tokens)} at "
            "most",
        ]
    advice = calibration.advice()
    return (
        lines
        + ["what to change:" if advice else "enough signal to train on"]
        + [f"  - {note}" for note in advice]
    )


def sample_texts(rollouts: list[Rollout]) -> list[str]:
    """Complete answers, each with its reward and length."""
    return [
        f"--- reward={rollout.reward:.2f} output_tokens={rollout.record.output_tokens}\n"
        f"{rollout.record.answer.strip()}"
        for rollout in rollouts
    ]


def _missing(calibration: Calibration) -> str:
    parts = []
    if calibration.failures:
        parts.append(f"{len(calibration.failures)} failed, the first: {calibration.failures[0]}")
    if calibration.dropped:
        parts.append(f"{calibration.dropped} dropped")
    return f" ({'; '.join(parts)})" if parts else ""
