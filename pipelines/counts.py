"""What a stage, the trunks or an evaluation amounted to: small numbers that may travel to the coordinator."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from pipelines.rows import table_to_rollouts


@dataclass(slots=True, kw_only=True)
class StageCounts:
    """Sums over siblings; `+` adds two disjoint parts of a stage."""

    groups: int = 0  # groups in the mean of the objective: not failed, overlong or capped
    informative_groups: int = 0  # of those, with unequal returns or a non-zero advantage
    siblings: int = 0
    comparable: int = 0  # siblings of the groups in the mean of the objective
    successes: int = 0  # siblings with a positive return
    trained: int = 0  # siblings
    filtered: Counter[str] = field(default_factory=Counter)  # siblings by reason
    failed: Counter[str] = field(default_factory=Counter)  # siblings by first error message
    failed_first: dict[str, str] = field(default_factory=dict)  # the first group by error message
    generated_tokens: int = 0  # of the siblings that this stage sampled; trunks are counted where they were made
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    shareable_prompt_tokens: int = 0  # that the cache could have had
    credit_seconds: float = 0.0
    versions: frozenset[int] = frozenset()  # weight versions that sampled the trained responses

    def __add__(self, other: StageCounts) -> StageCounts:
        return StageCounts(**{name: _join(getattr(self, name), getattr(other, name)) for name in self.__slots__})


def _join(left: Any, right: Any) -> Any:
    if type(left) is dict:
        return {**right, **left}
    return left | right if isinstance(left, frozenset) else left + right


def count_stage(samples: pa.Table) -> StageCounts:
    """Counts of SAMPLES rows; groups never straddle two tables."""
    if not len(samples):  # an empty block has lost its columns on its way through Ray Data
        return StageCounts()
    columns = samples.select([
        "group_id", "first", "outcome", "reason", "advantage", "return", "weight_version", "generated_tokens", "prompt_tokens",
        "cached_prompt_tokens", "shareable_prompt_tokens", "credit_seconds"]).to_pylist()
    counts = StageCounts()
    valid, informative, returns = set(), set(), dict[str, float]()
    for row in columns:
        if row["outcome"] == "trained" and (row["advantage"] or returns.setdefault(row["group_id"], row["return"]) != row["return"]):
            informative.add(row["group_id"])
        if row["outcome"] == "trained" or row["reason"] in ("zero_advantage", "uncredited"):
            valid.add(row["group_id"])
            counts.comparable += row["first"]
        counts.credit_seconds += row["credit_seconds"]
        if not row["first"]:
            continue
        counts.siblings += 1
        if row["outcome"] == "trained":
            counts.trained += 1
        else:
            getattr(counts, row["outcome"])[row["reason"]] += 1
        if row["outcome"] == "failed":
            counts.failed_first.setdefault(row["reason"], row["group_id"])
        counts.successes += row["return"] > 0
        counts.generated_tokens += row["generated_tokens"]
        counts.prompt_tokens += row["prompt_tokens"]
        counts.cached_prompt_tokens += row["cached_prompt_tokens"]
        counts.shareable_prompt_tokens += row["shareable_prompt_tokens"]
    counts.versions = frozenset(row["weight_version"] for row in columns if row["weight_version"] is not None)
    counts.groups, counts.informative_groups = len(valid), len(informative)
    return counts


@dataclass(slots=True, kw_only=True)
class EpisodeCounts:
    """Sums over whole episodes: trunks or evaluation."""

    episodes: int = 0
    successes: int = 0  # with a positive return
    returns: float = 0.0  # sum
    turns: int = 0
    tool_calls: int = 0
    malformed_calls: int = 0
    failed_calls: int = 0
    cut: int = 0  # episodes that a limit ended: of turns, of the context, of a response or of the stage's time
    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    shareable_prompt_tokens: int = 0  # that the cache could have had
    tasks: Counter[tuple[int, int]] = field(default_factory=Counter)  # by (episodes judged, of them successes)
    boundaries: Counter[int] = field(default_factory=Counter)  # by turn
    ends: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)  # episodes by error message
    failed_first: dict[str, str] = field(default_factory=dict)  # the first episode by error message

    @property
    def judged(self) -> int:
        """Episodes that came to an end: one that failed is neither a success nor none."""
        return self.episodes - self.failed.total()

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(**{name: _join(getattr(self, name), getattr(other, name)) for name in self.__slots__})


def count_episodes(table: pa.Table) -> EpisodeCounts:
    """Counts of ROLLOUTS rows."""
    counts = EpisodeCounts()
    by_task: dict[str, list[bool]] = {}  # all episodes of a task lie in one table
    for rollout in table_to_rollouts(table):
        counts.episodes += 1
        counts.successes += rollout.returns_to_go > 0
        counts.returns += rollout.returns_to_go
        counts.turns += sum(turn.kind == "action" for turn in rollout.turns)
        counts.tool_calls += sum(turn.tool_calls for turn in rollout.turns)
        counts.malformed_calls += sum(turn.malformed_calls for turn in rollout.turns)
        counts.failed_calls += sum(turn.failed_calls for turn in rollout.turns)
        counts.cut += rollout.end in ("truncated", "overlong", "capped") or any(turn.finish_reason == "length" for turn in rollout.turns)
        counts.generated_tokens += sum(len(turn.response_ids) for turn in rollout.turns)
        counts.prompt_tokens += sum(len(turn.context_ids) for turn in rollout.turns)
        counts.cached_prompt_tokens += sum(turn.cached_prompt_tokens for turn in rollout.turns)
        counts.shareable_prompt_tokens += sum(turn.shareable_prompt_tokens for turn in rollout.turns)
        counts.boundaries.update(boundary.turn for boundary in rollout.boundaries)
        counts.ends[rollout.end] += 1
        if rollout.end == "failed":
            counts.failed[rollout.failure] += 1
            counts.failed_first.setdefault(rollout.failure, rollout.rollout_id)
        else:
            by_task.setdefault(rollout.task_id, []).append(rollout.returns_to_go > 0)
    counts.tasks = Counter((len(successes), sum(successes)) for successes in by_task.values())
    return counts
