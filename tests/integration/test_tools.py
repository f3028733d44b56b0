"""Agents with tools through real Ray: what a sandbox holds at a boundary is there again for siblings in other processes."""

import json
import re

import pytest
import ray
from chats import chat
from players import Spawn, open_pool
from test_collection import collection
from worlds import settings

from actors.generator import Generator
from pipelines.collect import Ask, collect_episodes, count_rollouts, stage_samples
from pipelines.counts import StageCounts, count_stage
from pipelines.rows import table_to_rollouts, unpack
from rtpo_ray import algorithms
from rtpo_ray.config import AlgorithmConfig
from rtpo_ray.engines.scripted import ScriptedEngine
from rtpo_ray.environments.question import Question
from rtpo_ray.episodes.toolcalls import format_hermes
from rtpo_ray.types import Task

CELLS = ("total = {start}\ntotal", "total = total * 2\ntotal", "total + 1")


def solve(context, sampling):
    """Doubles the number of the question in the sandbox, adds one, and says what it was told; at odd seeds something else."""
    text = chat("chatml").tokenizer.decode(context)
    told = re.findall(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>", text)
    start = re.search(r"Start with (\d+)", text).group(1)
    say = format_hermes("python", {"code": CELLS[len(told)].format(start=start)}) if len(told) < len(CELLS) else \
        told[-1] if sampling.seed % 2 else "no idea"
    return [*chat("chatml").encode(say), *sampling.stop_token_ids[:1]]


class Solver(Generator):
    """A generator whose model knows how to use Python."""

    def __init__(self, name):
        super().__init__(name=name, make_engine=lambda: ScriptedEngine(solve), make_environment=lambda: Question(grader="math", tools=["python"]),
                         template=chat("chatml"), settings=settings(max_turns=4, max_response_tokens=120, max_model_len=2048, step_timeout=60.0),
                         overlong="error", concurrency=8)


@pytest.fixture(scope="module")
def sandbox():
    from rtpo_ray.tools import sandbox

    missing = {name: why for name, why in sandbox.layers().items() if name in sandbox.ESSENTIAL and why != "active"}
    if missing:
        pytest.skip(f"this machine cannot isolate code: {json.dumps(missing)}")


def test_siblings_go_on_with_what_the_trunks_sandbox_held(cluster, sandbox):
    tasks = [Task(task_id=f"t{start}", seed=start, payload={"question": f"Start with {start}.", "answer": str(2 * start + 1)})
             for start in range(3, 9)]
    pool = open_pool(Spawn((Solver,)), 2)
    trunks = collect_episodes(tasks, "trunks", Ask(seed=1, temperature=1.0, keep_boundaries=True), collection(pool), 3)
    made = [rollout for table in trunks.iter_batches(batch_format="pyarrow", batch_size=None) for rollout in table_to_rollouts(table)]
    for rollout in made:
        start = int(rollout.task_id[1:])
        assert [turn.observation for turn in rollout.turns[:3]] == [str(start), str(2 * start), str(2 * start + 1)], rollout.failure
        assert [turn.tool_calls for turn in rollout.turns] == [1, 1, 1, 0]
    counts = count_rollouts(trunks.to_arrow_refs(), 60)
    assert (counts.episodes, counts.failed.total(), counts.tool_calls, counts.failed_calls) == (6, 0, 18, 0)
    method = AlgorithmConfig(args={"n_siblings": 4})
    for turn in (3, 2, 1):
        (stage,) = [stage for stage in algorithms.build(method).stages(4) if stage.turn == turn]
        blocks = [unpack(ray.get(block)) for block in stage_samples(trunks, stage, method, Ask(seed=2, temperature=1.0), collection(pool))]
        found = sum(map(count_stage, blocks), StageCounts())
        assert (found.siblings, found.failed.total()) == (24, 0), found.failed
        assert 0 < found.successes < 24  # half of them say what the sandbox told, which is right at every boundary
