"""TRL's GRPOTrainer beside our GRPO on the same machine: seconds a step, the same model, tasks, grading, batches and lengths.

    python tests/bench/peers.py                                 # every shape; some ten minutes on two cores; writes results/peers.json
    python tests/bench/peers.py --shapes short-64 --pairs 3
    python tests/bench/peers.py --shapes long-64 --tune trl     # other settings of one side, to choose the fastest of; writes nothing

TRL lives in a virtual environment of its own (--venv), made when it is not there. Both sides are started at once, warmed up, and then take turns:
a few steps of one while the other is idle, and so on, so that a busy machine hurts both alike. Start-up is not counted. Ours is a whole run on a
local Ray cluster, with everything that a run does but saving, which TRL is spared too. Each side gets the settings that were found fastest for it.
The model's responses end where it ends them ("short", a call of a tool of some 12 tokens), or at the longest length ("long": what would
end one is a token that it practically never samples). A learning rate of 1e-6 keeps the amount of work the same all along.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # of this process, which builds the model; the sides get their own

from sides import QUIET, Side, our_sweeps, summary, take_turns, write  # noqa: E402

from rtpo_ray.config import Config, load_config  # noqa: E402

PINS = ("torch==2.13.0", "transformers==5.24.0", "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
TARGET = 2.0
OPTIMIZER = {"lr": 1e-6, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "max_grad_norm": 1.0}
GROUP = 8  # completions of a prompt
SMOLLM2_NEVER = "<empty_output>"
# A message of the model ends with a token that it never learned to say.
ENDLESS = """\
{%- if tools or messages[0].role == 'system' -%}
  {{- '<|im_start|>system' -}}
  {%- if messages[0].role == 'system' -%}{{- '\\n' + messages[0].content -}}{%- endif -%}
  {%- for tool in tools or [] -%}
    {{- '\\n' + tool.function.name + '(' + (tool.function.parameters.properties | join(', ')) + ')' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages if message.role != 'system' -%}
  {{- '<|im_start|>' + message.role + '\\n' + message.content + ('<|never|>\\n' if message.role == 'assistant' else '<|im_end|>\\n') -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One kind of step. The last four are what was found fastest for either side."""

    what: str
    completions: int
    tokens: int  # of the longest response
    endless: bool = False  # every response has that length
    turns: int = 1
    rules: int = 0  # lines of a manual before every question
    model: str = ""  # GGUF file or folder; empty: the tiny model
    steps: int = 3  # of one turn of either side
    generators: int = 1
    ours: tuple[str, ...] = ()  # fields of our configuration
    micro: int = 0  # completions of one pass of TRL; 0: all
    threads: int = 1  # of TRL
    policy: str = "PASSIVE"  # how TRL's idle threads wait
    continuous: bool = False  # TRL generates with transformers' continuous batching


SHAPES = {
    "short-64": Shape(what="one call of a tool, 12 tokens", completions=64, tokens=32, steps=6),
    "short-512": Shape(what="one call of a tool, 12 tokens", completions=512, tokens=32, steps=1),
    "manual-64": Shape(what="32 tokens after instructions of some 700", completions=64, tokens=32, endless=True, rules=13),
    "hops-64": Shape(what="two look-ups and the answer, three turns", completions=64, tokens=32, turns=3),
    "hops-512": Shape(what="two look-ups and the answer, three turns", completions=512, tokens=32, turns=3, steps=1),
    "long-64": Shape(what="256 tokens", completions=64, tokens=256, endless=True, steps=1),
    "long-512": Shape(what="128 tokens", completions=512, tokens=128, endless=True, steps=1),
    "smollm2-32": Shape(what="SmolLM2-135M, 64 tokens", completions=32, tokens=64, endless=True, model="smollm2", steps=1),
}


def environment(venv: Path) -> Path:
    """TRL's interpreter, in a virtual environment that is made when it is missing."""
    python = venv / "bin/python"
    if not python.exists():
        subprocess.run(["python3.11", "-m", "venv", str(venv)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PINS], check=True)
    return python


def overrides(shape: Shape) -> list[str]:
    """Our configuration, all of it."""
    tasks = ([f"environment.path={ROOT}/tests/bench/onecall.py:OneCall", *[f"environment.args.rules={shape.rules}"] * (shape.rules > 0),
              *["environment.args.coin=true"] * shape.endless] if shape.turns == 1
             else ["environment.name=lookup", "environment.args.hops=2", "environment.args.entities=26"])
    optimizer = [f"learner.{key}={value}" for key, value in OPTIMIZER.items()]
    each = -(-shape.completions // shape.generators)
    room = -(-(60 + 60 * shape.rules + shape.tokens + 40 * (shape.turns - 1)) // 32) * 32
    return ["warm_start.noise=0.7", "warm_start.steps=300", *tasks, f"environment.max_turns={shape.turns}", "algorithm.name=grpo",
            f"algorithm.args.n_trunks={GROUP}", f"sampling.tasks_per_sweep={shape.completions // GROUP}", "sampling.temperature=1.0",
            f"sampling.max_response_tokens={shape.tokens}", f"generators.min={shape.generators}", "generators.cpus=0.25",
            "generators.kv_cache_mb=256", f"generators.max_model_len={room}", f"generators.max_num_seqs={each}", "learner.cpus=0.5",
            "learner.threads=2", "run.state_every=0", "cluster.local_cpus=4", "cluster.dashboard=false", *optimizer, *shape.ours]


def endless(folder: Path, made: Path) -> Path:
    """The model in `folder` again, in `made`, with another token to end a response: one that it practically never samples."""
    from transformers import AutoTokenizer

    made.mkdir(parents=True)
    (made / "model.safetensors").symlink_to(folder / "model.safetensors")
    tokenizer, config = AutoTokenizer.from_pretrained(folder), json.loads((folder / "config.json").read_text())
    never = "<|never|>" if len(tokenizer) < config["vocab_size"] else SMOLLM2_NEVER
    tokenizer.add_special_tokens({"eos_token": never, "pad_token": tokenizer.pad_token or "<|im_end|>"})
    assert tokenizer.eos_token_id < config["vocab_size"], f"{folder}: {never} has no place in the vocabulary"
    tokenizer.chat_template = ENDLESS.replace("<|never|>", never)
    tokenizer.save_pretrained(made)
    (made / "config.json").write_text(json.dumps({**config, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}))
    return made


def model_of(shape: Shape, config: Config, scratch: Path) -> Path:
    """The folder that both sides start from."""
    from rtpo_ray.policy.tiny import materialise

    if shape.model == "smollm2":
        cache = Path(config.warm_start.cache).expanduser()
        found = next(cache.glob("SmolLM2-135M-Instruct.*/config.json"), None)
        if found is None:
            raise FileNotFoundError(f"no SmolLM2-135M-Instruct in {cache}; train on it once: rtpo train --config conf/smollm2.yaml")
        folder = found.parent
    else:
        folder = materialise(load_config(None, [*overrides(dataclasses.replace(shape, endless=False, rules=0)), "cluster.address=elsewhere"]))
    return endless(folder, scratch / "endless") if shape.endless else folder


def prompts(shape: Shape, config: Config, model: Path, steps: int) -> list[dict[str, Any]]:
    """Our tasks of the first steps, each as the text or the messages that TRL gets, the tokens that we give to the engine, and its seed."""
    from pipelines.tasks import SeedTasks
    from rtpo_ray.environments import build
    from rtpo_ray.episodes.contexts import chat_template

    template, rows = chat_template(config, str(model)), []
    for sweep in range(steps):
        for task in SeedTasks(config.run.seed).training(sweep, config.sampling.tasks_per_sweep):
            world = build(config.environment)
            messages, tools = template.opening(world.system, world.tools(), world.reset(task.seed))
            text = template.render(messages, tools, prompt=True)
            rows.append({"prompt": text if shape.turns == 1 else messages, "ids": template.encode(text), "seed": task.seed})
    return rows


def our_side(shape: Shape, model: Path, scratch: Path) -> Side:
    return our_sweeps(model, scratch, overrides(shape))


def trl_side(shape: Shape, config: Config, model: Path, scratch: Path, python: Path, rows: Path) -> Side:
    answer = shape.tokens if shape.turns == 1 else shape.tokens * shape.turns
    args = config.environment.args
    settings = {"model": str(model), "rows": str(rows), "environment": dict(args), "turns": shape.turns, "groups": shape.completions // GROUP,
                "group": GROUP, "tokens": answer, "micro": shape.micro or shape.completions, "threads": shape.threads,
                "continuous": shape.continuous, "temperature": config.sampling.temperature, **OPTIMIZER}
    file = Path(tempfile.mkstemp(dir=scratch, suffix=".json")[1])
    file.write_text(json.dumps(settings))
    return Side("TRL", [str(python), str(ROOT / "tests/bench/peers_trl.py"), str(file)],
                {**QUIET, "OMP_NUM_THREADS": str(shape.threads), "OMP_WAIT_POLICY": shape.policy},
                Path(tempfile.mkstemp(dir=scratch, suffix=".log")[1]))


def compare(shape: Shape, pairs: int, python: Path, tune: str) -> dict[str, Any]:
    scratch = Path(tempfile.mkdtemp(prefix="peers-"))
    try:
        config = load_config(None, [*overrides(shape), "cluster.address=elsewhere"])
        model = model_of(shape, config, scratch)
        rows = scratch / "rows.json"
        rows.write_text(json.dumps(prompts(shape, config, model, 2 + shape.steps * (pairs + 1))))
        if tune:
            return tuned(tune, shape, config, model, scratch, python, rows, pairs)
        a, b = take_turns([our_side(shape, model, scratch), trl_side(shape, config, model, scratch, python, rows)], shape.steps, pairs)
        ours, theirs = summary(a), summary(b)
        ratios = [y["seconds"] / x["seconds"] for x, y in zip(a, b, strict=True)]
        rate = ours["generated_tokens_a_second"] / theirs["generated_tokens_a_second"]
        return {"shape": {key: value for key, value in dataclasses.asdict(shape).items() if value not in ("", ())}, "ours": ours, "trl": theirs,
                "times_faster": statistics.median(ratios), "times_faster_each": [round(ratio, 3) for ratio in ratios], "times_tokens_a_second": rate,
                "times_less_cpu": theirs["cpu_seconds_a_step"] / ours["cpu_seconds_a_step"]}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def tuned(which: str, shape: Shape, config: Config, model: Path, scratch: Path, python: Path, rows: Path, pairs: int) -> dict[str, Any]:
    """Seconds a step of one side with other settings, one after another."""
    found = {}
    if which == "trl":
        others = [dataclasses.replace(shape, micro=micro, threads=threads, policy=policy) for micro in sorted({shape.completions, 64})
                  for threads, policy in ((1, "PASSIVE"), (2, "PASSIVE"), (2, "ACTIVE"))]
        others.append(dataclasses.replace(others[-2], continuous=True))
    else:
        others = [dataclasses.replace(shape, generators=generators, ours=(f"generators.threads={threads}", f"learner.threads={learner}"))
                  for generators, threads, learner in ((1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2))]
    for other in others:
        changed = {key: value for key, value in dataclasses.asdict(other).items() if value != dataclasses.asdict(shape)[key]}
        side = trl_side(other, config, model, scratch, python, rows) if which == "trl" else our_side(other, model, scratch)
        try:
            (answers,) = take_turns([side], shape.steps, pairs)
        except RuntimeError as error:  # a setting that does not work here is no candidate
            print(changed, error, flush=True)
            continue
        found[str(changed)] = of = summary(answers)
        print(changed, {key: of[key] for key in ("seconds_a_step", "each", "phases") if key in of}, flush=True)
    return found


def line(name: str, of: dict[str, Any]) -> str:
    return (f"{name:12} ours {of['ours']['seconds_a_step']:7.3f} s a step, {of['ours']['generated_tokens_a_second']:7.0f} tokens/s; "
            f"TRL {of['trl']['seconds_a_step']:7.3f} s, {of['trl']['generated_tokens_a_second']:7.0f} tokens/s; {of['times_faster']:.2f}x; "
            f"CPU seconds {of['ours']['cpu_seconds_a_step']:.2f} and {of['trl']['cpu_seconds_a_step']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path("~/.cache/rtpo_ray/trl").expanduser(), help="TRL's virtual environment")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--pairs", type=int, default=5, help="turns of either side that count")
    parser.add_argument("--tune", choices=("trl", "ours"), default="")
    parser.add_argument("--out", default="peers", help="name of the file of results")
    args = parser.parse_args()
    os.environ |= QUIET
    os.chdir(ROOT)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the sides too
    python, found = environment(args.venv.expanduser()), {}
    for name in args.shapes:
        found[name] = compare(SHAPES[name], args.pairs, python, args.tune)
        if not args.tune:
            print(line(name, found[name]), flush=True)
            write(args.out, __doc__, found, [
                {"target": f"{name}: {TARGET:g}x faster end to end than TRL's GRPOTrainer", "measured": of["times_faster"],
                 "met": of["times_faster"] >= TARGET} for name, of in found.items()])


if __name__ == "__main__":
    main()
