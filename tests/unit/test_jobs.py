"""Jobs through a client that answers as told; a real one is in the integration tests."""

from types import SimpleNamespace

import pytest
from ray.job_submission import JobStatus

from actors import jobs
from rtpo_ray import cli
from rtpo_ray.errors import DeadlineExceeded, RtpoError
from rtpo_ray.ledger import Ledger, Progress


class Client:
    """A job that says `log` and then has the statuses one after the other."""

    def __init__(self, *statuses, code=None, log=("a\n", "b\nc\n")):
        self.statuses, self.code, self.log, self.submitted, self.stopped = list(statuses), code, log, [], []

    def submit_job(self, **what):
        self.submitted.append(what)
        return "job-1"

    async def tail_job_logs(self, job):
        for text in self.log:
            yield text

    def get_job_info(self, job):
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return SimpleNamespace(status=status, driver_exit_code=self.code, message="why it ended")

    def stop_job(self, job):
        self.stopped.append(job)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += seconds

    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep))


@pytest.mark.parametrize(("status", "code", "expected", "last"), [
    (JobStatus.SUCCEEDED, 0, 0, "b\nc"), (JobStatus.FAILED, 2, 2, "b\nc"), (JobStatus.FAILED, None, 1, "rtpo: job j failed: why it ended"),
    (JobStatus.STOPPED, 143, 143, "rtpo: job j stopped: why it ended"), (JobStatus.SUCCEEDED, None, 0, "b\nc")])
def test_following_a_job_says_its_log_and_returns_its_exit_code(status, code, expected, last):
    said = []
    assert jobs.follow(Client(JobStatus.RUNNING, JobStatus.RUNNING, status, code=code), "j", said.append) == expected
    assert said[:2] == ["a", "b\nc"] and said[-1] == last


def test_what_is_submitted():
    client = Client(JobStatus.PENDING)
    assert jobs.submit(client, ["--config", "a b.yaml", "run.name=x"], ".", {"run": "x"}) == "job-1"
    (what,) = client.submitted
    assert what["entrypoint"] == "python -m rtpo_ray train --config 'a b.yaml' run.name=x" and what["metadata"] == {"run": "x"}
    assert what["runtime_env"]["working_dir"] == "." and "/runs/" in what["runtime_env"]["excludes"]


def test_stopping_waits_for_the_end_and_not_for_ever():
    client = Client(JobStatus.RUNNING, JobStatus.STOPPED)
    assert jobs.stop(client, "j", 5) == "STOPPED" and client.stopped == ["j"]
    with pytest.raises(DeadlineExceeded, match=r"waited 5 s for job j to end; it is running"):
        jobs.stop(Client(JobStatus.RUNNING), "j", 5)


def test_an_address_where_nobody_answers_is_named():
    with pytest.raises(RtpoError, match=r"--address http://127.0.0.1:1: no Ray dashboard answers there"):
        jobs.client("http://127.0.0.1:1")


def test_submit_reads_the_configuration_before_anything_is_sent(monkeypatch, capsys):
    client = Client(JobStatus.SUCCEEDED, code=0)
    monkeypatch.setattr(jobs, "client", lambda address: client)
    assert cli.main(["submit", "--address", "http://h:1", "learner.lrr=1"]) == 2 and client.submitted == []
    assert cli.main(["submit", "--address", "http://h:1", "--config", "/etc/a.yaml"]) == 2 and client.submitted == []
    assert cli.main(["submit", "--address", "http://h:1", "learner.ranks=999", "run.name=big"]) == 0  # what the cluster has is not known here
    (what,) = client.submitted
    assert what["metadata"]["run"] == "big" and len(what["metadata"]["config"]) == 12
    assert what["entrypoint"].endswith("train learner.ranks=999 run.name=big") and "job job-1: run big" in capsys.readouterr().out


def test_status_of_a_run_in_its_middle(tmp_path, capsys):
    with Ledger(tmp_path) as ledger:
        evaluation = {"kind": "eval", "sweep": 0, "tasks": 16, "success": 0.25, "failed": {"E: x": 2}, "retired": {"g": "died"}}
        ledger.append(Progress(evaluated=0), evaluation)
        stage = {"kind": "stage", "sweep": 0, "turn": 2, "success": 0.5, "zero_advantage_rate": 0.125, "seconds": {"total": 2.5}, "failed": {}}
        ledger.append(Progress(stage=1, tokens=1234, updates=1, version=1), stage)
    assert cli.main(["status", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["sweep 1 under way, 1 stages done; weights v1, 1 updates, 1,234 generated tokens",
                         "success 25.0 % on 16 held-out tasks after 0 sweeps",
                         "last stage: sweep 1, turn 2: success 50.0 %, equal 12.5 %, 2.5 s", "2 rollouts lost, 1 generators retired, resumed 0 times"]
    assert lines[4].startswith("last step ended ")


def test_status_of_no_run(tmp_path, capsys):
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "holds no ledger.sqlite, so no run has begun there" in capsys.readouterr().err
