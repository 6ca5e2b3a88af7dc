"""A HUD environment written for HUD only, without Everburn."""

import sys
import threading
import time
from pathlib import Path

from hud.graders import EvaluationResult
from hud.settings import settings
from letters import distinct  # next to this file; HUD makes it importable

from hud import Environment

env = Environment(name="counting")


@env.template()
async def variety(start: str):
    """Rewards the number of different characters in the answer."""
    answer = yield start
    got = distinct(answer)
    yield EvaluationResult(reward=got / 10, content=answer, info={"got": got})


@env.template()
async def chat(start: str):
    answer = yield [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": start},
    ]
    yield float(len(answer or ""))


@env.template()
async def blocking_grader(folder: str):
    yield "ab"
    yield block(Path(folder))


def block(folder):
    """A grader that blocks its event loop until the test creates `unblock`."""
    (folder / "blocks").touch()
    while not (folder / "unblock").exists():
        time.sleep(0.01)
    return 0.5


@env.template()
async def broken_start():
    raise RuntimeError("the database is down")
    yield


@env.template()
async def broken_grader():
    yield "ab"
    raise RuntimeError("the judge is out")
    yield


@env.template()
async def unsure_grader():
    yield "ab"
    yield EvaluationResult(reward=0.0, isError=True, content="can't tell")


@env.template()
async def leaving_grader():
    yield "ab"
    sys.exit(3)
    yield


@env.template()
async def where(start: str):
    """Reports its thread and hud's key."""
    yield start
    info = {"thread": threading.get_ident(), "key": settings.api_key}
    yield EvaluationResult(reward=1.0, info=info)
