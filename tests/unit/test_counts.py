"""What a stage and a set of episodes amount to, worked out by hand; parts add up to the whole."""

from collections import Counter
from dataclasses import replace

import pyarrow as pa
import pytest
from records import credited, failed, group, random_groups, random_rollout, rng_of, sibling, trunk, turn_record

from pipelines.counts import EpisodeCounts, StageCounts, count_episodes, count_stage
from pipelines.rows import rollouts_to_table
from rtpo_ray import algorithms
from rtpo_ray.types import Boundary, Rollout

GROUPS = [
    group(sibling("a/0", 0.0, 1.0), sibling("a/1", 0.0), name="a"),
    group(sibling("b/0", 1.0), sibling("b/1", 1.0), sibling("b/2", 1.0), name="b"),
    group(sibling("c/0", 1.0), failed("c/1", "E: lost"), name="c"),
    group(sibling("d/0", end="overlong"), sibling("d/1", end="overlong"), name="d"),
]


def test_a_stage_by_hand():
    counts = count_stage(credited(*GROUPS))
    assert counts.credit_seconds > 0
    counts.credit_seconds = 0.0
    assert counts == StageCounts(
        groups=2,  # a and b: c failed, d has no response
        informative_groups=1, siblings=9, comparable=5, successes=5, trained=2,
        filtered=Counter(zero_advantage=3, overlong=2), failed=Counter({"E: lost": 2}), failed_first={"E: lost": "c"},
        generated_tokens=2 * 7, prompt_tokens=3 * 6 + 4, cached_prompt_tokens=0, versions=frozenset({0}))


def test_versions_are_those_that_sampled():
    table = credited(group(Rollout(rollout_id="a", task_id="t", turns=(turn_record(reward=1.0, weight_version=3),), parent="t/0"),
                           Rollout(rollout_id="b", task_id="t", turns=(turn_record(weight_version=4),), parent="t/0")))
    assert count_stage(table).versions == {3, 4}
    assert count_stage(credited()).versions == frozenset()


def test_turns_rewards_and_cached_tokens_of_a_continuation_count():
    turns = (turn_record(0, (1, 2, 3), (4,), cached_prompt_tokens=2, shareable_prompt_tokens=2),
             turn_record(1, (1,) * 9, (4,) * 5, 1.0, cached_prompt_tokens=6, shareable_prompt_tokens=8))
    one = Rollout(rollout_id="a", task_id="t", turns=turns, parent="t/0")
    counts = count_stage(credited(group(one, sibling("b", 0.0))))
    assert (counts.generated_tokens, counts.prompt_tokens, counts.cached_prompt_tokens, counts.shareable_prompt_tokens) == (6 + 2, 12 + 3, 8, 10)
    whole = count_episodes(rollouts_to_table([one]))
    assert (whole.prompt_tokens, whole.cached_prompt_tokens, whole.shareable_prompt_tokens) == (12, 8, 10)
    counts = count_stage(credited(group(replace(one, parent=""), sibling("b", 0.0))))  # a trunk: its tokens were counted where it was made
    assert (counts.siblings, counts.generated_tokens, counts.prompt_tokens, counts.cached_prompt_tokens) == (2, 2, 3, 0)


def test_rates_are_those_of_siblings_and_not_of_their_responses():
    """Under PPO every group reaches the learner, and every response is a row."""
    made = [group(*(trunk(f"{task}/{i}", 0.0, reward) for i, reward in enumerate(rewards)), name=task, turn=None)
            for task, rewards in (("a", (1.0, 0.0, 0.0)), ("b", (1.0, 1.0, 1.0)))]
    made.append(group(trunk("c/0", 0.0, 1.0), failed("c/1", "E: lost"), name="c", turn=None))
    table = credited(*made, algorithm=algorithms.make("ppo", {}))
    assert len(table) == 6 * 2 + 2
    counts = count_stage(table)
    counts.credit_seconds = 0.0
    assert counts == StageCounts(groups=2, informative_groups=1, siblings=8, comparable=6, successes=5, trained=6, failed=Counter({"E: lost": 2}),
                                 failed_first={"E: lost": "c"}, versions=frozenset({0}))
    counts = count_stage(credited(*made, algorithm=algorithms.make("grpo", {})))
    assert (counts.groups, counts.informative_groups, counts.comparable, counts.trained, counts.filtered) == (2, 1, 6, 3, Counter(zero_advantage=3))


@pytest.mark.parametrize("seed", range(5))
def test_parts_of_a_stage_add_up(seed):
    groups = random_groups(rng_of(seed)) + GROUPS
    tables = [credited(made) for made in groups]
    whole, parts = count_stage(pa.concat_tables(tables)), sum((count_stage(table) for table in tables), StageCounts())
    assert parts.credit_seconds == pytest.approx(whole.credit_seconds)
    whole.credit_seconds = parts.credit_seconds = 0.0
    assert parts == whole


def test_episodes_by_hand():
    boundaries = tuple(Boundary(turn=turn, context_hash="c", state_hash="s", snapshot=b"") for turn in range(2))
    turns = (turn_record(0, tool_calls=2, malformed_calls=1), turn_record(1, reward=1.0, tool_calls=1, response=(1, 2, 3)))
    rollouts = [
        Rollout(rollout_id="a", task_id="t", turns=turns, boundaries=boundaries),
        Rollout(rollout_id="b", task_id="t", turns=turns[:1], boundaries=boundaries[:1], end="truncated"),
        Rollout(rollout_id="d", task_id="u", turns=(turn_record(0, finish_reason="length", tool_calls=2, failed_calls=2),)),
        failed("c", "E: lost")]
    counts = count_episodes(rollouts_to_table(rollouts))
    assert counts.judged == 3
    assert counts == EpisodeCounts(
        episodes=4, successes=1, returns=1.0, turns=4, failed_calls=2, cut=2, tasks=Counter({(2, 1): 1, (1, 0): 1}), tool_calls=7, malformed_calls=2,
        generated_tokens=9, prompt_tokens=8, boundaries=Counter({0: 2, 1: 1}),
        ends=Counter(terminated=2, truncated=1, failed=1), failed=Counter({"E: lost": 1}), failed_first={"E: lost": "c"})


def test_parts_of_a_set_of_episodes_add_up():
    rollouts = [replace(random_rollout(rng_of(i), f"r{i}"), task_id=f"t{i // 2}") for i in range(10)]
    parts = [count_episodes(rollouts_to_table(part)) for part in (rollouts[:4], rollouts[4:4], rollouts[4:])]
    whole, summed = count_episodes(rollouts_to_table(rollouts)), sum(parts, EpisodeCounts())
    assert whole.tasks.total() == 5 and summed.returns == pytest.approx(whole.returns)
    summed.returns = whole.returns
    assert summed == whole


def test_a_summary_is_no_turn():
    """It belongs to the turn that it sums up; its tokens count."""
    turns = (turn_record(0), turn_record(0, kind="summary", response=(5, 6, 7)), turn_record(1, reward=1.0))
    counts = count_episodes(rollouts_to_table([Rollout(rollout_id="a", task_id="t", turns=turns)]))
    assert (counts.episodes, counts.turns, counts.generated_tokens) == (1, 2, 2 + 3 + 2)
    (row, *_) = credited(group(Rollout(rollout_id="a", task_id="t", turns=turns, parent="t/0"), sibling("b", 0.0))).to_pylist()
    assert row["turns"] == 2
