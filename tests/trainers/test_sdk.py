"""The SDK is imported without torch, which is imported on first use."""

import subprocess
import sys

WITHOUT_TORCH = """
import sys
import activities.trainer
from everburn.trainers import sdk
sdk.load()
from everburn.trainers.serverless import to_sdk
from everburn.learning.datums import build_datum
from everburn import RolloutSample

datum = to_sdk(build_datum(RolloutSample([1, 2, 3], [0.0, -1.0, -1.0], [0, 1, 1], 1.0), 0.5))
assert datum.loss_fn_inputs["advantages"].tolist() == [0.5, 0.5]
print("torch" in sys.modules, "fireworks.training.sdk" in sys.modules)
"""
WITH_TORCH = """
import sys
from everburn.trainers import sdk
sdk.load()
from fireworks.training.sdk import TensorData
import numpy

tensor = TensorData.from_numpy(numpy.ones(2, dtype=numpy.float32)).to_torch()
import torch, torch.nn
assert type(tensor) is torch.Tensor
assert TensorData.from_torch(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
print(sys.modules["torch"].__file__.endswith("__init__.py"), torch.nn.__name__)
"""


def output(code: str) -> str:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


def test_a_trainer_worker_starts_without_torch() -> None:
    assert output(WITHOUT_TORCH) == "False True"


def test_the_sdk_gets_the_real_torch_on_first_use() -> None:
    assert output(WITH_TORCH) == "True torch.nn"
