"""The `rtpo` command. The configuration is read and checked before torch, vllm or ray are imported."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rtpo_ray import environments
from rtpo_ray.config import Config, check_resumable, describe, hash_config, load_config
from rtpo_ray.environments.base import Environment
from rtpo_ray.errors import ConfigError, RtpoError
from rtpo_ray.folders import alone_in
from rtpo_ray.ledger import FILE as LEDGER
from rtpo_ray.ledger import Ledger
from rtpo_ray.reports.status import status_lines

OK, FAILED, BAD_CONFIG, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
NODES = ("nodes", "gpus_per_node", "gpu_memory", "cpus_per_node")  # what --dry-run may be told about


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit code: 0, 1 failed, 2 bad configuration, 130 interrupted, 143 terminated."""
    args = _parse(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is imported: spinning threads on shared cores collapse to a crawl
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return {"train": train, "evaluate": evaluate, "compare": compare, "theory": theory, "simulate": simulate, "submit": submit, "stop": stop,
                "status": status, "doctor": doctor}[args.command](args)
    except ConfigError as error:
        print(f"rtpo: configuration error: {error}", file=sys.stderr)
        return BAD_CONFIG
    except RtpoError as error:
        print(f"rtpo: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rtpo: interrupted", file=sys.stderr)
        return INTERRUPTED
    except _Terminated:
        print("rtpo: terminated", file=sys.stderr)
        return TERMINATED


def train(args: argparse.Namespace) -> int:
    """Train, track, and end cleanly however it ends."""
    if args.dry_run:
        args.overrides = [*args.overrides, "cluster.address=elsewhere"]  # the dry run checks the placement itself, on the nodes that it is given
    elif given := [f"--{name.replace('_', '-')}" for name in NODES if getattr(args, name) is not None]:
        raise ConfigError(f"{', '.join(given)} without --dry-run; a run takes the nodes of its cluster as they are")
    config = _resumed_config(args) if args.resume else load_config(args.config, args.overrides)
    if args.dry_run:
        from rtpo_ray.dryrun import dry_run, nodes_of

        dry_run(config, _named_model(config) if config.model.path else "", nodes_of(config, **{name: getattr(args, name) for name in NODES}), _say)
        return OK
    folder = _run_folder(config)
    with alone_in(folder, "run", "run.name", ".lock"):  # two that go on with one run would each take back what the other did
        reason = _reason_to_resume(config, folder)
        model_path = _model_path(config)
        from actors import cluster

        with cluster.connect(config):
            _train(config, model_path, reason)
    return OK


def _train(config: Config, model_path: str, reason: str = "") -> None:
    """One run on the connected cluster, or the rest of one."""
    from actors import cluster
    from rtpo_ray.reports.tracker import Tracker

    folder = _run_folder(config)
    signal.signal(signal.SIGTERM, _terminate)  # again: connecting to Ray put a handler of its own in place
    tracker, status = Tracker(config, folder, _say, resume=bool(reason)), "failed"
    try:
        with _signals():
            for event in cluster.run_events(config, model_path, str(folder), reason):
                tracker.record(event)
        status = "finished"
    except (KeyboardInterrupt, _Terminated):
        status = "interrupted"
        raise
    finally:
        tracker.close(status)
        _say(f"run {status}: {folder} holds " + ("metrics.jsonl and final/, the trained model" if status == "finished" else
                                                 f"what is done so far; rtpo train --resume {folder} goes on with it"))


def _resumed_config(args: argparse.Namespace) -> Config:
    """The configuration of the run in the folder that --resume names, under the overrides."""
    folder = Path(args.resume).expanduser().resolve()
    if args.config:
        raise ConfigError(f"--config {args.config[0]} and --resume {args.resume} exclude each other: a run goes on as its config.yaml says")
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--resume {args.resume}: {folder} holds no config.yaml, so it is no run; expected a folder such as runs/NAME")
    here = [f"run.root={folder.parent}", f"run.name={folder.name}", "run.resume=true"]
    return load_config(folder / "config.yaml", [*here, *args.overrides])


def _reason_to_resume(config: Config, folder: Path) -> str:
    """Empty when the run begins. Raises ConfigError when it may not go on."""
    begun = (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").exists()
    if not begun or not config.run.resume:
        _check_folder(folder)
        return ""
    elsewhere = "cluster.address=elsewhere"  # what began on another machine need not fit this one
    check_resumable(load_config(folder / "config.yaml", [elsewhere]), config)
    with Ledger(folder) as ledger:
        at = ledger.progress
    if at.finished and (at.sweep >= config.run.sweeps or 0 < config.run.tokens <= at.tokens):
        raise ConfigError(f"{folder}: the run is finished, after {at.sweep} sweeps and {at.tokens:,} tokens; raise run.sweeps ({config.run.sweeps})"
                          + (f" and run.tokens ({config.run.tokens})" if config.run.tokens else "") + " to train on")
    return "the run was started again"


def compare(args: argparse.Namespace) -> int:
    """Several methods with several seeds on one cluster; what is finished already is kept."""
    from rtpo_ray.compare import load_comparison, run_comparison, unfinished

    if not args.config:
        raise ConfigError("rtpo compare needs --config FILE, for example conf/compare/lookup.yaml")
    if len(args.config) > 1:
        raise ConfigError(f"--config is given {len(args.config)} times; expected once, the file of the comparison")
    comparison = load_comparison(args.config[0], args.overrides)
    waiting = unfinished(comparison)
    if not waiting:
        folder = run_comparison(comparison, lambda config: None, _say)
    else:
        models = {entry.label: _model_path(entry.config) for entry in waiting}
        by_run = {entry.config.run.name: models[entry.label] for entry in waiting}
        from actors import cluster

        with cluster.connect(*(entry.config for entry in waiting)):
            folder = run_comparison(comparison, lambda config: _train(config, by_run[config.run.name]), _say)
    _say((folder / "table.md").read_text())
    _say(f"{folder} holds table.md, table.csv and curves.png")
    return FAILED if unfinished(comparison) else OK


def theory(args: argparse.Namespace) -> int:
    """Check the theory of the methods exactly, on small games."""
    from pipelines import branching, counts, credit, rows
    from rtpo_ray.theory.lab import Pipeline
    from rtpo_ray.theory.report import report

    return OK if report(_say, Pipeline(rows=rows, branching=branching, credit=credit, counts=counts)) else FAILED


def simulate(args: argparse.Namespace) -> int:
    """What a sweep would take with other numbers of generators and learner ranks, or by GRPO, on the machine of a run or of a file."""
    from rtpo_ray.simulation import report

    what = report.scene(args.run, args.machine, trunks=args.trunks, siblings=args.siblings, shared={"": None, "on": True, "off": False}[args.shared],
                        seed=args.seed)
    report.report(what, generators=args.generators, learners=args.learners, figure=args.figure, as_json=args.json, seed=args.seed, say=_say)
    return OK


def _counts(text: str) -> list[int]:
    """Of 1,2,4."""
    counts = [int(word) for word in text.split(",")]
    if min(counts) < 1:
        raise ValueError(f"{text}: expected numbers of at least 1")
    return counts


_counts.__name__ = "list of numbers, such as 1,2,4,"  # argparse names it when one is wrong


def _run_folder(config: Config) -> Path:
    return Path(config.run.root).expanduser().resolve() / config.run.name


def _check_folder(folder: Path) -> None:
    """Whether a new run may be kept in `folder`. Raises ConfigError."""
    if (folder / "metrics.jsonl").exists():
        raise ConfigError(f"field run.name is {folder.name!r}: {folder} holds a run already; choose another name, remove the folder, or go on "
                          f"with it: rtpo train --resume {folder}")


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate a model on the held-out tasks of the configured environment; prints the result as one line of JSON too."""
    config = load_config(args.config, [*args.overrides, *([f"model.path={args.model}"] if args.model else [])], learn=False)
    if not config.run.eval_tasks:
        raise ConfigError("field run.eval_tasks is 0; expected at least 1 to evaluate")
    model_path = _model_path(config)
    from actors import cluster

    with cluster.connect(config, learn=False):
        signal.signal(signal.SIGTERM, _terminate)
        with _signals():
            event = cluster.evaluate(config, model_path)
    from rtpo_ray.reports.scores import score_lines
    from rtpo_ray.reports.tracker import eval_line

    for line in (eval_line(event), *score_lines(event), json.dumps(event)):
        _say(line)
    return OK


def doctor(args: argparse.Namespace) -> int:
    """Examine what the configuration names, without Ray and without sampling; fails when a run would."""
    config = load_config(args.config, [*args.overrides, *([f"model.path={args.model}"] if args.model else [])], learn=False)
    model_path = _model_path(config)
    from rtpo_ray.doctor import Doctor, show
    from rtpo_ray.episodes.contexts import chat_template

    template = chat_template(config, model_path)
    patient, failed = Doctor(config, template), list[str]()
    for finding in patient.examine():
        _say(f"{finding.kind:>4}  {finding.text}")
        failed += [finding.text.partition(":")[0]] * (finding.kind == "FAIL")
    if patient.sample is not None:
        for line in show(patient.sample, template, sys.stdout.isatty()):
            _say(line)
    if failed:
        _say(f"rtpo: what failed: {', '.join(dict.fromkeys(failed))}; see above")
    return FAILED if failed else OK


def submit(args: argparse.Namespace) -> int:
    """Train as a job of a cluster, in a copy of this folder; follows its log and returns its exit code."""
    for file in args.config:
        if Path(file).is_absolute() or not Path(file).resolve().is_relative_to(Path.cwd()):
            raise ConfigError(f"--config {file} lies outside of this folder, which the job gets a copy of; expected one inside")
    elsewhere = "cluster.address=the-job's"  # what does not fit this machine may fit the cluster
    config = load_config(args.config, [*args.overrides, elsewhere])
    config.cluster.address = ""
    from actors import jobs

    found = jobs.client(args.address)
    words = [*(word for file in args.config for word in ("--config", file)), *args.overrides]
    job = jobs.submit(found, words, ".", {"run": config.run.name, "config": hash_config(config)[:12]})
    _say(f"job {job}: run {config.run.name}; rtpo stop --address {args.address} {job} ends it")
    if args.no_wait:
        return OK
    try:
        return jobs.follow(found, job, _say)
    except (KeyboardInterrupt, _Terminated):
        _say(f"no longer following; job {job} goes on")
        raise


def stop(args: argparse.Namespace) -> int:
    """End a job, and wait until it has."""
    from actors import jobs

    _say(f"job {args.job} is {jobs.stop(jobs.client(args.address), args.job, args.seconds).lower()}")
    return OK


def status(args: argparse.Namespace) -> int:
    """Where a run stands, by its ledger; with an address, also who is alive on the cluster."""
    folder = Path(args.folder).expanduser()
    if not (folder / LEDGER).is_file():
        raise ConfigError(f"{folder} holds no {LEDGER}, so no run has begun there; expected a folder such as runs/NAME")
    with Ledger(folder, read_only=True) as ledger:
        for line in status_lines(ledger):
            _say(line)
    if args.address:
        from actors import jobs

        for line in jobs.actors_of(args.address):
            _say(line)
    return OK


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments; overrides may stand before and after the options."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    if args.command in ("theory", "simulate", "stop", "status"):
        if rest:
            parser.error(f"unrecognized arguments {' '.join(rest)}")
        return args
    for word in rest:
        if word.startswith("-"):
            parser.error(f"unrecognized argument {word}")
    args.overrides = [*args.overrides, *rest]
    for word in args.overrides:
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            parser.error(f"{word} looks like a configuration file: use --config {word}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rtpo", description="Train tool-using language-model agents with reverse-turn policy optimisation on Ray.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in (("train", "train a model"), ("evaluate", "evaluate a model on held-out tasks"),
                          ("doctor", "check environment, data, tools and contexts before a run"),
                          ("submit", "train as a job of a Ray cluster"),
                          ("compare", "train by several methods and compare them at an equal budget of generated tokens")):
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog="fields (set in the YAML file or as section.field=value):\n" + describe())
        command.add_argument("--config", metavar="FILE", action="append", default=[],
                             help="YAML file of overrides, for example conf/quickstart.yaml; may be given again, later ones win")
        command.add_argument("overrides", nargs="*", metavar="section.field=value", help="overrides, applied after the file")
        if name == "submit":
            command.add_argument("--address", required=True, metavar="URL", help="of the head's dashboard, such as http://HEAD:8265")
            command.add_argument("--no-wait", action="store_true", help="do not follow the job")
        if name == "train":
            command.add_argument("--resume", metavar="FOLDER", default="", help="go on with the run in this folder, from its last finished stage")
            command.add_argument("--dry-run", action="store_true", help="start nothing: say where everything would run, what memory it would take "
                                 "and what a sweep would sample, and refuse what cannot fit")
            command.add_argument("--nodes", type=int, metavar="N", help="with --dry-run: nodes of the cluster; default: this machine alone")
            command.add_argument("--gpus-per-node", type=int, metavar="N", help="with --dry-run (8 when other nodes are described)")
            command.add_argument("--gpu-memory", type=float, metavar="GB", help="with --dry-run: 10^9 bytes of a GPU (80)")
            command.add_argument("--cpus-per-node", type=int, metavar="N", help="with --dry-run (not compared when not given)")
        if name in ("evaluate", "doctor"):
            command.add_argument("--model", metavar="PATH", default="", help="Hugging Face folder or name; stands for model.path")
    command = commands.add_parser("stop", help="end a job that was submitted", description="end a job that was submitted, and wait for its end")
    command.add_argument("--address", required=True, metavar="URL", help="of the head's dashboard")
    command.add_argument("--seconds", type=float, default=120.0, help="how long to wait")
    command.add_argument("job", help="its id")
    command = commands.add_parser("status", help="where a run stands", description="where a run stands, and who is alive")
    command.add_argument("--address", default="", metavar="URL", help="of the head's dashboard; empty: the ledger alone")
    command.add_argument("folder", help="of the run, such as runs/NAME")
    summary = "what a sweep of RTPO and of GRPO would take: other numbers of generators and learners, another machine"
    command = commands.add_parser("simulate", help=summary, description=summary)
    source = command.add_mutually_exclusive_group()
    source.add_argument("--run", metavar="FOLDER", default="", help="fit the machine and the work to what this run measured, such as runs/NAME")
    source.add_argument("--machine", metavar="FILE", default="conf/simulate/h200.yaml", help="YAML file of a machine and its work (%(default)s)")
    command.add_argument("--generators", type=_counts, default=[1, 2, 4], metavar="N,N", help="numbers of generators (1,2,4)")
    command.add_argument("--learners", type=_counts, default=[1, 2], metavar="N,N", help="numbers of learner ranks (1,2)")
    command.add_argument("--trunks", type=int, metavar="N", help="of a task, by RTPO; default: the run's, or 1")
    command.add_argument("--siblings", type=int, metavar="N", help="of a boundary, by RTPO; default: the run's, or 8")
    command.add_argument("--shared", choices=("on", "off"), default="", help="whether the learner computes what a group has in common once; "
                         "default: as the run did, or the file says")
    command.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    command.add_argument("--json", action="store_true", help="print everything as one line of JSON instead of a table")
    command.add_argument("--figure", metavar="FILE", default="", help="draw the best split of 8 to 1,024 GPUs (.svg, .png, .pdf)")
    commands.add_parser("theory", help="check the theory of the methods on small games", description="check the theory of the methods on small games")
    return parser


def _model_path(config: Config) -> str:
    """The configured model, a folder as an absolute path; the tiny one is built when none is named."""
    if not config.model.path:
        from rtpo_ray.policy.tiny import materialise

        if environments.find(config.environment).demonstrate is Environment.demonstrate:
            name = config.environment.path or config.environment.name
            raise ConfigError(f"field model.path is empty and environment {name!r} has no scripted demonstrations, from which "
                              "the tiny model would be built; set model.path, or define demonstrate(rng, noise)")

        return str(materialise(config, _say))
    return _named_model(config)


def _named_model(config: Config) -> str:
    """The folder or Hugging Face name that model.path names. Raises ConfigError when there is none."""
    folder = Path(config.model.path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            inside = [str(path.parent) for path in sorted(folder.glob("*/config.json"))]
            raise ConfigError(f"field model.path is {config.model.path!r}: there is no config.json, so it is no Hugging Face folder"
                              + (f"; did you mean {inside[0]}?" if inside else ""))
        return str(folder.resolve())
    if folder.suffix == ".gguf" and folder.is_file():
        from rtpo_ray.policy.gguf import convert

        return str(convert(folder, Path(config.warm_start.cache).expanduser(), _say))
    if config.model.path.startswith((".", "/", "~")) or config.model.path.count("/") > 1:
        raise ConfigError(f"field model.path is {config.model.path!r}; expected a folder that exists, or a Hugging Face name")
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(config.model.path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"field model.path is {config.model.path!r}: neither a folder here nor a model that can be had: "
                          f"{str(error).strip().splitlines()[0]}") from error
    return config.model.path


def _say(line: str) -> None:
    print(line, flush=True)


class _Terminated(BaseException):
    """SIGTERM, as an exception: `ray job stop` and cluster managers send it."""


@contextmanager
def _signals() -> Iterator[None]:
    """A signal that arrives while Ray waits comes out of its C code as the cause of a SystemError: raise it as itself."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, (KeyboardInterrupt, _Terminated)):
            raise error.__cause__ from None
        raise


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated
