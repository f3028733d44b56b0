"""The look-up environment: deterministic under its seed, restorable, fair."""

import random

import pytest

from rtpo_ray.environments.lookup import NAMES, RELATIONS, Lookup
from rtpo_ray.episodes.toolcalls import format_hermes


def ask(entity, relation):
    return format_hermes("lookup", {"entity": entity, "relation": relation})


def play(environment, seed, rng_seed=0, noise=0.0, turns=20):
    """Observations, final reward and number of turns of a demonstrated episode."""
    rng, texts = random.Random(rng_seed), [environment.reset(seed).text]
    for turn in range(turns):
        step = environment.step(environment.demonstrate(rng, noise))
        if step.terminated:
            return texts, step.reward, turn + 1
        texts.append(step.observation.text)
    return texts, 0.0, turns


def test_the_seed_decides_everything():
    first, again, other = Lookup(hops=3), Lookup(hops=3), Lookup(hops=3)
    assert play(first, 7) == play(again, 7)
    assert first.state_hash() == again.state_hash()
    assert (first.facts, first.path, first.start) == (again.facts, again.path, again.start)
    play(other, 8)
    assert other.facts != first.facts and other.state_hash() != first.state_hash()
    assert play(other, 7) == play(first, 7)  # an environment can be used again


def test_a_task_is_a_complete_knowledge_base_and_its_question_follows_the_path():
    environment = Lookup(hops=2, entities=5, relations=3)
    question = environment.reset(3).text
    assert len(environment.facts) == 5 and set(environment.facts) <= set(NAMES)
    assert all(tuple(facts) == RELATIONS[:3] and set(facts.values()) <= set(environment.facts) for facts in environment.facts.values())
    one, two = environment.path
    assert question == f"Who is the {two} of the {one} of {environment.start}?"
    assert environment.gold == environment.facts[environment.facts[environment.start][one]][two]


def test_the_right_answer_is_rewarded_and_no_other():
    environment = Lookup(hops=2)
    for name in [*NAMES, "", "ada", "Ada."]:
        environment.reset(11)
        step = environment.step(name)
        assert (step.terminated, step.observation, step.reward) == (True, None, float(name == environment.gold))


def test_following_the_path_by_look_ups_reaches_the_answer():
    environment = Lookup(hops=3)
    environment.reset(5)
    entity = environment.start
    for relation in environment.path:
        step = environment.step(ask(entity, relation))
        assert (step.reward, step.terminated, step.observation.role) == (0.0, False, "tool")
        assert step.info == {"tool_calls": 1, "malformed_calls": 0, "failed_calls": 0}
        entity = step.observation.text
    assert entity == environment.gold
    assert environment.step(f" {entity}\n").reward == 1.0


@pytest.mark.parametrize(("response", "text", "calls", "malformed"), [
    (ask("Nobody", "boss"), "no entity Nobody", 1, 0),  # well formed, and told what is wrong
    ("<tool_call>{}</tool_call>", 'error: tool call needs exactly the keys "name" and "arguments"', 1, 1),
    ("<tool_call>look up Ada", "error: <tool_call> is not closed by </tool_call>", 1, 1),
    ("Ada</tool_call>", "error: </tool_call> without <tool_call>", 1, 1),
    (format_hermes("search", {"q": "Ada"}), "error: no tool named 'search'; there is lookup", 1, 1),
    (format_hermes("lookup", {"entity": "Ada"}), "error: lookup: missing a required argument: 'relation'", 1, 1),
    (format_hermes("lookup", {"entity": 3, "relation": "boss"}), "error: lookup: argument 'entity' is 3; expected str", 1, 1),
    (format_hermes("lookup", {"entity": "A", "relation": "boss", "x": 1}), "error: lookup: got an unexpected keyword argument 'x'", 1, 1),
    ("<tool_call>1</tool_call><tool_call>{</tool_call>", None, 2, 2),
])
def test_malformed_calls_become_observations_and_are_counted(response, text, calls, malformed):
    environment = Lookup()
    environment.reset(1)
    step = environment.step(response)
    assert (step.terminated, step.truncated, step.reward, step.observation.role) == (False, False, 0.0, "tool")
    assert step.info == {"tool_calls": calls, "malformed_calls": malformed, "failed_calls": 0}
    if text is not None:
        assert step.observation.text == text
    assert environment.seen == []


def test_an_unknown_relation_is_told():
    environment = Lookup(relations=2)
    environment.reset(1)
    assert environment.step(ask(environment.start, "guest")).observation.text == "no relation guest"


def test_a_snapshot_gives_the_same_state_and_the_same_future_and_siblings_are_independent():
    trunk = Lookup(hops=3)
    trunk.reset(9)
    trunk.step(ask(trunk.start, trunk.path[0]))
    snapshot, state = trunk.snapshot(), trunk.state_hash()
    siblings = [Lookup(hops=3) for _ in range(3)]
    for sibling in siblings:
        sibling.restore(snapshot)
        assert sibling.state_hash() == state
    siblings[0].step(ask(siblings[0].seen[-1], siblings[0].path[1]))
    siblings[0].facts[siblings[0].start]["boss"] = "Zoe"
    assert siblings[0].state_hash() != state
    assert {siblings[1].state_hash(), siblings[2].state_hash(), trunk.state_hash()} == {state}
    futures = [(one.demonstrate(random.Random(1), 0.0), one.rng.random(), one.gold) for one in (trunk, siblings[1], siblings[2])]
    assert futures[0] == futures[1] == futures[2]


