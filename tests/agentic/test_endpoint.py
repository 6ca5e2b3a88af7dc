"""The endpoint for harnesses, used by the stock OpenAI client."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from everburn import RecoverableRolloutError
from everburn.agentic import (
    ChatEndpoint,
    RendererFormat,
    TraceIntegrityError,
    chat_endpoint,
    in_thread,
)
from everburn.agentic.tools import Tool
from everburn.learning.rollout_file import read_rollout
from everburn.records.ids import GroupKey
from everburn.records.keys import rollout_key
from everburn.records.store import ArtifactStore
from everburn.rollouts.contract import RolloutRun
from everburn.rollouts.runner import RolloutRunner
from support.agents import a_run, ask
from support.emulator import RunningEmulator
from support.policies import ScriptedPolicy, setup_of

ASK = {"role": "user", "content": "how warm is it?"}
CALL = '<tool_call>\n{"name":  "warmth", "arguments": {"city":"Köln"}}\n</tool_call><|im_end|>'
SPOKEN = "  It is warm. <|im_end|>"


def warmth(city: str) -> str:
    """Degrees in a city."""
    return "20"


TOOLS = [Tool.of(warmth).spec]


class Session:
    """An endpoint over a scripted policy, and a client for it."""

    def __init__(self, endpoint: ChatEndpoint, policy: ScriptedPolicy, client: AsyncOpenAI) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.client = client


@asynccontextmanager
async def open_session(
    tokenizer: Any, answers: Sequence[str], policy: Any = None, **setup: Any
) -> AsyncIterator[Session]:
    format = RendererFormat(tokenizer, {"name": "qwen3", "enable_thinking": False})
    policy = policy or ScriptedPolicy(tokenizer, answers)
    async with (
        chat_endpoint(setup_of(policy, tokenizer, **setup), format) as endpoint,
        AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client,
    ):
        yield Session(endpoint, policy, client)


def trained(run: RolloutRun) -> list[int]:
    return [
        token
        for segment in run.segments
        for token, flag in zip(segment.tokens, segment.loss_mask, strict=True)
        if flag
    ]


def result_of(answer: dict[str, Any]) -> dict[str, Any]:
    (call,) = answer["tool_calls"]
    return {"role": "tool", "tool_call_id": call["id"], "content": "20"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_with_tools_is_one_segment_of_exact_tokens(
    chat_tokenizer: Any, stream: bool
) -> None:
    async with open_session(chat_tokenizer, [CALL, SPOKEN, "No.<|im_end|>"]) as session:
        messages: list[Any] = [ASK]
        called = await ask(session.client, messages, TOOLS, stream)
        assert called["tool_calls"][0]["function"]["name"] == "warmth"
        assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"city": "Köln"}
        messages += [called, result_of(called)]
        spoken = await ask(session.client, messages, TOOLS, stream)
        # Harnesses strip the content that they send back.
        messages += [spoken | {"content": spoken["content"].strip()}]
        messages += [{"role": "user", "content": "Sure?"}]
        await ask(session.client, messages, TOOLS, stream)
        run = session.endpoint.run(1.0)

    (segment,) = run.segments
    assert segment.tokens == session.policy.prompts[-1] + session.policy.outputs[-1]
    assert trained(run) == [token for output in session.policy.outputs for token in output]
    assert run.info["turns"] == 3 and run.info["boundaries"]["appends"] == 2
    assert run.answer == "No."


async def test_the_response_is_a_valid_openai_completion(chat_tokenizer: Any) -> None:
    async with open_session(chat_tokenizer, [CALL, "x" * 50, "hello<|im_end|>"]) as session:
        create = session.client.chat.completions.create
        request: dict[str, Any] = {"model": "mine", "messages": [ASK]}
        called = await create(**request, tools=TOOLS)
        assert (called.model, called.choices[0].finish_reason) == ("mine", "tool_calls")
        assert called.usage is not None
        assert called.usage.prompt_tokens == len(session.policy.prompts[0])
        assert called.usage.completion_tokens == len(session.policy.outputs[0])

        cut = await create(**request, max_tokens=9)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("x" * 9, "length")

        options = {"include_usage": True}
        stream = await create(**request, stream=True, stream_options=options)  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.total_tokens > 0
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
        assert (await session.client.models.list()).data[0].id == "test"


async def test_the_run_sets_the_distribution_and_the_harness_can_lower_the_length(
    chat_tokenizer: Any,
) -> None:
    async with open_session(chat_tokenizer, lambda _: "hello<|im_end|>") as session:  # type: ignore[arg-type]
        create = session.client.chat.completions.create
        request: dict[str, Any] = {"model": "policy", "messages": [ASK]}
        await create(
            **request, temperature=0.0, top_p=0.1, seed=1, max_completion_tokens=7, stop="z"
        )
        await create(**request, max_tokens=100_000)
    assert session.policy.settings == [
        {"max_tokens": 7, "temperature": 1.0, "stop": ["z"]},
        {"max_tokens": 200, "temperature": 1.0, "stop": None},
    ]


async def test_branches_and_other_conversations_are_separate_segments(
    chat_tokenizer: Any,
) -> None:
    async with open_session(
        chat_tokenizer, [CALL, "a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
    ) as session:
        called = await ask(session.client, [ASK], TOOLS, False)
        history = [ASK, called, result_of(called)]
        await ask(session.client, history, TOOLS, False)
        await ask(
            session.client, [*history[:-1], result_of(called) | {"content": "21"}], TOOLS, False
        )
        await ask(session.client, [{"role": "user", "content": "Sum it up."}], [], False)
        run = session.endpoint.run(0.5)
        with pytest.raises(TraceIntegrityError):
            session.endpoint.run(0.5, on_branch="reject")

    assert len(run.segments) == 3
    assert trained(run) == [token for output in session.policy.outputs for token in output]
    boundaries = run.info["boundaries"]
    assert (boundaries["appends"], boundaries["branches"], boundaries["splits"]) == (1, 1, 1)
    assert boundaries["repeated_tokens"] == len(session.policy.outputs[0])


async def test_a_history_that_the_harness_rewrote_is_rendered_again(chat_tokenizer: Any) -> None:
    async with open_session(chat_tokenizer, ["one<|im_end|>", "two<|im_end|>"]) as session:
        await ask(session.client, [ASK], [], False)
        rewritten = [ASK, {"role": "assistant", "content": "won"}, ASK]
        await ask(session.client, rewritten, [], False)
        run = session.endpoint.run(0.0)
    assert run.info["boundaries"]["splits"] == 1
    assert "won" in chat_tokenizer.decode(session.policy.prompts[1])


async def test_a_blocking_client_runs_on_a_thread(chat_tokenizer: Any) -> None:
    async with open_session(chat_tokenizer, ["hello<|im_end|>"]) as session:

        def harness() -> str | None:
            with OpenAI(
                base_url=session.endpoint.base_url, api_key=session.endpoint.api_key
            ) as client:
                response = client.chat.completions.create(model="x", messages=[ASK])  # type: ignore[list-item]
                return response.choices[0].message.content

        assert await in_thread(harness) == "hello"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"n": 2}, "n=2 isn't supported"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "role is 'robot'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "must be text",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_tokens": 0}, "max_tokens must be"),
    ],
)
async def test_an_unsupported_request_is_refused_with_a_reason(
    chat_tokenizer: Any, change: dict[str, Any], complaint: str
) -> None:
    async with open_session(chat_tokenizer, []) as session:
        with pytest.raises(openai.BadRequestError, match=complaint):
            await session.client.chat.completions.create(
                **{"model": "policy", "messages": [ASK]} | change
            )
        assert session.endpoint.failure is None and not session.policy.prompts


async def test_a_full_context_has_openais_error_code(chat_tokenizer: Any) -> None:
    policy = ScriptedPolicy(chat_tokenizer, [], context=3)
    async with open_session(chat_tokenizer, [], policy) as session:
        with pytest.raises(openai.BadRequestError) as caught:
            await ask(session.client, [ASK], [], False)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(RecoverableRolloutError, match="sampled nothing"):
            session.endpoint.run(0.0)


class UnavailablePolicy(ScriptedPolicy):
    """A policy that no sampler serves."""

    async def sample(self, prompt_tokens: Sequence[int], **settings: Any) -> Any:
        self.prompts.append(list(prompt_tokens))
        raise ConnectionError("no snapshot")


async def test_a_sampling_error_fails_the_completion_even_if_the_harness_ignores_it(
    chat_tokenizer: Any,
) -> None:
    policy = UnavailablePolicy(chat_tokenizer, [])
    with pytest.raises(ConnectionError, match="no snapshot"):
        async with open_session(chat_tokenizer, [], policy) as session:
            await ask(session.client, [ASK], [], False)
    assert len(policy.prompts) == 1, "the client doesn't retry; the run does"

    async with open_session(chat_tokenizer, [], UnavailablePolicy(chat_tokenizer, [])) as session:
        with pytest.raises(openai.InternalServerError):
            await ask(session.client, [ASK], [], False)
        with pytest.raises(ConnectionError, match="no snapshot"):
            session.endpoint.run(0.0)


async def test_an_abandoned_request_is_not_part_of_the_rollout(chat_tokenizer: Any) -> None:
    class Slow(ScriptedPolicy):
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def sample(self, prompt_tokens: Sequence[int], **settings: Any) -> Any:
            if not self.begun.is_set():
                self.begun.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            return await super().sample(prompt_tokens, **settings)

    policy = Slow(chat_tokenizer, ["hello<|im_end|>"])
    async with open_session(chat_tokenizer, [], policy) as session:
        first = asyncio.create_task(ask(session.client, [ASK], [], False))
        await asyncio.wait_for(policy.begun.wait(), 30)
        first.cancel()
        await asyncio.wait_for(policy.cancelled.wait(), 30)
        await ask(session.client, [ASK], [], False)
        assert len(session.endpoint.calls) == 1 and session.endpoint.failure is None


async def test_the_address_belongs_to_one_completion_and_ends_with_it(chat_tokenizer: Any) -> None:
    async with (
        open_session(chat_tokenizer, ["a<|im_end|>"]) as one,
        open_session(chat_tokenizer, []) as two,
    ):
        assert one.endpoint.base_url.split("/")[2] == two.endpoint.base_url.split("/")[2]
        async with AsyncOpenAI(base_url=one.endpoint.base_url, api_key=two.endpoint.api_key) as mix:
            with pytest.raises(openai.AuthenticationError):
                await ask(mix, [ASK], [], False)
        await ask(one.client, [ASK], [], False)
        assert (len(one.endpoint.calls), len(two.endpoint.calls)) == (1, 0)
        async with open_session(chat_tokenizer, []) as three:
            ended = three.endpoint
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{ended.base_url}/models")).status_code == 404
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"{one.endpoint.base_url}/models")


async def test_two_concurrent_completions_on_the_real_sampler_stay_separate(
    emulator: RunningEmulator, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {
        "rollout": "support.agents:make_harness_rollout_fn",
        "completions_per_prompt": 2,
    }
    async with a_run(tmp_path, emulator.base_url, **fields) as run:
        runner = RolloutRunner(run)
        key = GroupKey(cursor=0)
        await asyncio.gather(*(runner.complete(key, index, 0) for index in range(2)))
        for index in range(2):
            record, rollout = read_rollout(ArtifactStore.of(run), rollout_key(key, index))
            (segment,) = rollout.segments
            assert record.prompt == f"go {index}="
            assert record.versions == [0, 0, 0] and sum(segment.loss_mask) == 3
            assert record.info["boundaries"]["appends"] == 2


async def test_the_environment_has_the_variables_that_clients_read(chat_tokenizer: Any) -> None:
    async with open_session(chat_tokenizer, []) as session:
        assert session.endpoint.environment == {
            "OPENAI_BASE_URL": session.endpoint.base_url,
            "OPENAI_API_KEY": session.endpoint.api_key,
        }
