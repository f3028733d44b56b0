"""The configuration: one dataclass a section, one home for each default (the field itself).

`load_config(path, overrides)` reads YAML and dotted overrides through OmegaConf and raises `ConfigError` with the field, the
value and what is valid. Nothing here imports torch, vllm or ray, so a mistake is reported at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rtpo_ray import algorithms, checks, environments
from rtpo_ray.algorithms.base import Algorithm
from rtpo_ray.episodes.toolcalls import FORMATS
from rtpo_ray.errors import ConfigError
from rtpo_ray.options import complaint, opt
from rtpo_ray.plugins import source_of

# What a resumed run may change: where and how it computes, how long and how often it reports, and nothing that decides what it learns.
FREE = ("run.name", "run.root", "run.resume", "run.experiment", "run.sweeps", "run.tokens", "run.eval_every", "run.eval_every_tokens",
        "run.eval_tasks", "run.eval_samples", "run.eval_greedy", "run.checkpoint_every", "run.state_every", "run.keep_states", "run.overlap",
        "run.timeline", "run.aim", "cluster.",
        "environment.step_timeout",
        "sampling.chunk_groups", "sampling.in_order", "sampling.retries", "sampling.concurrency", "sampling.stage_timeout",
        "generators.min", "generators.max", "generators.release", "generators.lost_after",
        "generators.cpus", "generators.gpus", "generators.resource", "generators.threads", "generators.max_num_seqs", "generators.kv_cache_mb",
        "generators.gpu_memory_utilization", "learner.ranks", "learner.cpus", "learner.gpus", "learner.resource",
        "learner.threads", "learner.micro_batch_tokens", "learner.share_prefixes", "learner.recompute", "learner.compile", "learner.max_refused",
        "learner.timeout", "weights.", "warm_start.cache")



@dataclass(kw_only=True)
class RunConfig:
    name: str = opt("run", "folder of this run under run.root")
    root: str = opt("runs", "folder of all runs; on a cluster a shared path")
    seed: int = opt(0, "decides tasks, environment seeds and sampling seeds", least=0)
    resume: bool = opt(False, "go on with the run of this name if it has begun, as a job that is submitted again does")
    experiment: str = opt("", "experiment in Aim; empty: the run's name")
    sweeps: int = opt(10, "batches of tasks to train on, at most", least=0)
    tokens: int = opt(0, "generated tokens after which no further sweep starts; 0: sweeps decide", least=0)
    eval_every: int = opt(5, "sweeps between evaluations; 0: only before and after", least=0)
    eval_every_tokens: int = opt(0, "generated tokens between evaluations, instead of sweeps; 0: off", least=0)
    eval_tasks: int = opt(256, "held-out tasks of an evaluation, at most; 0: no evaluation", least=0)
    eval_samples: int = opt(1, "k: episodes sampled of each of them, for pass@k and avg@k", least=1)
    eval_greedy: bool = opt(True, "play each of them once more at temperature 0")
    checkpoint_every: int = opt(0, "sweeps between checkpoints that are kept for good; 0: only the final model", least=0)
    state_every: int = opt(1, "updates between saved states of the learner, from which a run is resumed; 0: none", least=0)
    keep_states: int = opt(2, "how many of the last saved states are kept", least=1)
    overlap: bool = opt(True, "gradients of finished groups are computed while their stage is sampled to its end, evaluations beside the next trunks")
    timeline: int = opt(2, "first sweeps of which a timeline is kept, in timeline/ of the run's folder, for https://ui.perfetto.dev", least=0)
    aim: bool = opt(True, "track in an Aim repository at run.root as well as in metrics.jsonl")


@dataclass(kw_only=True)
class ClusterConfig:
    address: str = opt("", "Ray address; empty: the job's cluster (RAY_ADDRESS) or else a local one")
    autoscaling: bool = opt(False, "the cluster adds nodes when actors wait for them, so a run that does not fit yet is not refused")
    local_cpus: int = opt(0, "logical CPUs of a local cluster; 0: as many as the machine has", least=0)
    dashboard: bool = opt(True, "serve the Ray dashboard of a local cluster")
    start_timeout: float = opt(300.0, "seconds that actors may take to start", above=0)
    lost_after: float = opt(120.0, "seconds without an answer after which the coordinator, or its pool of generators, is replaced", above=0)
    restarts: int = opt(3, "times that a lost coordinator or learner is started again without the run getting further", least=0)

    @property
    def patience(self) -> float:
        """Seconds for the pool to answer what it can answer at once: the driver's watch over it decides first."""
        return self.lost_after + 30


