"""From a configuration to a running set of actors: connect to Ray, check that it fits, wire the coordinator."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.data

from actors.coordinator import Coordinator
from actors.evaluator import Evaluator, Event
from actors.gang import LearnerGang
from actors.publisher import AsLoaded, WeightPublisher
from actors.spawn import spawn_pool
from rtpo_ray import algorithms
from rtpo_ray.config import DATA_CPUS, Config
from rtpo_ray.errors import ConfigError

# A machine with few cores keeps few idle workers, and starting one costs as much as a stage of the tiny model.
KEEP_WORKERS = {"num_workers_soft_limit": 8, "idle_worker_killing_time_threshold_ms": 600_000}


@contextmanager
def connect(config: Config) -> Iterator[None]:
    """A connection to the configured cluster, or a local one that ends with the block. Raises ConfigError when the run cannot fit."""
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    if address:
        ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
    else:
        ray.init(address="local", num_cpus=config.cluster.local_cpus or os.cpu_count(), include_dashboard=config.cluster.dashboard,
                 log_to_driver=True, logging_level=logging.ERROR, _system_config=KEEP_WORKERS)
    try:
        check_placement(config, ray.cluster_resources())
        yield
    finally:
        ray.shutdown()


def check_placement(config: Config, resources: dict[str, float]) -> None:
    """Whether learner and generators fit the whole cluster. Raises ConfigError with what is missing."""
    learner, generators = config.learner, config.generators
    for kind, each_rank, each_generator, data in (("CPU", learner.cpus, generators.cpus, DATA_CPUS), ("GPU", learner.gpus, generators.gpus, 0)):
        need, have = learner.ranks * each_rank + generators.count * each_generator + data, resources.get(kind, 0)
        if need > have:
            raise ConfigError(f"field learner.ranks is {learner.ranks} (x {each_rank:g} {kind}) and generators.count is {generators.count} "
                              f"(x {each_generator:g} {kind}): with {data} for Ray Data, {need:g} {kind}s do not fit the cluster's {have:g}")


def run_events(config: Config, model_path: str, folder: str) -> Iterator[Event]:
    """Train on the connected cluster; the coordinator's events as they happen. Raises the first error of whoever failed."""
    coordinator = _spawn_root(CoordinatorActor, "rtpo-coordinator", config, model_path)
    with root_cause():
        for ref in coordinator.run.options(num_returns="streaming").remote(folder):
            yield ray.get(ref)


def evaluate(config: Config, model_path: str) -> Event:
    """One evaluation of the model as it is."""
    evaluator = _spawn_root(EvaluatorActor, "rtpo-evaluator", config, model_path)
    with root_cause():
        event: Event = ray.get(evaluator.event.remote(), timeout=2 * config.sampling.stage_timeout + config.cluster.start_timeout)
        return event


@contextmanager
def root_cause() -> Iterator[None]:
    """Raise what went wrong itself, from the chain of remote errors that carried it here."""
    try:
        yield
    except ray.exceptions.RayError as error:
        cause: BaseException = error
        while (inner := getattr(cause, "cause", None) or cause.__cause__) is not None and inner is not cause:
            cause = inner
        if cause is error:
            raise
        raise cause from error


def _spawn_root(actor: type, name: str, config: Config, model_path: str) -> Any:
    """The one actor that the driver owns. It makes its collaborators in its own process, so they end when it ends."""
    return ray.remote(actor).options(
        name=name, num_cpus=0, max_restarts=0, max_concurrency=2, runtime_env={"env_vars": {"RAY_DATA_LOG_LEVEL": "ERROR"}},
    ).remote(config, model_path)


class CoordinatorActor(Coordinator):
    """A coordinator with a pool, a gang and a publisher of its own."""

    def __init__(self, config: Config, model_path: str) -> None:
        quiet_ray_data()
        algorithm = algorithms.build(config.algorithm)
        pool, filling = spawn_pool(config, model_path)
        gang = LearnerGang(config, model_path, algorithm.objective)  # loads while the engines start
        ray.get(filling, timeout=config.cluster.start_timeout + 60)
        example = ray.get(pool.members.remote(), timeout=30)[0].generator
        publisher = WeightPublisher(
            gang, pool, config.weights, temperature=config.sampling.temperature, device="cuda" if config.generators.gpus else "cpu",
            probe_context=ray.get(example.example_context.remote(), timeout=config.cluster.start_timeout))
        super().__init__(config=config, algorithm=algorithm, pool=pool, gang=gang, publisher=publisher)


class EvaluatorActor(Evaluator):
    """An evaluator with a pool of its own, whose generators keep the weights that they loaded."""

    def __init__(self, config: Config, model_path: str) -> None:
        quiet_ray_data()
        pool, _ = spawn_pool(config, model_path)
        super().__init__(config=config, pool=pool, publisher=AsLoaded(pool))

    def event(self) -> Event:
        return next(self.evaluate(0))


def quiet_ray_data() -> None:
    """No progress bars: a run has four executions a sweep. (Its log level is set where the actor is spawned.) And a step's own
    error instead of "UDF failed": that wrapper loses its cause on the way to the driver."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.raise_original_map_exception = True
