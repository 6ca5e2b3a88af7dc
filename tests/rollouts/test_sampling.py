"""The sampler of rollout functions: its policy version, its settings, and what it records."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from fireworks.training.sdk.routing import RoutingReferences
from fireworks.training.sdk.sampling import DeploymentSampler, SampledCompletion

from everburn.records.publications import Publication, find_publication, publish
from everburn.records.store import ArtifactStore
from everburn.rollouts.call_log import CallLog
from everburn.rollouts.contract import PromptTooLongError, Sample
from everburn.rollouts.failures import SnapshotGoneError, classify
from everburn.rollouts.sampling import (
    CompletionScope,
    PolicySampler,
    SamplingRefusedError,
    current_scope,
)
from everburn.rollouts.tokenizers import load_tokenizer
from everburn.trainers.serverless import ServerlessTrainer
from support.emulator import POSITIONS, RunningEmulator
from support.sessions import a_config
from support.threads import hanging

PROMPT = [2, 3, 4]


class Policies:
    """A run's store in which a trainer has published policy versions."""

    def __init__(self, store: ArtifactStore, url: str, trainer: ServerlessTrainer) -> None:
        self.store = store
        self.url = url
        self._trainer = trainer

    async def publish(self, version: int, lease_epoch: int = 1, *, current: bool = True) -> None:
        snapshot = await self._trainer.publish(f"policy-{version}-e{lease_epoch}")
        publish(
            self.store,
            Publication(
                version=version,
                incarnation=0,
                lease_epoch=lease_epoch,
                snapshot=snapshot.path,
                handle=snapshot.handle,
            ),
            current=current,
        )

    def sampler(self, **changes: Any) -> PolicySampler:
        config = a_config(self.url, max_completion_tokens=5, **changes)
        return PolicySampler(self.store, config, load_tokenizer(config))


