"""An environment that is named by its file: found, checked, and part of what makes a run what it is."""

import pickle

import pytest

from rtpo_ray import environments
from rtpo_ray.config import hash_config, load_config
from rtpo_ray.errors import ConfigError

MINE = '''
import random
from rtpo_ray.environments.base import Environment, Observation, Step

class Deep:
    pass

class Mine(Environment):
    def __init__(self, size: int = 2):
        super().__init__()
        if size > 9:
            raise RuntimeError("nine is plenty")
        self.size, self.deep = size, Deep()

    def reset(self, seed):
        self.rng = random.Random(seed)
        return Observation(f"0 or {self.rng.randrange(self.size)}?")

    def step(self, text):
        return Step(reward=1.0, terminated=True)
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "my_world.py"
    path.write_text(MINE)
    return path


def test_it_is_built_with_its_arguments_and_its_snapshots_travel(mine):
    config = load_config(None, [f"environment.path={mine}:Mine", "environment.args.size=5"])
    world = environments.build(config.environment)
    assert (type(world).__name__, world.size, world.reset(3).text) == ("Mine", 5, "0 or 1?")
    other = environments.build(config.environment)
    other.restore(pickle.loads(pickle.dumps(world.snapshot())))
    assert type(other.deep) is type(world.deep) and other.state_hash() == world.state_hash()


def test_its_source_is_part_of_the_configurations_hash(mine):
    config = load_config(None, [f"environment.path={mine}:Mine"])
    before = hash_config(config)
    mine.write_text(MINE.replace("reward=1.0", "reward=0.5"))
    assert hash_config(config) != before


@pytest.mark.parametrize(("overrides", "message"), [
    (["environment.path={mine}"], r"field environment\.path is '.*my_world.py'; expected file.py:Class"),
    (["environment.path=nowhere.py:Mine"], r"field environment\.path is 'nowhere.py:Mine': no file nowhere.py in "),
    (["environment.path={mine}:Deep"], r"defines no class Deep that extends rtpo_ray\.environments\.base\.Environment"),
    (["environment.path={mine}:Mine", "environment.args.sizes=3"], r"unknown field environment\.args\.sizes for environment '.*:Mine'; valid: size"),
    (["environment.path={mine}:Mine", "environment.args.size=10"], r"environment\.args .* of '.*:Mine': RuntimeError: nine is plenty"),
])
def test_what_is_wrong_with_it_is_said_at_once(mine, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override.format(mine=mine) for override in overrides])
