"""Look-ups whose steps take a while and are written down: when, by which process, of which task."""

import os
import time
from pathlib import Path

from faulty import Faulty


class Witness(Faulty):
    """Args:
    notes: folder for one file a process, with a line a step: time, seed of the task, 1 when it was the last step.
    seconds: that a step takes.
    The others are Faulty's.
    """

    def __init__(self, notes: str = "", seconds: float = 1.0, faults: str = "", hops: int = 2, entities: int = 8, relations: int = 4) -> None:
        super().__init__(faults, hops, entities, relations)
        self.notes, self.seconds, self.task = notes, seconds, 0

    def reset(self, seed):
        self.task = seed
        return super().reset(seed)

    def step(self, response_text):
        if self.notes:
            self.note(0)
            time.sleep(self.seconds)
        step = super().step(response_text)
        if self.notes and step.observation is None:
            self.note(1)
        return step

    def note(self, last):
        with Path(self.notes, str(os.getpid())).open("a") as file:
            file.write(f"{time.time()} {self.task} {last}\n")


def read(notes):
    """(time, process, task, last) of every step, in order."""
    found = []
    for path in Path(notes).iterdir():
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) == 3:  # one that was just being written when its process was killed is not there
                found.append((float(words[0]), int(path.name), int(words[1]), int(words[2])))
    return sorted(found)
