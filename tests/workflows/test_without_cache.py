"""Without a cache every workflow task replays its history: the hardest test of determinism."""

from pathlib import Path

from support.farm import NoCache, open_farm, register_namespace
from support.histories import replay, run_histories
from support.script import Draw, Script


async def test_a_run_with_every_feature_replays_at_each_task(
    temporal_server: str, tiny_tokenizer: Path, tmp_path: Path
):
    async def play(draw: Draw) -> float | None:
        return None if draw.place == (1, 0) else draw.completion

    script = Script(
        play,
        evaluate=lambda step, rollout_fn: {"skill": step},
        keep=lambda group: group.row["row"] != 2,
    )
    await register_namespace(temporal_server, "uncached")
    async with open_farm(temporal_server, "uncached", tiny_tokenizer, NoCache()) as farm:
        run = await farm.start(
            script,
            tmp_path,
            rows=4,
            prompt_groups_per_step=2,
            max_head_offpolicy_versions=1,
            max_concurrency_rollout_sample=4,
            min_group_size=2,
            max_incomplete_group_retries=1,
            dcp_save_interval=1,
        )
        result = await run.result()
        assert (result.steps, result.rows) == (1, 4)
        assert sorted(run.trained) == ["0", "3"]
        await replay(await run_histories(farm.client, run.id, run.first_execution), farm.plugins)
