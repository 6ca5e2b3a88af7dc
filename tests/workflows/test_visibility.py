"""What a person sees in the stock Temporal UI, on servers with and without search attributes."""

from typing import Any

from temporalio.api.sdk.v1 import WorkflowMetadata
from temporalio.client import Client, WorkflowHandle
from temporalio.common import SearchAttributeKey

from activities.search_attributes import POLICY_VERSION, REWARD, ROW, RUN, SEARCH_ATTRIBUTES, STEP
from support.farm import Farm, Start
from support.histories import run_histories
from support.script import Script
from support.waiting import until


async def test_every_activity_and_child_has_a_summary(start: Start, farm: Farm):
    run = await start(
        Script(evaluate=lambda step, rollout_fn: {"skill": 1}), rows=1, evaluation_interval=2
    )
    await run.result()
    assert run.handle.first_execution_run_id is not None
    histories = await run_histories(farm.client, run.id, run.handle.first_execution_run_id)
    decode = farm.client.data_converter.payload_converter.from_payload
    summaries = [
        decode(event.user_metadata.summary)
        for history in histories
        for event in history.events
        if event.HasField("activity_task_scheduled_event_attributes")
        or event.HasField("start_child_workflow_execution_initiated_event_attributes")
    ]
    assert "row 0 · completion 1 · policy v0" in summaries
    assert "step 1 · submission 0 · rows 0" in summaries
    assert "step 1 · publish policy v1" in summaries
    assert "evaluation function · policy v0" in summaries
    assert all(summaries)


async def test_a_run_can_be_found_and_read(start: Start, farm: Farm):
    run = await start(Script(), rows=2)
    optimizer = run.trainer.hold("optim_step")
    await run.trainer.reached("optim_step")
    details = await current_details(run.handle)
    assert "### step 1: training" in details and "Waiting for the optimizer step." in details
    assert "| steps | 0 of about 2 |" in details and f"| folder | `{run.store.folder}` |" in details
    optimizer.open()
    await run.result()

    assert "### completed" in await current_details(run.handle)
    assert await attributes(run.handle) == {RUN: run.id, STEP: 2, POLICY_VERSION: 2, REWARD: 0.5}
    group = farm.client.get_workflow_handle(f"{run.id}/row-1.0")
    assert await attributes(group) == {RUN: run.id, ROW: 1, POLICY_VERSION: 1}
    query = f"EverburnRun = '{run.id}' AND EverburnRow = 1"
    await until(lambda: is_found(farm.client, query, f"{run.id}/row-1.0"))


async def test_a_server_without_search_attributes_is_supported(start_tuned: Start):
    run = await start_tuned(Script(), rows=1)
    await run.result()
    assert run.trained == ["0"]
    assert await attributes(run.handle) == {}


async def current_details(workflow: WorkflowHandle[Any, Any]) -> str:
    metadata: WorkflowMetadata = await workflow.query("__temporal_workflow_metadata")
    return metadata.current_details


async def attributes(workflow: WorkflowHandle[Any, Any]) -> dict[SearchAttributeKey[Any], Any]:
    found: Any = (await workflow.describe()).typed_search_attributes
    return {key: found[key] for key in SEARCH_ATTRIBUTES if key in found}


async def is_found(client: Client, query: str, workflow_id: str) -> bool:
    return [execution.id async for execution in client.list_workflows(query)] == [workflow_id]
