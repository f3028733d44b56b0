"""What fields of the configuration ask of each other, of method, environment and files, and of the machine. Everything raises ConfigError."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rtpo_ray import algorithms, environments
from rtpo_ray.data import find_files
from rtpo_ray.errors import ConfigError, DataError
from rtpo_ray.options import PLAIN
from rtpo_ray.secrets import conceal, named

if TYPE_CHECKING:
    from rtpo_ray.config import Config, DataConfig, RunConfig

DATA_CPUS = 1  # logical CPUs that Ray Data's own tasks need beside learner and generators


def check_together(config: Config) -> None:
    """Fields that exclude each other."""
    sampling, generators = config.sampling, config.generators
    _check_algorithm(config)
    _check_environment_args(config, _here(config))
    _check_chat(config)
    if config.learner.lora_rank and _here(config) and importlib.util.find_spec("peft") is None:
        raise ConfigError(f"field learner.lora_rank is {config.learner.lora_rank}, which needs peft: pip install 'rtpo-ray[lora]'")
    if not config.run.name.isprintable() or not config.run.name or "/" in config.run.name or config.run.name.startswith("."):
        raise ConfigError(f"field run.name is {config.run.name!r}; expected a plain folder name")
    if config.warm_start.noise > 1:
        raise ConfigError(f"field warm_start.noise is {config.warm_start.noise}; expected a probability in [0, 1]")
    for name in ("beta1", "beta2"):
        if getattr(config.learner, name) >= 1:
            raise ConfigError(f"field learner.{name} is {getattr(config.learner, name)}; expected a share in [0, 1)")
    if config.warm_start.hidden % 32:
        raise ConfigError(f"field warm_start.hidden is {config.warm_start.hidden}; expected a multiple of 32, the width of an attention head")
    if 0 < generators.max < generators.min:
        raise ConfigError(f"field generators.max is {generators.max}; expected 0 or at least generators.min ({generators.min})")
    if generators.gpu_memory_utilization > 1:
        raise ConfigError(f"field generators.gpu_memory_utilization is {generators.gpu_memory_utilization}; expected a share in (0, 1]")
    if (config.learner.gpus > 0) != (generators.gpus > 0):
        raise ConfigError(f"field learner.gpus is {config.learner.gpus:g} and generators.gpus is {generators.gpus:g}; expected both above 0 or "
                          "both 0, since weights are broadcast among GPUs or among CPUs")
    if not config.learner.gpus and not config.learner.cpus:
        raise ConfigError("field learner.cpus is 0 and so is learner.gpus; expected one of them above 0")
    if config.weights.probe_tokens > generators.max_model_len // 2:
        raise ConfigError(f"field weights.probe_tokens is {config.weights.probe_tokens}; expected at most half of generators.max_model_len "
                          f"({generators.max_model_len})")
    if sampling.temperature > 2:
        raise ConfigError(f"field sampling.temperature is {sampling.temperature}; expected at most 2")
    if sampling.max_response_tokens >= generators.max_model_len:
        raise ConfigError(f"field sampling.max_response_tokens is {sampling.max_response_tokens}; expected less than "
                          f"generators.max_model_len ({generators.max_model_len}), which also holds the context")
    if config.weights.probe_tokens >= generators.max_model_len:
        raise ConfigError(f"field weights.probe_tokens is {config.weights.probe_tokens}; expected less than "
                          f"generators.max_model_len ({generators.max_model_len}), which also holds the context")
    if generators.max_model_len > config.learner.micro_batch_tokens:
        raise ConfigError(f"field learner.micro_batch_tokens is {config.learner.micro_batch_tokens}; expected at least "
                          f"generators.max_model_len ({generators.max_model_len}), or the longest sample would not fit")


def _check_chat(config: Config) -> None:
    """What the chat template is asked for."""
    model, environment = config.model, config.environment
    if environment.thoughts == "strip" and environment.context == "append":
        raise ConfigError("field environment.thoughts is 'strip' and environment.context is 'append', which keeps what was sampled; expected "
                          "environment.context=template, window or summary, or environment.thoughts=template")
    ours = ("conversation", "messages", "tools", "add_generation_prompt", "tokenize", "chat_template")
    if taken := [name for name in model.template_args if name in ours]:
        raise ConfigError(f"field model.template_args.{taken[0]} is set by the run; expected arguments of the chat template's own")
    if not model.path and (model.tool_calls not in ("auto", "hermes") or environment.tools_in != "template"):
        raise ConfigError(f"field model.tool_calls is {model.tool_calls!r} and environment.tools_in is {environment.tools_in!r}, but model.path is "
                          "empty: the tiny model is taught hermes calls and its chat template shows the tools; set model.path")


def _check_algorithm(config: Config) -> None:
    """Build the method once: it knows what is valid."""
    name, args = config.algorithm.name, dict(config.algorithm.args)
    try:
        algorithms.find(name)
    except ValueError as error:
        raise ConfigError(f"field algorithm.name is {error}") from error
    try:
        method = algorithms.make(name, args)
        method.check(config.environment.max_turns)
    except ValueError as error:
        raise ConfigError(f"field algorithm.args.{error}") from error
    except Exception as error:  # a user's method may raise anything; the cause is chained
        raise ConfigError(f"field algorithm.args is {args}: {name} raised {type(error).__name__}: {error}") from error
    try:
        algorithms.check(method, config.environment.max_turns)
    except Exception as error:  # as above
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"field algorithm.name is {name!r}: {kind}{error}") from error


def _check_environment_args(config: Config, here: bool) -> None:
    """Build the environment once: its constructor knows what is valid. `here`: whether it will run on this machine, with its secrets."""
    environment = config.environment
    name = environment.path or environment.name
    try:
        cls = environments.find(environment)
    except ValueError as error:
        raise ConfigError(f"field environment.path is {error}") from error
    parameters = inspect.signature(cls).parameters
    for key, value in environment.args.items():
        if key not in parameters:
            raise ConfigError(f"unknown field environment.args.{key} for environment {name!r}; valid: {', '.join(parameters)}")
        hint = str(parameters[key].annotation)
        if hint in PLAIN and type(value) not in PLAIN[hint]:
            raise ConfigError(f"field environment.args.{key} is {value!r}; expected {hint}")
    if not here and any(variable not in os.environ for variable in named(dict(environment.args))):
        return
    try:
        built = environments.build(environment)
        try:
            built.check(environment.max_turns)
        finally:
            built.close()
    except FileNotFoundError as error:
        if not here:
            return
        raise ConfigError(f"environment.args of {name!r}: {conceal(str(error), dict(environment.args))}") from error
    except Exception as error:  # a user's constructor may raise anything; the cause is chained
        kind = "" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: "
        message = conceal(f"{kind}{error}", dict(environment.args))
        raise ConfigError(f"environment.args {dict(environment.args)} of {name!r}: {message}") from error
    _check_data(config.data, config.run, name, built.fields)
    if built.longest_wait > environment.step_timeout:
        raise ConfigError(f"field environment.step_timeout is {environment.step_timeout:g}, but what {name!r} waits for in a step may take "
                          f"{built.longest_wait:g} s by its own deadlines; raise it above that, or lower those")


def _check_data(data: DataConfig, run: RunConfig, name: str, fields: Sequence[str]) -> None:
    """Whether the tasks come from where the environment looks for them. The files themselves may be on another machine."""
    if not fields:
        if data.train or data.held_out:
            which = "train" if data.train else "held_out"
            raise ConfigError(f"field data.{which} is {data.train or data.held_out!r}, but environment {name!r} makes its tasks from seeds and reads "
                              "no file; leave the section data out")
        return
    if not (data.train or data.held_out):
        raise ConfigError(f"field data.train is empty, but environment {name!r} reads {', '.join(fields)} of every task from files; name them")
    for key in data.fields:
        if key not in fields:
            raise ConfigError(f"unknown field data.fields.{key}: environment {name!r} reads {', '.join(fields)}")
    if run.eval_tasks and not data.held_out and not data.held_out_share:
        raise ConfigError("field data.held_out is empty and data.held_out_share is 0, so there is nothing to evaluate on; set one of them, or "
                          "run.eval_tasks=0")


def check_branching(config: Config) -> None:
    """Whether siblings can start where the method wants them to."""
    environment = config.environment
    missing = any(variable not in os.environ for variable in named(dict(environment.args)))
    if not algorithms.build(config.algorithm).branching or (missing and not _here(config)):
        return
    try:
        built = environments.build(environment)
    except FileNotFoundError:  # elsewhere, or said already
        return
    try:
        reason = built.branching_error()
    finally:
        built.close()
    if reason:
        name = environment.path or environment.name
        raise ConfigError(f"environment.args {dict(environment.args)} of {name!r}, with algorithm.name={config.algorithm.name}: "
                          f"{conceal(reason, dict(environment.args))}")


def check_files(config: Config, learn: bool) -> None:
    """Whether the files are there that training, or an evaluation alone, reads."""
    data = config.data
    if learn and data.held_out and not data.train:
        raise ConfigError(f"field data.train is empty; expected files to train on beside data.held_out ({data.held_out!r})")
    if data.held_out and data.held_out_share:
        raise ConfigError(f"field data.held_out_share is {data.held_out_share:g} beside data.held_out ({data.held_out!r}), where it would do "
                          "nothing; set one of them")
    wanted = {"train": data.train if learn or not data.held_out else "", "held_out": data.held_out if config.run.eval_tasks else ""}
    found: dict[str, list[str]] = {}
    for name, files in wanted.items():
        if files and _here(config):
            try:
                found[name] = find_files(f"data.{name}", files)
            except DataError as error:
                raise ConfigError(str(error)) from error
    if both := set(found.get("train", [])) & set(found.get("held_out", [])):
        raise ConfigError(f"field data.held_out is {data.held_out!r}: {sorted(both)[0]} is among the files of data.train too; held-out tasks must "
                          "not be trained on. Name other files, or set data.held_out_share instead")


def _here(config: Config) -> bool:
    """Whether the run will be on this machine, with its files and secrets."""
    return not (config.cluster.address or os.environ.get("RAY_ADDRESS"))


def check_placement(config: Config, learn: bool) -> None:
    """On a local cluster the sizes are known before Ray starts; on a real one `actors.cluster` checks again.

    Not part of `Config`'s own checks: the defaults must exist on every machine, for --help and for tests.
    """
    learner, generators = config.learner, config.generators
    if not _here(config):
        return
    cpus = config.cluster.local_cpus or os.cpu_count() or 1
    need = learn * learner.ranks * learner.cpus + generators.min * generators.cpus + DATA_CPUS
    if need > cpus:
        raise ConfigError(
            f"field learner.ranks is {learner.ranks} (x {learner.cpus:g} CPUs) and generators.min is {generators.min} "
            f"(x {generators.cpus:g} CPUs): with {DATA_CPUS} for Ray Data, {need:g} CPUs do not fit the local cluster's {cpus}; "
            "lower one of them or raise cluster.local_cpus")
