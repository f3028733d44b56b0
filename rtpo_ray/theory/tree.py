"""A finite game in the shape of a tree: states, actions that are token sequences, rewards at the end. Every value is exact."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rtpo_ray.types import Boundary, Rollout, TurnRecord, context_hash

Probabilities: TypeAlias = Mapping[str, Sequence[float]]  # of every action, by state
Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coin:
    """An end that pays 1 with probability `chance`, otherwise 0."""

    chance: float


Move: TypeAlias = str | float | Coin  # the next state, or what the end pays


@dataclass(frozen=True, slots=True)
class Play:
    """One way through the game from some state on."""

    chance: float
    steps: tuple[tuple[str, int], ...]  # (state, index of the action), in order
    reward: float


class Tree:
    """Args:
    moves: by state, where each of its actions leads. The first state is the root; every other one has exactly one parent.
    actions: by state, the tokens of each action, where they are not (0,), (1,), ...; no action is a prefix of another.

    A state's context is one token, its number (from 1; 0 is padding). Raises ValueError when `moves` is not a tree.
    """

    def __init__(self, moves: Mapping[str, Sequence[Move]], actions: Mapping[str, Sequence[Tokens]] | None = None) -> None:
        self.moves = {state: tuple(own) for state, own in moves.items()}
        self.actions = {state: tuple((actions or {}).get(state) or ((index,) for index in range(len(own)))) for state, own in self.moves.items()}
        self.number = {state: index for index, state in enumerate(self.moves, start=1)}
        self.root = next(iter(self.moves))
        self.turn = {self.root: 0}
        for state in self.moves:
            for move in self.moves[state]:
                if isinstance(move, str):
                    if move in self.turn or state not in self.turn or move not in self.moves:
                        raise ValueError(f"state {move!r} after {state!r}: expected a state of its own, defined, with parents before children")
                    self.turn[move] = self.turn[state] + 1
        unreached = [state for state in self.moves if state not in self.turn]
        ragged = [state for state in self.moves if len(self.actions[state]) != len(self.moves[state])]
        if unreached or ragged:
            raise ValueError(f"states without a parent: {unreached}; with another number of actions than of moves: {ragged}; expected none")
        self.turns = 1 + max(self.turn.values())  # K

    # --- exact values

    def uniform(self) -> dict[str, tuple[float, ...]]:
        return {state: (1 / len(moves),) * len(moves) for state, moves in self.moves.items()}

    def action_values(self, policy: Probabilities) -> dict[str, tuple[float, ...]]:
        """Q by state and action."""
        found: dict[str, tuple[float, ...]] = {}
        for state in reversed(self.moves):  # children come after parents
            found[state] = tuple(_dot(policy[move], found[move]) if isinstance(move, str) else _dot(*zip(*_ends(move), strict=True))
                                 for move in self.moves[state])
        return found

    def values(self, policy: Probabilities) -> dict[str, float]:
        """V by state; that of the root is the expected return."""
        return {state: _dot(policy[state], q) for state, q in self.action_values(policy).items()}

    def value(self, policy: Probabilities) -> float:
        """Expected return."""
        return self.values(policy)[self.root]

    def optimum(self) -> dict[str, tuple[float, ...]]:
        """The best policy, by backward induction."""
        best: dict[str, tuple[float, ...]] = dict(self.uniform())
        for state in reversed(self.moves):
            q = self.action_values(best)[state]
            best[state] = tuple(float(index == q.index(max(q))) for index in range(len(q)))
        return best

    def reach(self, policy: Probabilities) -> dict[str, float]:
        """Probability of coming through each state."""
        found = {self.root: 1.0}
        for state, moves in self.moves.items():
            found.update({move: found[state] * p for move, p in zip(moves, policy[state], strict=True) if isinstance(move, str)})
        return found

    def gradient(self, policy: Probabilities, reach: Mapping[str, float]) -> dict[str, tuple[float, ...]]:
        """Policy gradient with respect to the logits of one-token actions: reach(S) pi(u|S) (Q(S, u) - V(S))."""
        q, v = self.action_values(policy), self.values(policy)
        return {state: tuple(reach[state] * p * (value - v[state]) for p, value in zip(policy[state], q[state], strict=True)) for state in self.moves}

    # --- plays

    def plays(self, policy: Probabilities, state: str = "") -> Iterator[Play]:
        """Every play from `state` (the root) with a probability above 0."""
        state = state or self.root
        for index, (move, p) in enumerate(zip(self.moves[state], policy[state], strict=True)):
            if isinstance(move, str):
                later = ((play.chance, play.steps, play.reward) for play in self.plays(policy, move))
            else:
                later = ((chance, (), reward) for chance, reward in _ends(move))
            yield from (Play(p * chance, ((state, index), *steps), reward) for chance, steps, reward in later if p * chance)

    def sample(self, policy: Probabilities, rng: random.Random, state: str = "") -> Play:
        """One play from `state` (the root)."""
        move: Move = state or self.root
        chance, steps = 1.0, list[tuple[str, int]]()
        while isinstance(move, str):
            index = rng.choices(range(len(self.moves[move])), weights=policy[move])[0]
            chance *= policy[move][index]
            steps.append((move, index))
            move = self.moves[move][index]
        ends = _ends(move)
        last, reward = rng.choices(ends, weights=[p for p, _ in ends])[0]
        return Play(chance * last, tuple(steps), reward)

    def rollout(self, play: Play, policy: Probabilities, *, rollout_id: str, task_id: str, parent: str = "", boundaries: bool = False) -> Rollout:
        """The play as the records that a generator would have made with `policy`."""
        turns = tuple(self._record(play, position, policy) for position in range(len(play.steps)))
        kept = tuple(Boundary(turn=record.turn, context_hash=record.context_hash, state_hash=record.state_hash, snapshot=record.state_hash.encode())
                     for record in turns if boundaries)
        return Rollout(rollout_id=rollout_id, task_id=task_id, turns=turns, boundaries=kept, parent=parent)

    def context(self, state: str) -> Tokens:
        return (self.number[state],)

    def token_logprobs(self, state: str, index: int, policy: Probabilities) -> tuple[float, ...]:
        """log pi of each token of an action, given the tokens before it."""
        action = self.actions[state][index]
        heads = [sum(p for other, p in zip(self.actions[state], policy[state], strict=True) if other[:length] == action[:length])
                 for length in range(len(action) + 1)]
        return tuple(math.log(heads[length + 1] / heads[length]) for length in range(len(action)))

    def _record(self, play: Play, position: int, policy: Probabilities) -> TurnRecord:
        state, index = play.steps[position]
        last = position + 1 == len(play.steps)
        context = self.context(state)
        return TurnRecord(
            turn=self.turn[state], context_ids=context, context_hash=context_hash(context), response_ids=self.actions[state][index],
            engine_logprobs=self.token_logprobs(state, index, policy), weight_version=0, seed=0, temperature=1.0, finish_reason="stop",
            observation="" if last else play.steps[position + 1][0], reward=play.reward if last else 0.0, state_hash=state)


def _ends(end: float | Coin) -> list[tuple[float, float]]:
    """(probability, reward) of an end."""
    if isinstance(end, Coin):
        return [(chance, reward) for chance, reward in ((end.chance, 1.0), (1.0 - end.chance, 0.0)) if chance]
    return [(1.0, float(end))]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
