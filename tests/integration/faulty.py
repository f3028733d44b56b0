"""Look-ups whose steps go wrong when a file in a folder says so; whoever takes the file has the fault, so each happens once."""

import os
import time
from pathlib import Path

from running import wait_until

from rtpo_ray.environments.base import Step
from rtpo_ray.environments.lookup import Lookup


class Faulty(Lookup):
    """Args:
    faults: folder that holds the faults to come: files named raise-N, nan-N, hang-N, die-N or gate-N; a gate is shut until `open_gate`.
    The others are Lookup's.
    """

    instant = False

    def __init__(self, faults: str = "", hops: int = 2, entities: int = 8, relations: int = 4) -> None:
        super().__init__(hops, entities, relations)
        self.faults = faults

    def step(self, response_text):
        kind = take(self.faults)
        if kind == "raise":
            raise OSError("the tool's server is gone")
        if kind == "nan":
            return Step(reward=float("nan"), terminated=True)
        if kind == "hang":
            time.sleep(20)
        if kind == "gate":
            wait_until(lambda: Path(f"{self.faults}.open").exists(), 200, "the gate to open")
        if kind == "die":
            os._exit(1)
        return super().step(response_text)


def plant(folder, *kinds):
    """Faults for the next steps that anyone takes."""
    for number, kind in enumerate(kinds):
        Path(folder, f"{kind}-{time.monotonic_ns()}-{number}").touch()


def shut_gate(folder):
    """The next step that anyone takes waits."""
    Path(f"{folder}.open").unlink(missing_ok=True)
    plant(folder, "gate")


def open_gate(folder):
    Path(f"{folder}.open").touch()


def take(folder):
    """The kind of a planted fault, which is then gone; empty when there is none."""
    for entry in sorted(os.listdir(folder)) if folder else ():
        try:
            Path(folder, entry).unlink()
        except FileNotFoundError:  # another was faster
            continue
        return entry.partition("-")[0]
    return ""
