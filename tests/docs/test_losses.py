"""docs/losses.md: its code runs, and its tables are those of the code."""

import re
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from everburn.config import AdvantageName
from everburn.learning.batch import Batch, BatchCompletion, BatchGroup
from everburn.learning.datums import build_datum
from everburn.learning.losses import COMMON_SETTINGS, LOSSES, clip_of
from everburn.rollouts.contract import RolloutRun, RolloutSample

PAGE = (Path(__file__).parents[2] / "docs" / "losses.md").read_text()
SEGMENT = RolloutSample([2, 3, 4], [0.0, -1.0, -1.0], [0, 1, 1], 1.0)


@pytest.fixture
def code() -> dict[str, Any]:
    """What the page's examples define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL):
        exec(block, names)
    return names


def rows() -> dict[str, list[str]]:
    """The tables' rows, by each name in their first column."""
    found = {}
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            first, *others = (cell.strip() for cell in line.strip("|").split("|"))
            for name in re.findall(r"`(\w+)`", first):
                found[name] = others
    return found


def test_the_table_of_losses_is_complete_and_right():
    table = rows()
    assert set(get_args(AdvantageName)) | set(LOSSES) <= set(table)
    for name, loss in LOSSES.items():
        wire, thresholds, settings = table[name]
        clip = clip_of(name, {})
        numbers = [float(number) for number in re.findall(r"[\d.]+", thresholds)]
        assert wire == loss.wire
        assert numbers == ([] if clip is None else [clip.low, clip.high])
        assert tuple(settings.split(", ") if settings else ()) == loss.settings
    # target_logprob_support has one value that rollouts can serve; it isn't worth a reader's time.
    assert all(f"`{key}`" in PAGE for key in set(COMMON_SETTINGS) - {"target_logprob_support"})


def test_the_advantage_function_takes_a_single_reward(code: dict[str, Any]):
    assert code["advantages"]([1.0]) == [0.5]


def test_the_loss_clips_from_above(code: dict[str, Any]):
    datum = build_datum(SEGMENT, 1.0)
    own = torch.from_numpy(datum.logprobs) + torch.tensor(np.log([1.1, 1.5]))
    value, metrics = code["loss"]([datum], [own.requires_grad_()])
    assert value.item() == pytest.approx(-(1.1 + 1.2), rel=1e-5)
    assert metrics == {"datums": 1}
    value.backward()
    assert own.grad is not None and own.grad[1] == 0


async def test_prepare_batch_returns_a_number_for_each_segment(code: dict[str, Any]):
    async def score(sequences: list[list[int]]) -> list[list[float]]:
        return [[-1.0] * (len(sequence) - 1) for sequence in sequences]

    completions = [
        BatchCompletion(index, 1.0, 0.5, RolloutRun([SEGMENT] * count))
        for index, count in enumerate((1, 2))
    ]
    batch = Batch(1, [BatchGroup(0, 0, {}, completions)], score)
    assert await code["prepare_batch"](batch) == [[[0.3], [0.3, 0.3]]]