def test_replaying_the_responses_gives_the_same_state_as_copying():
    trunk = Lookup(hops=2)
    trunk.reset(4)
    texts = [ask(trunk.start, trunk.path[0]), "<tool_call>x</tool_call>"]
    for text in texts:
        trunk.step(text)
    replayed = Lookup(hops=2)
    replayed.reset(4)
    for text in texts:
        replayed.step(text)
    assert replayed.state_hash() == trunk.state_hash()
    assert replayed.rng.random() == trunk.rng.random()


@pytest.mark.parametrize("hops", [1, 2, 5])
def test_demonstrations_without_noise_always_succeed_in_the_fewest_turns(hops):
    environment = Lookup(hops=hops)
    outcomes = [play(environment, seed, rng_seed=seed)[1:] for seed in range(100)]
    assert outcomes == [(1.0, hops + 1)] * 100


@pytest.mark.parametrize("noise", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("done", [0, 2])
def test_demonstrated_actions_are_wrong_about_as_often_as_asked(done, noise):
    """A wrong action may be right by accident: rarely among 26 entities, more often when it is about the relation."""
    environment, rng, right, count = Lookup(hops=2, entities=26), random.Random(1), 0, 600
    for seed in range(count):
        environment.reset(seed)
        for _ in range(done):
            environment.step(environment.demonstrate(rng, 0.0))
        right += environment.demonstrate(rng, noise) == environment.demonstrate(rng, 0.0)
    accident = 0.3 if done < 2 else 0.04
    assert 1 - noise - 0.06 < right / count < 1 - noise + accident * noise + 0.06


def test_the_same_random_stream_gives_the_same_demonstration():
    assert play(Lookup(), 1, rng_seed=5, noise=0.5) == play(Lookup(), 1, rng_seed=5, noise=0.5)


def test_too_few_turns_are_hopeless():
    Lookup(hops=2).check(3)
    with pytest.raises(ValueError, match=r"2 hops need 3 turns with the answer, but environment\.max_turns is 2"):
        Lookup(hops=2).check(2)


def test_a_budget_ends_the_look_ups_but_not_the_episode():
    environment = Lookup(hops=2, budget=3)
    environment.reset(4)
    start, (first, second) = environment.start, environment.path
    for text in (ask(start, first), ask("Nobody", first)):
        assert environment.step(text).observation.text != "no look-ups left"
    assert environment.step("<tool_call>x</tool_call>").info["malformed_calls"] == 1  # never ran, so it costs nothing
    two = environment.step(ask(environment.seen[0], second) + ask(start, first))
    assert two.observation.text == f"{environment.gold}\nno look-ups left" and two.info == {"tool_calls": 2, "malformed_calls": 0, "failed_calls": 0}
    state, seen = environment.state_hash(), list(environment.seen)
    assert environment.step(ask(start, first)).observation.text == "no look-ups left"
    assert (environment.state_hash(), environment.seen) == (state, seen)
    assert environment.step(environment.gold).reward == 1.0
    environment.reset(4)
    assert environment.step(ask(start, first)).observation.text == seen[0]  # a new episode has its budget again


def test_without_a_budget_look_ups_never_end_and_leave_no_trace():
    environment = Lookup()
    environment.reset(4)
    state = environment.state_hash()
    for _ in range(50):
        assert environment.step(ask("Nobody", "boss")).observation.text == "no entity Nobody"
    assert environment.state_hash() == state


def test_a_budget_is_part_of_the_state_and_of_its_snapshots():
    trunk = Lookup(budget=2)
    trunk.reset(9)
    fresh = trunk.state_hash()
    trunk.step(ask("Nobody", "boss"))
    assert trunk.state_hash() != fresh
    sibling = Lookup(budget=2)
    sibling.restore(trunk.snapshot())
    answers = [sibling.step(ask("Nobody", "boss")).observation.text for _ in range(2)]
    assert answers == ["no entity Nobody", "no look-ups left"] and trunk.spent == 1


def test_a_budget_below_the_hops_is_hopeless():
    Lookup(hops=2, budget=2).check(3)
    Lookup(hops=2, budget=0).check(3)
    with pytest.raises(ValueError, match="2 hops need 2 look-ups, but budget is 1"):
        Lookup(hops=2, budget=1).check(3)
    with pytest.raises(ValueError, match="budget is -1; expected at least 0"):
        Lookup(budget=-1)


@pytest.mark.parametrize("hops", [1, 3])
def test_demonstrations_succeed_within_the_smallest_budget(hops):
    environment = Lookup(hops=hops, budget=hops)
    assert {play(environment, seed)[1:] for seed in range(50)} == {(1.0, hops + 1)}
