"""What a benchmark measured, kept beside it: tests/bench/results/NAME.json, and one table of all of them.

    times = alternate(5, bare=lambda: broadcast(), ours=lambda: push())           # {"bare": 0.52, "ours": 0.61, "ours/bare": 1.17}
    write("weights", "a push against a bare broadcast", times, [target("within 1.3 x", times["ours/bare"], 1.3)])
    python tests/bench/record.py                                                 # prints the table and writes results/README.md
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

RESULTS = Path(__file__).with_name("results")
LEAST_REPETITIONS = 5


def alternate(n: int, **functions: Callable[[], float | None]) -> dict[str, float]:
    """Medians of `n` calls of each function, taken in turns after one call of each that does not count, so that a busy machine hurts all alike.

    A function that returns a number returns its own measurement; otherwise its wall seconds count. Beside the medians the result has
    "a/b" for every later function a and the first one b: the median over the rounds of a's value divided by b's of the same round.
    ValueError when `n` is less than 5 or nothing is to be measured.
    """
    if n < LEAST_REPETITIONS or not functions:
        raise ValueError(f"{n} repetitions of {len(functions)} functions; expected at least {LEAST_REPETITIONS} of at least one")
    found: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(n + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            value = function()
            value = time.perf_counter() - started if value is None else value
            if repetition:
                found[name].append(value)
    first, *others = functions
    medians = {name: statistics.median(values) for name, values in found.items()}
    return medians | {f"{name}/{first}": statistics.median(a / b for a, b in zip(found[name], found[first], strict=True)) for name in others}


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """p of y = c x^p by least squares in logarithms: 1 is linear, 2 quadratic, 0 does not depend on x. All values are positive."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def target(name: str, measured: float, most: float | None = None, *, least: float | None = None) -> dict[str, Any]:
    """One target of a benchmark: met when `measured` is at most `most` and at least `least`."""
    met = (most is None or measured <= most) and (least is None or measured >= least)
    return {"target": name, "measured": measured, "met": bool(met)}


def write(name: str, what: str, figures: Any, targets: Sequence[dict[str, Any]], **more: Any) -> Path:
    """Keep a result: what was measured, its figures (JSON-like), and for each target {"target", "measured", "met"}. Returns the file.

    `more`: further entries, such as profile=...; ValueError for a target that lacks one of the three.
    """
    for each in targets:
        if {"target", "measured", "met"} - set(each):
            raise ValueError(f"benchmark {name}: target {each}; expected the entries target, measured and met")
    result = {"what": what, "command": " ".join(["python", *map(_relative, sys.argv)]), "commit": commit(),
              "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "targets": list(targets), "figures": figures}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result | more, indent=1) + "\n")
    return path


def commit() -> str:
    """The short hash of the commit that is measured, with "+" when files that are tracked differ from it, results aside."""
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    changes = ["git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/tests/bench/results"]
    changed = subprocess.run(changes, cwd=here, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    return head + "+" * bool(changed)


def machine() -> dict[str, Any]:
    """Cores that this process may use, memory in GiB, versions, and the GPU if there is one."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "python": platform.python_version(), "torch": str(torch.__version__), **gpu}


def table() -> str:
    """Markdown, a row a target, of every result; files of another form are listed below it."""
    rows, others = ["| what | target | measured | met | command | commit |", "|---|---|---|---|---|---|"], []
    for path in sorted(RESULTS.glob("*.json")):
        result = json.loads(path.read_text())
        if not isinstance(result, dict) or "targets" not in result or "what" not in result:
            others.append(path.name)
            continue
        for each in result["targets"]:
            row = [result["what"], each["target"], _number(each["measured"]), "yes" if each["met"] else "**no**",
                   f"`{result.get('command', '')}`", result.get("commit", "")]
            rows.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |")
    listed = ["", "Without targets: " + ", ".join(f"[{name}]({name})" for name in others) + "."] if others else []
    return "\n".join([*rows, *listed]) + "\n"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _relative(argument: str) -> str:
    """A path in the repository as seen from its root, one in the home directory by "~"; anything else as it is."""
    path, root = Path(argument), Path(__file__).resolve().parents[2]
    if path.exists() and path.resolve().is_relative_to(root):
        return str(path.resolve().relative_to(root))
    return argument.replace(str(Path.home()), "~", 1) if path.is_absolute() and path.is_relative_to(Path.home()) else argument


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    text = table()
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "README.md").write_text("# What the benchmarks measured\n\n`python tests/bench/record.py` writes this file.\n\n" + text)
    print(text, end="")


if __name__ == "__main__":
    main()