@dataclass(kw_only=True)
class ModelConfig:
    path: str = opt("", "Hugging Face folder or name of a causal LM, or a GGUF file, converted once into warm_start.cache; empty: build the tiny "
                    "model of warm_start")
    dtype: str = opt("float32", "dtype of the engine, and of the learner's computation", choices=("float32", "bfloat16"))
    tool_calls: str = opt("auto", "how the model writes calls of tools; auto: as its chat template says, else hermes", choices=("auto", *FORMATS))
    template_args: dict[str, Any] = field(default_factory=dict, metadata={"doc": "arguments of the chat template, such as {enable_thinking: false}"})


@dataclass(kw_only=True)
class WarmStartConfig:
    """The tiny model that is built when model.path is empty."""

    cache: str = opt("~/.cache/rtpo_ray/models", "where built models are kept, one folder a set of options")
    seed: int = opt(0, "seed of weights and demonstrations", least=0)
    layers: int = opt(2, "transformer layers", least=1)
    hidden: int = opt(128, "width of the model", least=16)
    vocab: int = opt(1024, "size of the byte-level BPE vocabulary", least=300)
    steps: int = opt(600, "supervised steps", least=1)
    batch: int = opt(64, "demonstrations a supervised step", least=1)
    lr: float = opt(3e-3, "peak learning rate of the supervised steps", above=0)
    noise: float = opt(0.5, "probability that a demonstrated action is replaced by a wrong one", least=0)


@dataclass(kw_only=True)
class EnvironmentConfig:
    name: str = opt("lookup", "which environment", choices=tuple(environments.REGISTRY))
    path: str = opt("", "file.py:Class of one of your own, which then stands for name")
    args: dict[str, Any] = field(default_factory=dict, metadata={"doc": "arguments of the environment's constructor; env:NAME is what the "
                                                                     "environment variable NAME holds, for secrets"})
    max_turns: int = opt(3, "K: turns an episode may take", least=1, why="an episode has at least one turn")
    context: str = opt("append", "psi, how c_k is built", choices=("append", "template", "window", "summary"))
    window: int = opt(1, "turns that context=window keeps beside the task", least=1)
    thoughts: str = opt("template", "thinking of earlier responses in c_k: what the chat template makes of it, or dropped before",
                        choices=("template", "strip"))
    tools_in: str = opt("template", "what tells the model of its tools: the chat template, or the system message where the template shows none",
                        choices=("template", "system"))
    train_context: str = opt("recorded", "what the learner scores a response in: the context that the engine saw, or the whole conversation "
                             "concatenated, which is another one unless context=append", choices=("recorded", "concatenated"))
    step_timeout: float = opt(60.0, "seconds that one environment step may take", above=0)


@dataclass(kw_only=True)
class DataConfig:
    """Files of tasks, for environments that read them; the others make a task from its seed."""

    train: str = opt("", "file, pattern or folder of .jsonl, .json, .parquet or .arrow files (as of Hugging Face), one row a training task")
    held_out: str = opt("", "the same for evaluation; empty: held_out_share of train")
    held_out_share: float = opt(0.0, "share of train that is held out for evaluation", least=0, most=1)
    fields: dict[str, str] = field(default_factory=dict, metadata={"doc": "field of the environment: column of the files, where they are not called "
                                                                         "the same"})
    shuffle: bool = opt(True, "train in an order that run.seed decides, another one in every epoch; else in the files'")


@dataclass(kw_only=True)
class AlgorithmConfig:
    name: str = opt("rtpo", f"which method: {', '.join(algorithms.REGISTRY)}, or file.py:Class")
    args: dict[str, Any] = field(default_factory=dict, metadata={"doc": "options of the method, listed below"})


