"""The environment contract: state hashes, snapshots, and tools made from methods."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from rtpo_ray.environments.base import Environment, Observation, Step, ToolEnvironment, ToolError, Toolset, tool
from rtpo_ray.episodes.toolcalls import format_hermes

ROOT = Path(__file__).parents[2]


class Shop(ToolEnvironment):
    def __init__(self):
        super().__init__()
        self.sold = []

    @tool
    def sell(self, item: str, count: int, price: float = 1.0, gift: bool = False) -> str:
        """Sell something.

        Args:
            item: what
            count: how many
            price: of one
            gift: wrapped
        """
        if item == "nothing":
            raise RuntimeError("the shop burnt down")
        self.sold.append((item, count, price, gift))
        return f"sold {count} {item}"

    def helper(self) -> str:
        return "not a tool"

    def answer(self, text):
        return Step(reward=float(text == "bye"), terminated=True)


def test_tools_become_schemas():
    (schema,) = Shop().tools()
    function = schema["function"]
    assert (function["name"], function["description"]) == ("sell", "Sell something.")
    assert {name: spec["type"] for name, spec in function["parameters"]["properties"].items()} == {
        "item": "string", "count": "integer", "price": "number", "gift": "boolean"}
    assert function["parameters"]["required"] == ["item", "count"]
    assert "return" not in function


@pytest.mark.parametrize(("name", "arguments", "text"), [
    ("sell", {"item": "egg", "count": 2}, None),
    ("sell", {"item": "egg", "count": 2, "price": 3}, None),  # an int is a number
    ("buy", {}, "error: no tool named 'buy'; there is sell"),
    ("helper", {}, "error: no tool named 'helper'; there is sell"),
    ("sell", {"item": "egg"}, "error: sell: missing a required argument: 'count'"),
    ("sell", {"item": "egg", "count": 2, "colour": 1}, "error: sell: got an unexpected keyword argument 'colour'"),
    ("sell", {"item": 7, "count": 2}, "error: sell: argument 'item' is 7; expected str"),
    ("sell", {"item": "egg", "count": "2"}, "error: sell: argument 'count' is \"2\"; expected int"),
    ("sell", {"item": "egg", "count": True}, "error: sell: argument 'count' is true; expected int"),
    ("sell", {"item": "egg", "count": 2, "gift": 1}, "error: sell: argument 'gift' is 1; expected bool"),
])
def test_calls_that_do_not_fit_become_observations(name, arguments, text):
    shop = Shop()
    step = shop.step(format_hermes(name, arguments))
    assert step.observation == Observation(text or "sold 2 egg", role="tool")
    assert (step.reward, step.terminated, step.info) == (0.0, False, {"tool_calls": 1, "malformed_calls": int(text is not None), "failed_calls": 0})
    assert len(shop.sold) == (text is None)


def test_several_calls_run_in_order_and_an_answer_ends_the_episode():
    shop = Shop()
    egg, tea = (format_hermes("sell", {"item": item, "count": count}) for item, count in (("egg", 1), ("tea", 2)))
    step = shop.step(egg + "<tool_call>x</tool_call>" + tea)
    assert step.observation.text.splitlines()[::2] == ["sold 1 egg", "sold 2 tea"]
    assert step.info == {"tool_calls": 3, "malformed_calls": 1, "failed_calls": 0}
    assert shop.step(" bye\n") == Step(reward=1.0, terminated=True)
    assert shop.step("hello").reward == 0.0


def test_a_tool_that_raises_is_not_disguised_as_a_malformed_call():
    with pytest.raises(RuntimeError, match="burnt down"):
        Shop().step(format_hermes("sell", {"item": "nothing", "count": 1}))


def state(**attributes):
    environment = Environment()
    environment.__dict__.update(attributes)
    return environment.state_hash()


class Plain:
    def __init__(self, value):
        self.value = value


def test_equal_states_have_equal_hashes_and_others_do_not():
    same = [dict(a={"x": 1, "y": [2, (3,)]}, b={"u", "v"}, c=Plain(1)), dict(c=Plain(1), b={"v", "u"}, a={"y": [2, (3,)], "x": 1})]
    assert state(**same[0]) == state(**same[1])
    values = [1, 2, "1", [1], {1}, ["1,2"], ["1", "2"], None, Plain(1), Plain(2), b"1", {"1": 2}, {1: 2}, random.Random(1), random.Random(2)]
    assert len({state(a=value) for value in values} | {state(b=1)}) == len(values) + 1


def test_state_hashes_are_equal_in_every_process():
    script = ("from rtpo_ray.environments.base import Environment\n"
              "e = Environment(); e.names = {'ab', 'cd', 'ef', 'gh'}; e.by = {name: len(name) for name in e.names}; print(e.state_hash())")
    hashes = set()
    for seed in (1, 2):
        variables = {"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, check=True)
        hashes.add(done.stdout)
    assert len(hashes) == 1


def test_a_snapshot_is_independent_of_what_follows_and_restores_many_times():
    shop = Shop()
    shop.rng.seed(5)
    shop.sold.append("kept")
    snapshot, before = shop.snapshot(), shop.state_hash()
    future = shop.rng.random()
    shop.sold.append("later")
    shop.extra = 1
    for _ in range(2):
        shop.restore(snapshot)
        assert (shop.sold, shop.state_hash(), hasattr(shop, "extra")) == (["kept"], before, False)
        assert shop.rng.random() == future
        shop.sold.append("again")


class Counter(Toolset):
    """Counts; its process is no part of its state."""

    def __init__(self):
        self.count, self.process, self.closed = 0, object(), 0

    def __getstate__(self):
        return {"count": self.count}

    @tool
    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: which
        """
        if number < 0:
            raise ToolError(f"{number} is negative")
        self.count += number
        return str(self.count)

    def close(self):
        self.closed += 1


class Market(Shop):
    def __init__(self):
        super().__init__()
        self.toolsets = (Counter(),)


def test_toolsets_are_tools_beside_its_own_and_part_of_the_state():
    market = Market()
    assert [schema["function"]["name"] for schema in market.tools()] == ["sell", "add"]
    before = market.state_hash()
    assert market.step(format_hermes("add", {"number": 4})).observation.text == "4"
    after, snapshot = market.state_hash(), market.snapshot()
    market.step(format_hermes("add", {"number": 1}) + format_hermes("sell", {"item": "egg", "count": 1}))
    assert len({before, after, market.state_hash()}) == 3
    fresh = Market()
    fresh.restore(snapshot)
    assert (fresh.state_hash(), fresh.toolsets[0].count, fresh.sold) == (after, 4, [])
    assert market.step(format_hermes("buy", {})).observation.text == "error: no tool named 'buy'; there is sell, add"
    market.close()
    assert market.toolsets[0].closed == 1


def test_a_failed_call_is_an_observation_and_counted_apart_from_malformed_ones():
    step = Market().step(format_hermes("add", {"number": -1}) + format_hermes("add", {"number": "1"}) + format_hermes("add", {"number": 1}))
    assert step.observation.text.splitlines() == ["error: add: -1 is negative", 'error: add: argument \'number\' is "1"; expected int', "1"]
    assert step.info == {"tool_calls": 3, "malformed_calls": 1, "failed_calls": 1}


def test_the_row_of_data_and_the_format_of_calls_are_given_and_no_state():
    market = Market()
    before = market.state_hash()
    market.row, market.calls = {"question": "?"}, "hermes"
    snapshot = market.snapshot()
    assert market.state_hash() == before
    other = Market()
    other.row = {"question": "another"}
    other.restore(snapshot)
    assert other.row == {"question": "another"}
