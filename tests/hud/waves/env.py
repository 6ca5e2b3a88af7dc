"""A HUD environment whose graders block, in waves."""

import asyncio
import os
import time

from hud.graders import EvaluationResult

from hud import Environment

env = Environment(name="waves")


@env.template()
async def letters(start: str, wave: int, seconds: float, log: str):
    """Rewards different characters. Each wave starts to block in the middle of the previous one."""
    answer = yield start
    await asyncio.sleep(wave * seconds / 2)
    block(seconds, log)
    yield EvaluationResult(reward=len(set(answer or "")) / 10)


def block(seconds, log):
    """Blocks the thread, like a grader that computes, and logs start and end."""
    began = time.monotonic()
    time.sleep(seconds)
    line = f"{began} {time.monotonic()}\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
