"""Runs as Ray jobs: submit, follow, stop, and what the cluster says of one. A thin layer over Ray's job client and state API."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_actors

from rtpo_ray.errors import DeadlineExceeded, RtpoError

EXCLUDES = ["/.git/", "/.venv/", "/runs/", "**/__pycache__/"]  # what a working directory has and a job does not need
ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED)
OURS = ("CoordinatorActor", "EvaluatorActor", "GeneratorPool", "GeneratorActor", "LearnerRank")


def client(address: str) -> JobSubmissionClient:
    """Raises RtpoError when no dashboard answers at `address`, or wants a token."""
    try:
        with _authenticated(address):
            return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RtpoError(f"--address {address}: no Ray dashboard answers there ({str(error).strip().splitlines()[0]}); expected the address of the "
                        "head's dashboard, such as http://HEAD:8265") from error


@contextmanager
def _authenticated(address: str) -> Iterator[None]:
    """A token that is missing or wrong, as an RtpoError that says what to do."""
    try:
        yield
    except AuthenticationError as error:
        raise RtpoError(f"--address {address}: {str(error).strip().splitlines()[0]}; the cluster wants a token: set RAY_AUTH_MODE=token and "
                        "RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH") from error


def submit(jobs: JobSubmissionClient, words: Sequence[str], folder: str, metadata: dict[str, str]) -> str:
    """Have the cluster run `rtpo train` with `words` in a copy of `folder`; returns the job's id."""
    command = " ".join(["python", "-m", "rtpo_ray", "train", *map(shlex.quote, words)])
    job: str = jobs.submit_job(entrypoint=command, runtime_env={"working_dir": folder, "excludes": EXCLUDES}, metadata=metadata)
    return job


def follow(jobs: JobSubmissionClient, job: str, say: Callable[[str], None]) -> int:
    """Its log as it comes; returns the exit code of its command, 143 when it was stopped."""

    async def tail() -> None:
        async for text in jobs.tail_job_logs(job):
            say(text.rstrip("\n"))

    asyncio.run(tail())
    info = _await_end(jobs, job, 60)
    if info.driver_exit_code is not None and info.status != JobStatus.STOPPED:
        return int(info.driver_exit_code)
    if info.status != JobStatus.SUCCEEDED:
        say(f"rtpo: job {job} {info.status.value.lower()}: {info.message}")
    return {JobStatus.SUCCEEDED: 0, JobStatus.STOPPED: 143}.get(info.status, 1)


def stop(jobs: JobSubmissionClient, job: str, seconds: float) -> str:
    """Ask a job to end, which a run does cleanly, and wait until it did; returns its last status. Raises DeadlineExceeded."""
    jobs.stop_job(job)
    return str(_await_end(jobs, job, seconds).status.value)


def _await_end(jobs: JobSubmissionClient, job: str, seconds: float) -> Any:
    until = time.monotonic() + seconds
    while (info := jobs.get_job_info(job)).status not in ENDED:
        if time.monotonic() > until:
            raise DeadlineExceeded(f"waited {seconds:g} s for job {job} to end; it is {info.status.value.lower()}")
        time.sleep(0.5)
    return info


def actors_of(address: str) -> Iterable[str]:
    """One line an actor of ours that is not dead: what it says it is, state, node and process."""
    with _authenticated(address):
        actors = list_actors(address=address, detail=True, limit=10_000, timeout=30)
    for actor in sorted(actors, key=lambda actor: (actor.class_name, actor.name or "")):
        if actor.class_name in OURS and actor.state != "DEAD":
            yield f"{actor.repr_name or actor.class_name:40} {actor.name or '':24} {actor.state:16} node {(actor.node_id or '-')[:8]} pid {actor.pid}"