@pytest.fixture
async def policies(emulator: RunningEmulator, tmp_path: Path) -> AsyncIterator[Policies]:
    trainer = await ServerlessTrainer.open(a_config(emulator.base_url))
    yield Policies(ArtifactStore(str(tmp_path)), emulator.base_url, trainer)
    await trainer.close()


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trainer is recovered in these tests, so a missing version stays missing."""
    monkeypatch.setattr("everburn.rollouts.sampling.RECOVERY_PATIENCE", 0.0)


async def sample(
    sampler: PolicySampler, scope: CompletionScope, prompt: list[int] = PROMPT, **settings: Any
) -> Sample:
    """One sampling call of the completion that `scope` describes."""
    context = copy_context()
    context.run(current_scope.set, scope)
    task = asyncio.get_running_loop().create_task(
        sampler.sample(prompt, **settings), context=context
    )
    return await task


def a_scope(version: int = 0, **changes: Any) -> CompletionScope:
    return CompletionScope("run r · row 17 · completion 3", version, **changes)


async def test_a_call_returns_exact_tokens_with_their_logprobs(policies: Policies) -> None:
    await policies.publish(0)
    scope = a_scope()
    result = await sample(policies.sampler(), scope, seed=1)

    assert 1 <= len(result.tokens) <= 5
    assert len(result.logprobs) == len(result.tokens)
    assert all(logprob <= 0 for logprob in result.logprobs)
    assert result.finish_reason in ("stop", "length")
    assert scope.calls == [result]
    assert scope.output_tokens == len(result.tokens)


async def test_an_evaluation_overrides_the_requested_temperature(policies: Policies) -> None:
    await policies.publish(0)
    sampler = policies.sampler()
    greedy = [await sample(sampler, a_scope(temperature=0.0), temperature=1.0) for _ in range(3)]

    assert len({tuple(result.tokens) for result in greedy}) == 1


async def test_a_prompt_that_leaves_no_room_is_refused_with_both_lengths(
    policies: Policies,
) -> None:
    await policies.publish(0)
    sampler = policies.sampler(max_seq_len=4)
    cut = await sample(sampler, a_scope(), [2, 3, 4])
    assert len(cut.tokens) == 1

    with pytest.raises(PromptTooLongError, match=r"row 17 .* has 4 tokens and max_seq_len is 4"):
        await sample(sampler, a_scope(), [2, 3, 4, 5])


async def test_a_refused_request_fails_with_the_servers_text(
    policies: Policies,
) -> None:
    await policies.publish(0)
    with pytest.raises(SamplingRefusedError, match=rf"row 17 .*{POSITIONS}") as caught:
        await sample(policies.sampler(), a_scope(), [2] * (POSITIONS + 1))
    assert classify(caught.value) == "fatal"


async def test_a_version_that_is_not_served_yet_is_waited_for(policies: Policies) -> None:
    with pytest.raises(SnapshotGoneError, match="version 0 isn't served") as caught:
        await sample(policies.sampler(), a_scope())
    assert classify(caught.value) == "snapshot_gone"


async def test_a_slow_store_delays_no_other_completion(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()

    class Slow(ArtifactStore):
        """Answers only after the event loop has run."""

        def keys(self, folder: str) -> list[str]:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            assert turned.wait(5), "the loop waits for the store"
            return super().keys(folder)

    config = a_config("http://127.0.0.1:9")
    sampler = PolicySampler(Slow(str(tmp_path)), config, load_tokenizer(config))
    with pytest.raises(SnapshotGoneError):
        await sample(sampler, a_scope())


async def test_code_that_fills_its_thread_pool_delays_no_sampling_call(
    policies: Policies,
) -> None:
    await policies.publish(0)
    sampler = policies.sampler()
    scope = a_scope(log=CallLog(policies.store, "calls/row-0.0-0.jsonl"))
    with hanging() as user_code:
        user_code.take_all()
        async with asyncio.timeout(20):
            assert (await sample(sampler, scope)).tokens
    sampler.close()


async def test_a_snapshot_lost_with_its_session_is_waited_for(
    emulator: RunningEmulator, policies: Policies
) -> None:
    await policies.publish(0)
    emulator.admin("POST", f"expire/{policies._trainer.session}")
    with pytest.raises(SnapshotGoneError, match="version 0 isn't served"):
        await sample(policies.sampler(), a_scope())


async def test_after_a_recovery_an_old_version_samples_the_current_policy(
    policies: Policies,
) -> None:
    await policies.publish(0)
    await policies.publish(1)
    await policies.publish(1, lease_epoch=2)

    assert (await sample(policies.sampler(), a_scope(version=0))).version == 1


async def test_a_retry_reuses_its_finished_calls(policies: Policies) -> None:
    await policies.publish(0)
    sampler, key = policies.sampler(), "rollouts/row-000017.0/_calls-3.jsonl"
    first = a_scope(log=CallLog(policies.store, key))
    one = await sample(sampler, first)
    two = await sample(sampler, first, [*PROMPT, *one.tokens])
    retry = a_scope(log=CallLog(policies.store, key))

    assert await sample(sampler, retry) == one
    assert await sample(sampler, retry, [*PROMPT, *one.tokens]) == two
    assert retry.log is not None and retry.log.reused == 2


async def test_a_sampler_is_kept_open_only_while_a_completion_uses_it(
    policies: Policies,
) -> None:
    """Samplers of old versions must not accumulate, and none may close while a row still uses
    it."""
    sampler = policies.sampler()
    closed: list[int] = []

    def opened(version: int) -> None:
        """Note when the sampler of a version is closed."""
        record = find_publication(policies.store, version)
        assert record is not None
        deployment = sampler._open[record.handle]
        close = deployment.close
        deployment.close = lambda: (closed.append(version), close())[1]

    straggler = CompletionScope("row 0", version=0)
    with sampler.serving(straggler):
        for version in range(4):
            await policies.publish(version)
            with sampler.serving(CompletionScope(f"row {version + 1}", version)):
                await sampler.sample(PROMPT)
                opened(version)
            if version == 0:
                with sampler.serving(straggler):
                    await sampler.sample(PROMPT)
        assert closed == [1, 2]  # 0 is in use, 3 is the newest
    assert closed == [1, 2, 0]
    sampler.close()
    assert closed == [1, 2, 0, 3]


async def test_expert_routing_is_requested_if_it_is_replayed(
    policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator's models have no experts, so the test replaces the server's answer."""
    asked: list[bool] = []
    answer: list[Any] = [["AA==", "AQ=="]]

    async def sample(self: object, prompt: list[int], **settings: Any) -> list[Any]:
        asked.append(settings.get("include_routing_matrix", False))
        return [
            SampledCompletion(
                text="",
                full_tokens=[*prompt, 7, 8],
                prompt_len=len(prompt),
                sampling_logprobs=[-1.0, -1.0],
                routing_matrices=answer[0],
            )
        ]

    monkeypatch.setattr(DeploymentSampler, "sample_with_prompt_tokens", sample)
    await policies.publish(0)
    current_scope.set(CompletionScope("here", version=0))
    replayed = await policies.sampler(router_replay=True).sample(PROMPT)
    answer[0] = None
    plain = await policies.sampler().sample(PROMPT)
    assert (asked, replayed.routing, plain.routing) == ([True, False], ["AA==", "AQ=="], None)

    answer[0] = RoutingReferences(length=2, files=(), spans=())
    with pytest.raises(SamplingRefusedError, match="set router_replay to false"):
        await policies.sampler(router_replay=True).sample(PROMPT)


@pytest.mark.parametrize(
    ("status", "text"), [(401, "SOME_KEY is refused"), (402, "add credit"), (403, "permission")]
)
async def test_a_missing_permission_to_sample_is_fatal_and_says_what_to_do(
    policies: Policies, emulator: RunningEmulator, status: int, text: str
) -> None:
    sampler = policies.sampler(api_key_env="SOME_KEY")
    await policies.publish(0)
    emulator.plan_fault("sample", "status", status=status)
    scope = sampler.serving(CompletionScope("row 3", 0))
    with scope, pytest.raises(SamplingRefusedError, match=rf"row 3: .*{text}") as caught:
        await sampler.sample(PROMPT)
    assert classify(caught.value) == "fatal"
    sampler.close()
