"""Environments of other projects' packages, each against the real package; and what they share."""

import collections
import logging
import random
import re
import subprocess
import sys
import threading

import numpy
import pytest

from rtpo_ray.config import EnvironmentConfig
from rtpo_ray.environments import REGISTRY, adapters, build
from rtpo_ray.environments.adapters import Gem, ReasoningGym, TextArena
from rtpo_ray.environments.base import Observation, Step
from rtpo_ray.environments.foreign import GlobalRandom, optional, state_hash
from rtpo_ray.errors import GraderError


def global_states():
    state = numpy.random.get_state(legacy=True)
    return random.getstate(), state[1].tolist(), state[2:]


def assert_siblings_agree(make, moves):
    """A sibling that copies the trunk's state, and one that replays its responses, go on as the trunk did; nobody touches the global generators."""
    trunk = make()
    first = trunk.reset(7)
    states, snapshots, steps = [], [], []
    for move in moves:
        states.append(trunk.state_hash())
        snapshots.append(trunk.snapshot())
        steps.append(trunk.step(move))
        random.random()  # other code draws meanwhile
        numpy.random.random()
    assert len(set(states)) == len(moves)
    for turn in range(len(moves)):
        sibling = make()
        sibling.restore(snapshots[turn])
        assert sibling.state_hash() == states[turn]
        assert [sibling.step(move) for move in moves[turn:]] == steps[turn:]
    before, replayed = global_states(), make()
    assert replayed.reset(7) == first
    for move, state, step in zip(moves, states, steps, strict=True):
        assert (replayed.state_hash(), replayed.step(move)) == (state, step)
    assert global_states() == before
    replayed.reset(8)
    assert replayed.state_hash() != states[0]
    return steps


def solve(environment, low, high, form):
    """Play number guessing to the end; the last step."""
    environment.reset(3)
    while True:
        guess = (low + high) // 2
        step = environment.step(form.format(guess))
        if step.observation is None:
            return step
        low, high = (guess + 1, high) if "higher" in step.observation.text else (low, guess - 1)


def test_gem():
    pytest.importorskip("gem")
    steps = assert_siblings_agree(Gem, ["\\boxed{1}", "I say \\boxed{9}.", "\\boxed{9}"])
    assert steps[0].observation == Observation("At turn 1, you guessed 1, and the target number is higher than 1.\nEnter your next guess.")
    assert Gem().replay is False
    last = solve(Gem("game:GuessTheNumber-v0-hard"), 1, 50, "\\boxed{{{}}}")
    assert (last.reward, last.terminated) == (1.0, True)
    lost = Gem(options={"max_turns": 1, "min_number": 5, "max_number": 6})
    assert "between 5 and 6 (inclusive) within 1 turns" in lost.reset(0).text
    assert lost.step("I do not know.").reward == pytest.approx(-0.1)


def test_gem_leaves_logging_alone_and_refuses_what_it_does_not_know():
    pytest.importorskip("gem")
    script = ("import logging\nfrom rtpo_ray.environments.adapters import Gem\nGem()\n"
              "assert (logging.root.handlers, logging.root.level) == ([], logging.WARNING), logging.root.handlers")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr
    with pytest.raises(ValueError, match="Environment game:Nothing not found"):
        Gem("game:Nothing")
    assert logging.root.level == logging.WARNING


def test_a_gem_environment_that_cannot_be_pickled_is_replayed(monkeypatch):
    pytest.importorskip("gem")
    import gem
    from gem.envs.game_env.guess_the_number import GuessTheNumberEnv

    class Locked(GuessTheNumberEnv):
        def reset(self, seed=None):
            self.lock = threading.Lock()
            return super().reset(seed)

    monkeypatch.setitem(gem.envs.registration.ENV_REGISTRY, "locked", gem.envs.registration.EnvSpec("locked", Locked))
    assert (Gem("locked").replay, Gem("locked", replay=False).replay) == (True, False)


def test_textarena():
    pytest.importorskip("textarena")
    steps = assert_siblings_agree(TextArena, ["I say [3].", "[19]", "nothing"])
    assert steps[0].observation == Observation("The target number is higher.")
    assert steps[2].observation.text.startswith("You attempted an invalid move.")
    last = solve(TextArena("GuessTheNumber-v0"), 1, 20, "[{}]")
    assert (last.reward, last.terminated) == (1.0, True)


def test_a_game_of_textarena_that_draws_at_random_in_every_step():
    pytest.importorskip("textarena")
    steps = assert_siblings_agree(lambda: TextArena("2048-v0"), ["[up]", "[left]", "[down]", "[right]", "[up]"])
    assert len({step.observation.text for step in steps}) == 5


