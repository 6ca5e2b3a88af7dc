"""Imports that two threads need at once are made by one of them."""

import subprocess
import sys

RACE = """
import threading
from activities.rollouts import preload

failures = []

def load():
    try:
        preload()
        from transformers import AutoTokenizer
        from fireworks.training.sdk import FiretitanSamplingClient
    except ImportError as error:
        failures.append(error)

threads = [threading.Thread(target=load) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failures, failures
"""


def test_nobody_is_given_half_a_module() -> None:
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
