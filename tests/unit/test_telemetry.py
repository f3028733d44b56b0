"""Metrics of a run, written down instead of sent; and that the provisioned dashboard asks for metrics that exist."""

import json
import re
from pathlib import Path

import pytest

from actors import telemetry

DASHBOARD = Path(__file__).parents[2] / "conf" / "cluster" / "grafana.json"


class Kept:
    """A gauge or counter: value by tags."""

    made = {}

    def __init__(self, name, doc, tag_keys):
        assert doc and name not in self.made, name
        self.keys, self.values = set(tag_keys), {}
        self.made[name] = self

    def set(self, value, tags):
        assert set(tags) == self.keys
        self.values[tuple(tags.values())] = value

    def inc(self, value, tags):
        self.set(self.values.get(tuple(tags.values()), 0) + value, tags)


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    monkeypatch.setattr(Kept, "made", {})
    monkeypatch.setattr(telemetry, "Gauge", Kept)
    monkeypatch.setattr(telemetry, "Counter", Kept)
    return Kept.made


STAGE = {"kind": "stage", "sweep": 3, "turn": 1, "success": 0.5, "zero_advantage_rate": None, "weight_version": 7, "generated_tokens": 100,
         "failed": {"E: x": 2, "E: y": 1}, "seconds": {"generate": 1.5, "learn": 2.0}}


def test_events_become_metrics_by_run_and_turn(kept):
    shown = telemetry.RunTelemetry("r")
    shown.observe(STAGE)
    shown.observe({**STAGE, "turn": None, "success": 0.75, "failed": {}})
    shown.observe({"kind": "eval", "sweep": 4, "success": 0.25, "weight_version": 8, "failed": {"E: x": 1}})
    shown.observe({"kind": "resume", "sweep": 4, "weight_version": 8})
    assert kept["rtpo_success"].values == {("r", "stage", "1"): 0.5, ("r", "stage", ""): 0.75, ("r", "eval", ""): 0.25}
    assert kept["rtpo_zero_advantage_rate"].values == {}
    assert kept["rtpo_seconds"].values[("r", "stage", "1", "generate")] == 1.5
    assert kept["rtpo_generated_tokens"].values == {("r",): 200.0} and kept["rtpo_lost_rollouts"].values == {("r",): 4.0}
    assert kept["rtpo_resumed"].values == {("r",): 1.0}


def test_the_pool_shows_every_state_also_the_empty_ones(kept):
    shown = telemetry.PoolTelemetry("r")
    shown.observe(["starting", "serving", "gone"], {"g0": ("serving", 4), "g1": ("serving", 3), "g2": ("gone", 2)}, 5, {"pool": 0.5})
    assert kept["rtpo_loop_lag_seconds"].values == {("r", "pool"): 0.5}
    assert kept["rtpo_generators"].values == {("r", "starting"): 0, ("r", "serving"): 2, ("r", "gone"): 1}
    assert kept["rtpo_generator_weight_version"].values == {("r", "g0"): 4, ("r", "g1"): 3, ("r", "g2"): -1}
    assert kept["rtpo_queue_depth"].values == {("r",): 5}


def test_the_dashboard_asks_for_metrics_that_exist(kept):
    telemetry.RunTelemetry("r")
    telemetry.PoolTelemetry("r")
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for panel in panels for target in panel["targets"] for name in re.findall(r"ray_(rtpo_\w+)", target["expr"])}
    assert asked and {name.removesuffix("_total") for name in asked} <= set(kept)
    assert set(kept) - {name.removesuffix("_total") for name in asked} <= {"rtpo_clip_fraction", "rtpo_grad_norm"}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels) and len({panel["id"] for panel in panels}) == len(panels)