@dataclass(kw_only=True)
class SamplingConfig:
    tasks_per_sweep: int = opt(64, "tasks of a sweep", least=1)
    temperature: float = opt(1.0, "sampling temperature of trunks and siblings, 0.01 to 2", least=0.01)
    max_response_tokens: int = opt(64, "longest response of a turn", least=1)
    overlong: str = opt("error", "a first context that leaves no room for a response", choices=("error", "drop"))
    chunk_groups: int = opt(8, "groups that go to the learner together, as soon as all of them are complete", least=1)
    in_order: bool = opt(True, "groups go to the learner in the order of their trunks, so that the same seed gives the same sums to the last bit; "
                         "with many generators, off overlaps more")
    retries: int = opt(1, "times that a failed group is tried again, elsewhere if possible", least=0)
    concurrency: int = opt(0, "blocks that are sampled at once, each by a process of about 160 MB beside the engines; 0: two a generator", least=0)
    stage_cap: float = opt(0.0, "seconds after which the rollouts of a stage that are still under way are cut, and their groups left out; 0: never",
                           least=0)
    stage_timeout: float = opt(3600.0, "seconds that collecting one stage may take", above=0)


@dataclass(kw_only=True)
class GeneratorConfig:
    min: int = opt(1, "sampling engines that are always kept", least=1)
    max: int = opt(0, "sampling engines at most, started when a stage has work for them; 0: as many as min", least=0)
    release: bool = opt(False, "give engines beyond min back when a stage has no work for them, instead of keeping them warm")
    lost_after: float = opt(120.0, "seconds without an answer, beyond what a push may take (4 x weights.timeout), after which an engine is replaced",
                            above=0)
    cpus: float = opt(0.5, "logical CPUs each", least=0)
    gpus: float = opt(0.0, "GPUs each", least=0)
    resource: str = opt("", "custom resource of the nodes that may hold engines, 1 of it each; Ray Data then stays on the coordinator's node; "
                        "empty: any node")
    threads: int = opt(1, "compute threads each on CPUs", least=1)
    max_num_seqs: int = opt(256, "responses sampled at once by one engine", least=1)
    max_model_len: int = opt(512, "tokens of context and response", least=8)
    kv_cache_mb: int = opt(64, "key-value cache in MiB; 0: as much of a GPU as gpu_memory_utilization allows", least=0)
    gpu_memory_utilization: float = opt(0.85, "share of a GPU that an engine may use", above=0)


@dataclass(kw_only=True)
class LearnerConfig:
    ranks: int = opt(1, "processes that share the model with FSDP2", least=1)
    cpus: float = opt(0.5, "logical CPUs each", least=0)
    gpus: float = opt(0.0, "GPUs each", least=0)
    resource: str = opt("", "custom resource of the nodes that may hold ranks, 1 of it each; empty: any node")
    threads: int = opt(1, "compute threads each on CPUs", least=1)
    micro_batch_tokens: int = opt(8192, "tokens of one forward and backward pass; what samples begin with in common counts once", least=1)
    share_prefixes: bool = opt(True, "compute what the samples of a micro-batch begin with in common once")
    recompute: bool = opt(False, "keep only the layers' inputs for the backward pass and compute the rest again: less memory, more time")
    compile: bool = opt(False, "torch.compile the layers: less time a step after a slower first one; needs a C++ compiler, on GPUs Triton")
    lora_rank: int = opt(0, "rank of the LoRA adapters that are trained beside frozen weights; 0: all weights are trained", least=0)
    lora_alpha: float = opt(32.0, "adapters are scaled by lora_alpha / lora_rank", above=0)
    lora_targets: str = opt("all-linear", "linear layers with adapters: all-linear (all but the head), or names such as q_proj,v_proj")
    lr: float = opt(1e-6, "AdamW learning rate", above=0)
    warmup_steps: int = opt(0, "optimizer steps over which the rate rises linearly", least=0)
    weight_decay: float = opt(0.01, "AdamW weight decay", least=0)
    beta1: float = opt(0.9, "AdamW first moment", least=0)
    beta2: float = opt(0.999, "AdamW second moment", least=0)
    eps: float = opt(1e-8, "AdamW epsilon", above=0)
    max_grad_norm: float = opt(1.0, "gradients are clipped to this norm", above=0)
    max_refused: int = opt(3, "consecutive non-finite updates that are refused before the run stops", least=1)
    timeout: float = opt(600.0, "seconds that one collective or one update may take", above=0)