def test_interleaved_episodes_are_what_they_are_alone():
    pytest.importorskip("textarena")
    moves = ["[up]", "[left]", "[down]", "[right]"] * 5

    def boards(world, seed):
        yield world.reset(seed).text
        for move in moves:
            yield world.step(move).observation.text

    alone = [list(boards(TextArena("2048-v0"), seed)) for seed in (1, 2)]
    together = list(zip(*(boards(TextArena("2048-v0"), seed) for seed in (1, 2)), strict=True))
    assert [list(told) for told in zip(*together, strict=True)] == alone
    threaded: list[list[str]] = [[], []]
    threads = [threading.Thread(target=lambda seed=seed: threaded[seed - 1].extend(boards(TextArena("2048-v0"), seed))) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert threaded == alone
    assert alone[0] != alone[1]


def test_textarena_refuses_games_for_several():
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match="game is 'TicTacToe-v0'; expected one for a single player: The number of players has to be 2"):
        TextArena("TicTacToe-v0").check(3)
    with pytest.raises(ValueError, match="Environment Nothing-v0 not found"):
        TextArena("Nothing-v0").check(3)


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    world = ReasoningGym(options={"min_terms": 2, "max_terms": 2})
    question = world.reset(5)
    terms = question.text.removeprefix("State the final answer to the following arithmetic problem: ").removesuffix(" =")
    right = eval(terms, {"__builtins__": {}})  # a sum of numbers
    assert world.step(f"It is <answer>0</answer> or <answer>{right}</answer>.").reward == 1.0
    assert world.reset(5) == question
    assert world.step(f" {right}\n").reward == 1.0  # without the tags: the whole response
    world.reset(5)
    last = world.step("<answer>no</answer>")
    assert (last.reward, last.terminated, last.observation) == (0.0, True, None)
    assert world.reset(6) != question


def test_reasoning_gym_may_be_asked_several_times():
    pytest.importorskip("reasoning_gym")

    def make():
        return ReasoningGym("chain_sum", tries=3)

    steps = assert_siblings_agree(make, ["<answer>no</answer>", "never", "<answer></answer>"])
    assert [step.observation for step in steps] == [Observation("That is not right. Try again.")] * 2 + [None]
    world = make()
    world.reset(1)
    world.step("no")
    assert world.step(world.item["answer"]) == Step(reward=1.0, terminated=True)
    with pytest.raises(ValueError, match="3 tries need 3 turns, but environment.max_turns is 2"):
        world.check(2)


@pytest.mark.parametrize("score", [ZeroDivisionError("no"), float("nan"), 2.0, None])
def test_a_scorer_that_fails_is_no_wrong_answer(monkeypatch, score):
    pytest.importorskip("reasoning_gym")
    world = ReasoningGym()
    world.reset(0)

    def score_answer(answer, entry):
        if isinstance(score, Exception):
            raise score
        return score

    monkeypatch.setattr(world.scorer, "score_answer", score_answer)
    with pytest.raises(GraderError, match="the scorer of 'chain_sum' (failed|gave) .*on seed 0, answer '5'"):
        world.step("5")


@pytest.mark.parametrize(("name", "module", "install"), [
    ("bfcl", "bfcl_eval", "--no-deps bfcl-eval"), ("gem", "gem", "--no-deps gem-llm"), ("textarena", "textarena", "'rtpo-ray[textarena]'"),
    ("reasoning-gym", "reasoning_gym", "'rtpo-ray[reasoning-gym]'")])
def test_a_missing_package_is_named_with_what_to_install(monkeypatch, name, module, install):
    adapters._pickles.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    assert name in REGISTRY
    with pytest.raises(ValueError, match=rf"{module} cannot be imported .*; install it with: pip install {re.escape(install)}$"):
        build(EnvironmentConfig(name=name))


def test_global_generators_are_given_back_even_after_a_failure():
    mine, before = GlobalRandom(1), global_states()
    drawn = []
    for _ in range(2):
        with pytest.raises(KeyError), mine.installed():
            drawn.append((random.random(), numpy.random.random()))
            raise KeyError
    assert global_states() == before
    other = GlobalRandom(1)
    with other.installed():
        assert [(random.random(), numpy.random.random()) for _ in range(2)] == drawn
    assert state_hash(mine) == state_hash(other) != state_hash(GlobalRandom(1))


def test_an_episode_that_keeps_the_global_generators_is_told_of(monkeypatch):
    monkeypatch.setattr("rtpo_ray.environments.foreign._PATIENCE", 0.05)
    with GlobalRandom(1).installed():
        with pytest.raises(TimeoutError, match="another episode has kept the global random generators for 0.05 s"), GlobalRandom(2).installed():
            pass
    with GlobalRandom(2).installed():
        pass


class Node:
    def __init__(self, name, parent=None):
        self.name, self.parent, self.children, self.stamp = name, parent, {}, random.random()
        if parent:
            parent.children[name] = self


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def tree(names):
    root = Node("root")
    for name in names:
        Node(name, root)
    return root


def test_state_hashes_take_cycles_and_see_every_difference():
    assert state_hash(tree("ab"), without=("stamp",)) == state_hash(tree("ba"), without=("stamp",))
    assert state_hash(tree("ab")) != state_hash(tree("ab"))
    values = [1, 1.5, True, "1", b"1", None, [1], {1}, {1: 2}, {"1": 2}, collections.deque([2]), numpy.arange(3), numpy.arange(2000), Slotted(1), int,
              random.Random(1), random.Random(2), tree("a"), tree("b"), numpy.float64(3)]
    assert len(set(map(state_hash, values))) == len(values)
    assert state_hash(Slotted(1)) != state_hash(Slotted(2))
    changed = numpy.arange(2000)
    changed[1000] = 0
    assert state_hash(changed) != state_hash(numpy.arange(2000))


def test_optional_says_what_is_broken_inside():
    with pytest.raises(ValueError, match=r"no_such_package cannot be imported \(No module named 'no_such_package'\); install it with"):
        optional("no_such_package", "some")
