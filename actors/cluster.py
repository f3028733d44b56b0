"""From a configuration to a running set of actors: connect to Ray, check that it fits, wire the coordinator."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import ray.data
from ray.util.placement_group import get_placement_group, remove_placement_group

from actors.coordinator import Coordinator
from actors.evaluator import Evaluator, Event
from actors.gang import LEARNERS, LearnerGang
from actors.publisher import AsLoaded, WeightPublisher
from actors.spawn import spawn_pool
from actors.telemetry import RunTelemetry
from actors.waiting import Doing, here, on_node, wait_for, wait_for_end
from actors.watchdog import watched
from pipelines.tasks import TaskSource, source_of
from rtpo_ray import algorithms, environments
from rtpo_ray.checks import DATA_CPUS
from rtpo_ray.config import Config
from rtpo_ray.errors import ConfigError, CoordinatorLost
from rtpo_ray.ledger import Ledger, Progress

# A machine with few cores keeps few idle workers, and starting one costs as much as a stage of the tiny model.
KEEP_WORKERS = {"num_workers_soft_limit": 8, "idle_worker_killing_time_threshold_ms": 600_000}


@contextmanager
def connect(config: Config, *later: Config, learn: bool = True) -> Iterator[None]:
    """A connection to the configured cluster, or a local one that ends with the block. Raises ConfigError when a run cannot fit.

    `later`: of further runs on the same cluster. `learn`: whether learner ranks will be started too.
    """
    address = config.cluster.address or os.environ.get("RAY_ADDRESS", "")
    if address:
        ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR)
    else:
        ray.init(address="local", num_cpus=config.cluster.local_cpus or os.cpu_count(), include_dashboard=config.cluster.dashboard,
                 log_to_driver=True, logging_level=logging.ERROR, _system_config=KEEP_WORKERS)
    try:
        for one in (config, *later):
            check_placement(one, ray.cluster_resources(), learn)
        yield
    finally:
        ray.shutdown()


def check_placement(config: Config, resources: dict[str, float], learn: bool = True) -> None:
    """Whether learner and generators fit the whole cluster, unless that can grow. Raises ConfigError with what is missing."""
    if config.cluster.autoscaling:
        return
    learner, generators = config.learner, config.generators
    for kind, each_rank, each_generator, data in (("CPU", learner.cpus, generators.cpus, DATA_CPUS), ("GPU", learner.gpus, generators.gpus, 0)):
        need, have = learn * learner.ranks * each_rank + generators.min * each_generator + data, resources.get(kind, 0)
        if need > have:
            raise ConfigError(f"field learner.ranks is {learner.ranks} (x {each_rank:g} {kind}) and generators.min is {generators.min} "
                              f"(x {each_generator:g} {kind}): with {data} for Ray Data, {need:g} {kind}s do not fit the cluster's {have:g}")


def run_events(config: Config, model_path: str, folder: str, reason: str = "") -> Iterator[Event]:
    """Train on the connected cluster; the coordinator's events as they happen. Raises the first error of whoever failed.

    `reason`: why the run in `folder` goes on; empty when it begins. A coordinator that dies is started again and goes on likewise.
    """
    in_vain, last = 0, Progress(sweep=-1)  # deaths of the coordinator that the run went on from at one and the same point
    while True:
        _await_end_of_last_run(config.cluster.start_timeout)
        coordinator = _spawn_root(CoordinatorActor, "rtpo-coordinator", config, model_path)
        events = coordinator.run.options(num_returns="streaming").remote(folder, reason)
        try:
            for ref in watched(coordinator, events, config.cluster.lost_after, longest_step(config), config.cluster.start_timeout):
                with root_cause():
                    event = ray.get(ref, timeout=60)
                yield event
            return
        except (ray.exceptions.RayActorError, CoordinatorLost) as error:  # of the coordinator, or of the pool that it owns
            ray.kill(coordinator)
            wait_for_end(["rtpo-*"], config.cluster.start_timeout)  # or it might still write to the ledger
            with Ledger(folder) as ledger:
                point = ledger.resume_point
            in_vain, last = (in_vain + 1 if point == last else 1), point
            if in_vain > config.cluster.restarts:
                raise
            reason = f"the coordinator was lost: {str(error).strip().splitlines()[0]}"
        finally:
            ray.kill(coordinator)


def longest_step(config: Config) -> float:
    """Seconds within which the deadlines of all that one step waits for have passed, tries and replacements included."""
    return (4 * config.sampling.stage_timeout + 2 * config.learner.timeout + 20 * config.weights.timeout + 4 * config.cluster.start_timeout)


def _await_end_of_last_run(timeout: float) -> None:
    wait_for_end(["rtpo-*"], timeout)
    try:
        remove_placement_group(get_placement_group(LEARNERS))
    except ValueError:  # there was no run on this cluster before, or it is removed already
        return


def evaluate(config: Config, model_path: str) -> Event:
    """One evaluation of the model as it is."""
    evaluator = _spawn_root(EvaluatorActor, "rtpo-evaluator", config, model_path)
    with root_cause():
        event: Event = wait_for(evaluator.event.remote(), 2 * config.sampling.stage_timeout + config.cluster.start_timeout, "the evaluation")
        return event


@contextmanager
def root_cause() -> Iterator[None]:
    """Raise what went wrong itself, out of the remote errors that carried it here."""
    try:
        yield
    except ray.exceptions.RayError as error:
        cause: BaseException = error
        while isinstance(cause, ray.exceptions.RayError) and (inner := getattr(cause, "cause", None) or cause.__cause__) is not None:
            cause = inner
        if cause is error:
            raise
        raise cause from error


def _spawn_root(actor: type, name: str, config: Config, model_path: str) -> Any:
    """The one actor that the driver owns. It makes its collaborators in its own process, so they end when it ends."""
    return ray.remote(actor).options(
        name=name, num_cpus=0, max_restarts=0, max_concurrency=2, scheduling_strategy=here(),
        runtime_env={"env_vars": {"RAY_DATA_LOG_LEVEL": "ERROR"}},
    ).remote(config, model_path)


class CoordinatorActor:
    """Makes the coordinator and its collaborators when it is told to run, so that what fails then is raised to the driver as itself."""

    def __init__(self, config: Config, model_path: str) -> None:
        self._config, self._model_path, self._doing = config, model_path, Doing("waiting to be told to run")

    def __repr__(self) -> str:
        return f"Coordinator({self._config.algorithm.name}, {self._config.run.name}{on_node()})"

    def run(self, folder: str, reason: str) -> Iterator[Event]:
        """The events of the whole run, or of the rest of it."""
        telemetry = RunTelemetry(self._config.run.name)
        self._doing = Doing("starting the generators and the learner")
        coordinator = build_coordinator(self._config, self._model_path)
        self._doing = coordinator.doing
        for event in coordinator.run(folder, reason):
            telemetry.observe(event)
            yield event


    def doing(self) -> tuple[str, float]:
        """What it is at, and for how many seconds; answers beside `run`."""
        return self._doing.what, self._doing.seconds


class EvaluatorActor(CoordinatorActor):
    """The same for an evaluation alone, by generators that keep the weights that they loaded."""

    def __repr__(self) -> str:
        return f"Evaluator({self._config.environment.path or self._config.environment.name}{on_node()})"

    def event(self) -> Event:
        quiet_ray_data()
        tasks = tasks_of(self._config)
        tasks.held_out(1)  # reads the files, before anyone starts who would wait for them
        pool, _ = spawn_pool(self._config, self._model_path)
        return next(Evaluator(config=self._config, pool=pool, publisher=AsLoaded(pool), tasks=tasks).evaluate(0, 0))


def build_coordinator(config: Config, model_path: str) -> Coordinator:
    """A coordinator with a pool, a gang and a publisher of its own."""
    quiet_ray_data()
    start = config.cluster.start_timeout
    algorithm, tasks = algorithms.build(config.algorithm), tasks_of(config)
    first = tasks.training(0, 1)[0]  # reads the files, before anyone starts who would wait for them
    pool, filling = spawn_pool(config, model_path)
    gang = LearnerGang(config, model_path, algorithm.objective)  # loads while the engines start
    wait_for(filling, start + 60, "the first generators to start")
    example = wait_for(pool.members.remote(), config.cluster.patience, "the generator pool's members")[0].generator
    publisher = WeightPublisher(
        gang, pool, config.weights, temperature=config.sampling.temperature, device="cuda" if config.generators.gpus else "cpu",
        start_timeout=start, patience=config.cluster.patience,
        probe_context=wait_for(example.first_context.remote(first), start, "a first context"))
    return Coordinator(config=config, algorithm=algorithm, pool=pool, gang=gang, publisher=publisher, tasks=tasks)


def tasks_of(config: Config) -> TaskSource:
    """Where the configured tasks come from, with what is read of their files on the coordinator's node."""
    home = ray.get_runtime_context().get_node_id() if config.generators.resource else ""
    environment = environments.build(config.environment)
    environment.close()
    return source_of(config, environment.fields, home)


def quiet_ray_data() -> None:
    """No progress bars: a run has four executions a sweep. (Its log level is set where the actor is spawned.) And a step's own
    error instead of "UDF failed": that wrapper loses its cause on the way to the driver."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.target_max_block_size = None  # a block that it splits could tear the rows of a group apart
    context.raise_original_map_exception = True
