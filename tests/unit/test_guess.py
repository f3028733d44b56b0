"""Number guessing: deterministic under its seed, restorable, and as hard as its optimum says."""

import functools
import random

import pytest

from rtpo_ray.config import Config, EnvironmentConfig, WarmStartConfig
from rtpo_ray.environments import REGISTRY
from rtpo_ray.environments.base import Observation, Step
from rtpo_ray.environments.guess import Guess
from rtpo_ray.episodes.contexts import ChatTemplate
from rtpo_ray.policy import tiny


def started(seed=1, **options):
    game = Guess(**options)
    game.reset(seed)
    return game


def hiding(secret, **options):
    """The first game with this secret."""
    return started(seed_of(secret), **options)


def seed_of(secret):
    return next(seed for seed in range(1000) if started(seed).secret == secret)


def play(game, seed, rng_seed=0, noise=0.0):
    """Responses, final reward and malformed calls of a demonstrated game."""
    rng, texts, malformed = random.Random(rng_seed), [], 0
    game.reset(seed)
    while True:
        texts.append(game.demonstrate(rng, noise))
        step = game.step(texts[-1])
        malformed += step.info.get("malformed_calls", 0)
        if step.observation is None:
            return texts, step.reward, malformed


def test_it_is_registered_and_opens_with_the_range():
    assert REGISTRY["guess"] is Guess
    assert Guess().reset(0) == Observation("Find a number from 1 to 15.", role="user")
    assert Guess(numbers=7).reset(0).text == "Find a number from 1 to 7."
    assert Guess().tools() == [] and Guess.instant


def test_the_seed_decides_the_secret_and_every_number_comes_up():
    games = [started(seed) for seed in range(400)]
    assert [game.secret for game in games] == [started(seed).secret for seed in range(400)]
    counts = [sum(game.secret == number for game in games) for number in range(1, 16)]
    assert sum(counts) == 400 and min(counts) > 10
    assert games[0].state_hash() == started(0).state_hash() != started(1).state_hash()


def test_wrong_guesses_are_answered_with_where_the_secret_is():
    game = hiding(6)
    for text, said, left in (("8", "lower", (1, 7)), (" 4\n", "higher", (5, 7)), ("2", "higher", (5, 7))):
        assert game.step(text) == Step(observation=Observation(said, role="user"), info={"malformed_calls": 0})
        assert (game.low, game.high) == left
    assert game.step("6") == Step(reward=1.0, terminated=True)


def test_the_last_wrong_guess_ends_the_game():
    game = hiding(6, guesses=2)
    game.step("8")
    assert game.step("5") == Step(terminated=True, info={"malformed_calls": 0})
    game = hiding(6, guesses=1)
    assert game.step("what?") == Step(terminated=True, info={"malformed_calls": 1})
    assert hiding(6, guesses=1).step("6") == Step(reward=1.0, terminated=True)


@pytest.mark.parametrize("text", ["", "seven", "0", "16", "07", "-3", "+3", "3.0", "3 4", "1_0", "\u0663", "\u00b2", "7.", "9" * 5000, "3\x00"])
def test_what_is_no_number_of_the_range_uses_a_guess_up(text):
    game = hiding(3, guesses=3)
    step = game.step(text)
    assert step == Step(observation=Observation("not a number from 1 to 15"), info={"malformed_calls": 1})
    assert (game.low, game.high, game.taken) == (1, 15, 1)
    game.step(text)
    assert game.step("3").reward == 1.0


@functools.cache
def most_found(possible, guesses):
    """Most secrets of the tuple that any policy finds: every guess, and every answer that may follow, is tried."""
    if not possible or not guesses:
        return 0
    tried = []
    for guess in range(possible[0] - 1, possible[-1] + 2):  # numbers outside teach nothing and are tried too
        lower, higher = (tuple(n for n in possible if n < guess), tuple(n for n in possible if n > guess))
        tried.append((guess in possible) + most_found(lower, guesses - 1) + most_found(higher, guesses - 1))
    return max(tried)


