"""Generators and their pool as they are spawned from a configuration.

Ray imports an actor's module in every process that holds a handle of it, so this one imports torch, transformers and vllm only
inside the generator's own process.
"""

from __future__ import annotations

from typing import Any

import ray

from actors.gang import custom_resource, thread_variables
from actors.generator import Generator
from actors.pool import GeneratorPool, PoolLimits
from actors.waiting import here
from rtpo_ray.config import Config
from rtpo_ray.engines.base import Engine
from rtpo_ray.engines.vllm import VllmEngine
from rtpo_ray.episodes.contexts import chat_template
from rtpo_ray.episodes.episode import environment_maker, episode_settings
from rtpo_ray.network import use_interface_of
from rtpo_ray.secrets import conceal


def spawn_pool(config: Config, model_path: str) -> tuple[Any, ray.ObjectRef]:
    """The pool, and a reference that is ready when its generators are."""
    generators = config.generators
    limits = PoolLimits(least=generators.min, most=max(generators.min, generators.max), each=generators.max_num_seqs,
                        start_timeout=config.cluster.start_timeout, lost_after=generators.lost_after + 4 * config.weights.timeout)
    pool = ray.remote(GeneratorPool).options(name="rtpo-generator-pool", num_cpus=0, max_concurrency=1000, scheduling_strategy=here()).remote(
        GeneratorSpawner(config, model_path), limits, draining_nodes, config.run.name)
    return pool, pool.fill.remote(0, generators.min)


def draining_nodes() -> list[str]:
    """Ids of the nodes that were told to go, by a pre-emption notice or the autoscaler. Ray's own libraries ask it in this way."""
    from ray._private.state import state

    return list(state.get_draining_nodes())


class GeneratorSpawner:
    """Makes generator actors by name; pickled into the pool."""

    def __init__(self, config: Config, model_path: str) -> None:
        self._config, self._model_path = config, model_path

    def __call__(self, name: str) -> Any:
        generators = self._config.generators
        return ray.remote(GeneratorActor).options(
            name=name, num_cpus=generators.cpus, num_gpus=generators.gpus, resources=custom_resource(generators.resource), max_restarts=0,
            max_concurrency=1000, runtime_env={"env_vars": thread_variables(generators.threads)}).remote(name, self._config, self._model_path)


class GeneratorActor(Generator):
    """A generator on a vLLM engine."""

    def __init__(self, name: str, config: Config, model_path: str) -> None:
        use_interface_of(ray.util.get_node_ip_address())  # before the engine opens a group of its own
        generators = config.generators

        def make_engine() -> Engine:
            return VllmEngine(
                model_path, dtype=config.model.dtype, max_model_len=generators.max_model_len, max_num_seqs=generators.max_num_seqs,
                kv_cache_mb=generators.kv_cache_mb, gpu_memory_utilization=generators.gpu_memory_utilization, threads=generators.threads)

        template = chat_template(config, model_path)
        super().__init__(
            name=name, make_engine=make_engine, make_environment=environment_maker(config, template), template=template,
            settings=episode_settings(config), overlong=config.sampling.overlong, concurrency=4 * generators.max_num_seqs,
            slots=generators.max_num_seqs,
            conceal=lambda text: conceal(text, dict(config.environment.args)))
