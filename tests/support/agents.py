"""Agents on the emulator's tiny model, which generates single characters, and their runs without a
workflow."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from everburn import RecoverableRolloutError, RolloutFn, RolloutRun, RolloutSetup
from everburn.agentic import (
    Limits,
    Message,
    Reply,
    TextFormat,
    ToolCall,
    TraceIntegrityError,
    chat_endpoint,
    run_tool_loop,
)
from everburn.config import RunConfig, parse_config
from everburn.emulator.models.base_model import TINY, TINY_ALPHABET
from everburn.records.ids import GroupKey, RunRef
from everburn.records.keys import EVALUATION_ROWS_KEY, ROWS_KEY
from everburn.records.publications import Publication, publish
from everburn.records.run_folder import Owner, create_run_folder
from everburn.records.store import ArtifactStore
from everburn.rollouts.dataset import write_rows
from everburn.rollouts.runner import RolloutRunner
from everburn.trainers.serverless import ServerlessTrainer
from support.command_line import ROOT, environment_of_tests

CHARACTERS = [character for character in TINY_ALPHABET if len(character) == 1]
"""As stop strings, they limit each answer to one character."""


def render(messages: Sequence[Message]) -> str:
    return "".join(f"{message['content']}=" for message in messages)


def parse(text: str) -> Reply:
    """Every text is a call of the tool `note`."""
    return Reply(text, (ToolCall("note", {"text": text}, text),))


NOTE = [
    {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Take a note.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
]


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """An agent that takes four notes.

    extras: `notes`, a file that gets one line per note; `accident`, a file: while it doesn't exist,
    the third note ends the attempt, in the way of `how` ("kill", "raise" or "distrust").
    """
    format = TextFormat(setup.tokenizer, render, parse, stop=CHARACTERS)
    notes, accident = Path(setup.extras["notes"]), Path(setup.extras["accident"])

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun:
        taken: list[str] = []

        def note(text: str) -> str:
            taken.append(text)
            with notes.open("a") as file:
                file.write(f"{os.getpid()} {len(taken)}\n")
            if len(taken) == 3 and not accident.exists():
                accident.touch()
                if setup.extras["how"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if setup.extras["how"] == "distrust":
                    raise TraceIntegrityError("these samples won't do")
                raise RecoverableRolloutError("the power failed")
            return f"{len(taken)}"

        messages = [{"role": "user", "content": sample_prompt["ask"]}]
        episode = await run_tool_loop(setup, format, messages, [note], Limits(turns=4))
        return episode.run(1.0, {"taken": taken})

    return rollout_fn


async def mean_reward(step: int, rollout_fn: Any) -> dict[str, float]:
    """An evaluation function that calls the agent twice."""
    rollouts = [await rollout_fn({"ask": ask}) for ask in ("go", "on")]
    return {"reward": sum(rollout.segments[0].reward for rollout in rollouts) / 2}


def make_harness_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """Three turns with the stock OpenAI client; every other answer is streamed. Completions of a
    row wait for each other between turns."""
    format = TextFormat(setup.tokenizer, render, parse, stop=CHARACTERS)
    together = asyncio.Barrier(setup.completions_per_prompt)

    async def rollout_fn(sample_prompt: dict[str, Any], rollout_idx: int) -> RolloutRun:
        messages: list[Any] = [{"role": "user", "content": f"{sample_prompt['ask']} {rollout_idx}"}]
        async with (
            chat_endpoint(setup, format) as endpoint,
            AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client,
        ):
            for turn in range(3):
                await together.wait()
                answer = await ask(client, messages, NOTE, stream=turn % 2 == 1)
                (call,) = answer["tool_calls"]
                said = json.loads(call["function"]["arguments"])["text"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": f"{said} noted"}
                messages += [answer, result]
            return endpoint.run(1.0, info={"asked": messages[0]["content"]})

    return rollout_fn


async def ask(client: AsyncOpenAI, messages: list[Any], tools: Any, stream: bool) -> dict[str, Any]:
    """The assistant's message, assembled from the chunks if streamed."""
    asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": tools}
    if not stream:
        completion = await client.chat.completions.create(**asked)
        message: dict[str, Any] = completion.choices[0].message.model_dump(exclude_none=True)
        return message
    message = {"role": "assistant", "content": "", "tool_calls": []}
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                message["tool_calls"].append(call.model_dump(exclude={"index"}))
    return message


@asynccontextmanager
async def a_run(
    folder: Path, url: str, *, rows: bool = True, **fields: Any
) -> AsyncIterator[RunRef]:
    """A run whose version 0 is served by the emulator at `url`; without rows it isn't prepared."""
    config = a_config(url, **fields)
    run = a_folder(folder, config, rows=rows)
    store = ArtifactStore.of(run)
    trainer = await ServerlessTrainer.open(config)
    try:
        snapshot = await trainer.publish("policy-0")
        record = Publication(
            version=0, incarnation=0, lease_epoch=1, snapshot=snapshot.path, handle=snapshot.handle
        )
        publish(store, record)
        yield run
    finally:
        await trainer.close()


def a_folder(folder: Path, config: RunConfig, *, rows: bool = True) -> RunRef:
    """A run's folder with one row and one held-out row."""
    run = RunRef(store=str(folder), id="agents")
    create_run_folder(run, config, Owner(first_execution_id="test"))
    for key in (ROWS_KEY, EVALUATION_ROWS_KEY) if rows else ():
        write_rows(ArtifactStore.of(run), key, [{"ask": "go"}])
    return run


def a_config(url: str, **fields: Any) -> RunConfig:
    values = {
        "rollout": "support.agents:make_rollout_fn",
        "dataset": "rows.jsonl",
        "base_model": TINY,
        "lora_rank": 4,
        "backend": "emulator",
        "base_url": url,
        "max_completion_tokens": 8,
    }
    return parse_config(values | fields)


IN_ANOTHER_PROCESS = """
import asyncio, sys
from everburn.records.ids import RunRef
from support.agents import complete
asyncio.run(complete(RunRef(store=sys.argv[1], id=sys.argv[2])))
"""


async def complete_elsewhere(run: RunRef) -> "subprocess.CompletedProcess[str]":
    """Run a completion of the first row in a subprocess, which it may kill."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", IN_ANOTHER_PROCESS, run.store, run.id],
        env=environment_of_tests() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
    )


async def complete(run: RunRef, completion: int = 0) -> Any:
    """Run a completion of the first row, like the activity does."""
    return await RolloutRunner(run).complete(GroupKey(cursor=0), completion, 0)