@dataclass(kw_only=True)
class WeightsConfig:
    bucket_mb: int = opt(32, "MiB of one broadcast; a generator holds a few of them", least=1)
    timeout: float = opt(60.0, "seconds that one push may take", above=0)
    probe_tokens: int = opt(4, "tokens that every generator samples after a push, scored again by the learner", least=1)
    probe_tolerance: float = opt(1e-3, "largest log-probability gap of the probe; wider in bfloat16", above=0)


@dataclass(kw_only=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generators: GeneratorConfig = field(default_factory=GeneratorConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)

    def __post_init__(self) -> None:
        for name, value, spec in walk(self):
            if wrong := complaint(value, spec):
                raise ConfigError(f"field {name} is {wrong}")
        checks.check_together(self)


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Every leaf as (dotted name, value, field)."""
    for spec in dataclasses.fields(config):
        value, name = getattr(config, spec.name), prefix + spec.name
        if dataclasses.is_dataclass(value):
            yield from walk(value, name + ".")
        else:
            yield name, value, spec


def load_config(files: str | Path | Sequence[str | Path] | None, overrides: Sequence[str] = (), *, learn: bool = True) -> Config:
    """Defaults, then the YAML files in order, then `section.field=value` overrides. Raises ConfigError.

    `learn`: whether the learner ranks must fit the cluster too.
    """
    files = [files] if isinstance(files, (str, Path)) else files or []
    layers = [(str(file), read_yaml(Path(file))) for file in files]
    return load_layers([*layers, *parse_overrides(overrides)], learn=learn)


def load_layers(layers: Sequence[tuple[str, DictConfig]], *, learn: bool = True) -> Config:
    """Defaults, then every layer (origin for messages, content) in order. Raises ConfigError."""
    schema = OmegaConf.structured(Config)
    for origin, layer in layers:
        _refuse_revealed(layer, origin)
        _refuse_unknown(layer, Config, "", origin)
        try:
            schema = OmegaConf.merge(schema, layer)
        except OmegaConfBaseException as error:
            raise ConfigError(_explain(error, layer, origin)) from error
    try:
        config = OmegaConf.to_object(schema)
    except OmegaConfBaseException as error:
        raise ConfigError(f"field {getattr(error, 'full_key', None) or '?'}: {str(error).splitlines()[0]}") from error
    assert isinstance(config, Config)
    checks.check_files(config, learn)
    if learn:
        checks.check_branching(config)
    checks.check_placement(config, learn)
    return config


def check_resumable(before: Config, now: Config) -> None:
    """Whether a run that began as `before` may go on as `now`. Raises ConfigError."""
    old = {name: value for name, value, _ in walk(before)}
    for name, value, _ in walk(now):
        if value != old[name] and not any(name.startswith(free) if free.endswith(".") else name == free for free in FREE):
            raise ConfigError(f"field {name} is {value!r} and was {old[name]!r} when the run began; a resumed run may change "
                              f"{', '.join(free + '*' if free.endswith('.') else free for free in FREE)}")


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, DictConfig]]:
    """`section.field=value` as layers. Raises ConfigError."""
    layers = []
    for override in overrides:
        if "=" not in override or override.startswith("-"):
            raise ConfigError(f"override {override!r}: expected section.field=value, for example learner.lr=1e-5")
        layers.append((f"override {override!r}", _parse_override(override)))
    return layers


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML; `load_config` reads it back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def hash_config(config: Config) -> str:
    """Of the whole configuration, and of the files that method, environment, tools and grader come from when they are not ours."""
    own = b"".join(source_of(name) for name in (config.algorithm.name, config.environment.path, *_texts(config.environment.args)))
    return hashlib.sha256(to_yaml(config).encode() + own).hexdigest()


def _texts(value: Any) -> Iterator[str]:
    """Every text in `value`, keys included."""
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, str):
        yield value


def defaults() -> Config:
    """Every default, without the checks: help must work on a machine where the defaults do not fit."""
    config = object.__new__(Config)
    for spec in dataclasses.fields(Config):
        assert callable(spec.default_factory), f"section {spec.name} has no default"
        setattr(config, spec.name, spec.default_factory())
    return config


def describe() -> str:
    """Every field with its default and documentation, for --help and the README."""
    lines = []
    for name, value, spec in walk(defaults()):
        choices = spec.metadata["choices"] if "choices" in spec.metadata else ()
        shown = value if value != "" else '""'
        lines.append(f"  {name}={shown}\n      {spec.metadata['doc']}" + (f" ({' | '.join(choices)})" if choices else ""))
    return "\n".join([*lines, "", *_describe_methods()])


def _describe_methods() -> list[str]:
    """Options that all methods have, and those of every method that differ."""
    common = {spec.name: spec for spec in dataclasses.fields(Algorithm)}
    lines = ["algorithm.args of every method:", *(_option(spec) for spec in common.values())]
    for name, cls in algorithms.REGISTRY.items():
        own = [spec for spec in dataclasses.fields(cls) if spec.name not in common or spec.default != common[spec.name].default]
        lines += [f"algorithm.args of {name}:", *(_option(spec) for spec in own)]
    return lines


def _option(spec: dataclasses.Field[Any]) -> str:
    choices = f" ({' | '.join(spec.metadata['choices'])})" if spec.metadata["choices"] else ""
    return f"  {spec.name}={spec.default}\n      {spec.metadata['doc']}{choices}"


def read_yaml(path: Path) -> DictConfig:
    """The file as a layer. Raises ConfigError."""
    if not path.is_file():
        known = sorted(str(p) for p in Path("conf").glob("**/*.yaml"))
        raise ConfigError(f"config file {str(path)!r} does not exist; the project's own are {', '.join(known) or 'under conf/'}")
    try:
        layer = OmegaConf.load(path)
    except Exception as error:  # yaml has no common base class that OmegaConf keeps; the cause is chained
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{path}: expected sections such as 'run:' at the top level")
    return layer


def _parse_override(override: str) -> DictConfig:
    try:
        return OmegaConf.from_dotlist([override])
    except Exception as error:  # as above
        raise ConfigError(f"override {override!r}: not readable: {error}") from error


def _refuse_revealed(layer: DictConfig, origin: str) -> None:
    """OmegaConf would put what the variable holds into the configuration, which is written down."""
    if re.search(r"\$\{\s*oc\.env\b", OmegaConf.to_yaml(layer, resolve=False)):
        raise ConfigError(f"{origin}: ${{oc.env:...}} would write the variable's value into config.yaml; name a secret as env:NAME in "
                          "environment.args, and give other fields their value")


def _refuse_unknown(layer: DictConfig, schema: Any, prefix: str, origin: str) -> None:
    valid = {spec.name: spec for spec in dataclasses.fields(schema)}
    for key in layer:
        if key not in valid:
            close = difflib.get_close_matches(str(key), valid, n=1)
            hint = f" (did you mean {prefix}{close[0]}?)" if close else ""
            raise ConfigError(f"{origin}: unknown field {prefix}{key!s}{hint}; valid here: {', '.join(valid)}")
        section = valid[str(key)].default_factory
        if section is dict and not isinstance(layer._get_node(str(key)), DictConfig):
            raise ConfigError(f"{origin}: field {prefix}{key} is {layer._get_node(str(key))!r}; expected dict, such as {{hops: 2}}")
        if dataclasses.is_dataclass(section):
            value = layer._get_node(str(key))  # as written: neither interpolated nor complained about
            if not isinstance(value, DictConfig):
                raise ConfigError(f"{origin}: {prefix}{key} is a section, not a value ({value!r}); set one of its fields: "
                                  f"{', '.join(spec.name for spec in dataclasses.fields(section))}")
            _refuse_unknown(value, section, f"{prefix}{key}.", origin)


def _explain(error: Exception, layer: DictConfig, origin: str) -> str:
    name = getattr(error, "full_key", None) or "?"
    if name == "?":
        return f"{origin}: {str(error).splitlines()[0]}"
    value = OmegaConf.select(layer, name)
    wanted = {leaf: spec.type for leaf, _, spec in walk(defaults())}.get(name, "another type")
    return f"{origin}: field {name} is {value!r}; expected {wanted}"