@pytest.mark.parametrize("guesses", [1, 2, 3, 4])
@pytest.mark.parametrize("numbers", [2, 3, 4, 5, 7, 8, 11, 15, 16])
def test_the_optimum_is_what_the_best_of_all_policies_reaches_and_so_do_demonstrations(numbers, guesses):
    game = Guess(numbers=numbers, guesses=guesses)
    assert game.optimum == pytest.approx(most_found(tuple(range(1, numbers + 1)), guesses) / numbers)
    won = set()
    for seed in range(40 * numbers):
        _, reward, malformed = play(game, seed)
        won |= {game.secret} if reward else set()
        assert malformed == 0 and (reward == 1.0 or game.optimum < 1)
    assert len(won) / numbers == pytest.approx(game.optimum)


@pytest.mark.parametrize(("numbers", "guesses", "optimum"), [(15, 4, 1.0), (15, 3, 7 / 15), (31, 3, 7 / 31), (100, 7, 1.0), (2, 1, 0.5)])
def test_optima_by_value(numbers, guesses, optimum):
    assert Guess(numbers=numbers, guesses=guesses).optimum == optimum


def test_a_demonstration_bisects_from_the_lower_middle():
    for secret, texts in ((1, ["8", "4", "2", "1"]), (8, ["8"]), (11, ["8", "12", "10", "11"]), (15, ["8", "12", "14", "15"])):
        assert play(Guess(), seed_of(secret))[:2] == (texts, 1.0)
    assert started(numbers=4).demonstrate(random.Random(0), 0.0) == "2"


@pytest.mark.parametrize("noise", [0.3, 1.0])
def test_noise_guesses_at_random_mostly_from_the_whole_range(noise):
    game, rng, count = hiding(15), random.Random(1), 4000
    game.step("7")
    said = [int(game.demonstrate(rng, noise)) for _ in range(count)]
    assert set(said) == set(range(1, 16))
    impossible = sum(number <= 7 for number in said) / count
    assert impossible == pytest.approx(noise * 0.75 * 7 / 15, abs=0.03)
    assert said.count(11) / count == pytest.approx(1 - noise + noise * (0.75 / 15 + 0.25 / 8), abs=0.03)
    assert play(game, 3, rng_seed=5, noise=noise) == play(game, 3, rng_seed=5, noise=noise)


def test_snapshots_and_replays_give_the_same_state_and_the_same_future():
    trunk = hiding(6)
    texts = ["9", "no", "3"]
    for text in texts:
        trunk.step(text)
    copied, replayed = Guess(), hiding(6)
    copied.restore(trunk.snapshot())
    for text in texts:
        replayed.step(text)
    assert copied.state_hash() == replayed.state_hash() == trunk.state_hash()
    assert (copied.low, copied.high, copied.taken) == (4, 8, 3)
    copied.step("5")
    assert copied.state_hash() != trunk.state_hash() and trunk.step("6").reward == 1.0


@pytest.mark.parametrize(("options", "message"), [
    ({"numbers": 1}, "numbers is 1; expected at least 2"), ({"guesses": 0}, "guesses is 0; expected at least 1")])
def test_games_that_cannot_be_played_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Guess(**options)


def test_too_few_turns_are_named():
    Guess(guesses=4).check(4)
    with pytest.raises(ValueError, match=r"4 guesses need 4 turns, but environment\.max_turns is 3"):
        Guess(guesses=4).check(3)


@pytest.mark.parametrize("noise", [0.0, 0.6])
def test_the_tiny_model_is_warm_started_on_whole_games(noise):
    made = Config(warm_start=WarmStartConfig(vocab=320, noise=noise),
                  environment=EnvironmentConfig(name="guess", args={"numbers": 15, "guesses": 4}, max_turns=4))
    template = ChatTemplate(tiny.build_tokenizer(made))
    for index in range(20):
        script = list(tiny._script(made, index, noise))
        ids, mask = tiny.demonstration(made, template, index, noise)
        said = template.tokenizer.decode([token for token, action in zip(ids, mask, strict=True) if action])
        assert said.split("<|im_end|>")[:-1] == [action for _, _, action in script] and len(script) <= 4
        turns = "".join(f"<|im_start|>user\n{observation.text}<|im_end|>\n<|im_start|>assistant\n{action}<|im_end|>\n"
                        for _, observation, action in script)
        assert template.tokenizer.decode(ids) == turns.removesuffix("\n")
        assert noise or int(script[-1][2]) == script[-1][0].secret
