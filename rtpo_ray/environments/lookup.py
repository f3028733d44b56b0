"""Questions that take several look-ups: "Who is the boss of the friend of Ada?" over a knowledge base that is new in every task.

The knowledge base maps every (entity, relation) to a random entity, so nothing can be known without the tool, and every hop
needs the answer of the one before. The reward is 1 for the right entity in the answer turn and 0 otherwise.
"""

from __future__ import annotations

import random

from rtpo_ray.environments.base import Observation, Step, ToolEnvironment, tool
from rtpo_ray.episodes.toolcalls import format_hermes

NAMES = ("Ada", "Ben", "Cai", "Dan", "Eva", "Fay", "Gus", "Hal", "Ida", "Jon", "Kim", "Lea", "Max", "Ned", "Ola", "Pia",
         "Quin", "Ray", "Sam", "Tom", "Uma", "Val", "Wes", "Xia", "Yan", "Zoe")
RELATIONS = ("boss", "friend", "owner", "guest")


class Lookup(ToolEnvironment):
    """Args:
    hops: look-ups that a question needs.
    entities: size of a task's knowledge base, taken at random from the 26 known names; a guess is right once in so many.
    relations: how many of the 4 relations are in use.
    replay: branch by replaying recorded responses instead of copying the state.
    budget: look-ups that an episode allows, failed ones included; 0: any number.
    """

    instant = True
    constant = ("facts",)

    def __init__(self, hops: int = 2, entities: int = 8, relations: int = 4, replay: bool = False, budget: int = 0) -> None:
        super().__init__()
        if hops < 1:
            raise ValueError(f"hops is {hops}; expected at least 1")
        if not 2 <= entities <= len(NAMES):
            raise ValueError(f"entities is {entities}; expected 2 to {len(NAMES)}")
        if not 1 <= relations <= len(RELATIONS):
            raise ValueError(f"relations is {relations}; expected 1 to {len(RELATIONS)}")
        if budget < 0:
            raise ValueError(f"budget is {budget}; expected at least 0 (no limit)")
        self.hops, self.n_entities, self.relations, self.budget, self.replay = hops, entities, RELATIONS[:relations], budget, replay
        self.facts: dict[str, dict[str, str]] = {}
        self.path: tuple[str, ...] = ()
        self.start = ""
        self.seen: list[str] = []  # results of the look-ups so far, for the demonstrations
        self.spent = 0  # of the budget

    def check(self, max_turns: int) -> None:
        if max_turns < self.hops + 1:
            raise ValueError(f"{self.hops} hops need {self.hops + 1} turns with the answer, but environment.max_turns is {max_turns}")
        if self.budget and self.budget < self.hops:
            raise ValueError(f"{self.hops} hops need {self.hops} look-ups, but budget is {self.budget}")

    def reset(self, seed: int) -> Observation:
        self.rng = random.Random(seed)
        names = self.rng.sample(NAMES, self.n_entities)
        self.facts = {name: {relation: self.rng.choice(names) for relation in self.relations} for name in names}
        self.path = tuple(self.rng.choice(self.relations) for _ in range(self.hops))
        self.start, self.seen, self.spent = self.rng.choice(names), [], 0
        chain = " of the ".join(reversed(self.path))
        return Observation(f"Who is the {chain} of {self.start}?")

    @property
    def gold(self) -> str:
        """The right answer."""
        entity = self.start
        for relation in self.path:
            entity = self.facts[entity][relation]
        return entity

    @tool
    def lookup(self, entity: str, relation: str) -> str:
        """Look one fact up.

        Args:
            entity: whose
            relation: which
        """
        if self.budget:
            if self.spent == self.budget:
                return "no look-ups left"
            self.spent += 1
        if entity not in self.facts:
            return f"no entity {entity}"
        if relation not in self.relations:
            return f"no relation {relation}"
        found = self.facts[entity][relation]
        self.seen.append(found)
        return found

    def answer(self, text: str) -> Step:
        return Step(reward=float(text == self.gold), terminated=True)

    def demonstrate(self, rng: random.Random, noise: float) -> str:
        """The right next action, or with probability `noise` a wrong one: the other end of the chain is read first ("boss of the friend"
        starts with boss), the entity is wrong, or the answer comes too early."""
        wrong = rng.random() < noise
        done = len(self.seen)
        if done >= self.hops:
            return rng.choice(list(self.facts)) if wrong else self.seen[-1]
        entity = self.seen[-1] if self.seen else self.start
        relation = self.path[done]
        if wrong:
            (kind,) = rng.choices(("order", "entity", "answer"), weights=(4, 4, 2))
            if kind == "answer":
                return rng.choice(list(self.facts))
            entity = rng.choice(list(self.facts)) if kind == "entity" else entity
            relation = self.path[-1 - done] if kind == "order" else relation
        return format_hermes("lookup", {"entity": entity, "relation": relation})
