"""The ledger: where a run goes on depends on what is on disk, and nothing else."""

import sqlite3
from dataclasses import replace

import pytest

from rtpo_ray.errors import RtpoError
from rtpo_ray.ledger import FILE, Ledger, Progress, state_folder, trunks_folder

START = Progress()
EVALUATED = replace(START, evaluated=0)
TRUNKS = replace(EVALUATED, stage=0, tokens=10)
STAGE_1 = replace(TRUNKS, stage=1, tokens=30, updates=1, version=1)
STAGE_2 = replace(TRUNKS, stage=2, tokens=50, updates=2, version=2)
SWEEP = replace(STAGE_2, sweep=1, stage=-1)
STEPS = ((EVALUATED, "eval"), (TRUNKS, ""), (STAGE_1, "one"), (STAGE_2, "two"), (SWEEP, "sweep"))


@pytest.fixture
def written(tmp_path):
    """A folder with all of STEPS in its ledger, the states of both updates and the trunks of the sweep."""
    with Ledger(tmp_path) as ledger:
        for progress, name in STEPS:
            ledger.append(progress, {"kind": name} if name else None)
    for folder in (state_folder(tmp_path, 1), state_folder(tmp_path, 2), trunks_folder(tmp_path, 0)):
        folder.mkdir(parents=True)
    return tmp_path


def resumed(folder):
    """(progress, forgotten) and the events that are left."""
    with Ledger(folder) as ledger:
        found = ledger.rewind()
        assert ledger.progress == found[0]
        return *found, [event["kind"] for event in ledger.events()]


@pytest.mark.parametrize(("gone", "expected"), [
    ([], (SWEEP, 0, ["eval", "one", "two", "sweep"])),
    ([state_folder("", 2)], (STAGE_1, 2, ["eval", "one"])),  # killed while it was written
    ([state_folder("", 2), state_folder("", 1)], (TRUNKS, 3, ["eval"])),
    ([state_folder("", 2), state_folder("", 1), trunks_folder("", 0)], (EVALUATED, 3, ["eval"])),
    ([trunks_folder("", 0)], (SWEEP, 0, ["eval", "one", "two", "sweep"])),  # not needed any more
    ([state_folder("", 1)], (SWEEP, 0, ["eval", "one", "two", "sweep"]))])
def test_a_run_goes_on_from_the_last_step_whose_state_is_on_disk(written, gone, expected):
    for folder in gone:
        (written / folder).rmdir()
    assert resumed(written) == expected
    assert resumed(written) == (expected[0], 0, expected[2])  # again: nothing more is lost


def test_a_step_whose_weights_the_generators_did_not_have_is_not_built_upon(tmp_path):
    """A stale generator cannot be had again: only the learner's newest weights are kept."""
    with Ledger(tmp_path) as ledger:
        ledger.append(TRUNKS)
        ledger.append(replace(STAGE_1, unpublished=True), {"kind": "one"})
    for folder in (state_folder(tmp_path, 1), trunks_folder(tmp_path, 0)):
        folder.mkdir(parents=True)
    assert resumed(tmp_path) == (TRUNKS, 1, [])


def test_states_of_what_is_forgotten_go_too(written):
    """Were they left, the same update made again would be taken for written before it is."""
    (written / trunks_folder("", 0)).rmdir()
    (written / state_folder("", 2)).rename(written / state_folder("", 3))
    assert resumed(written)[0] == EVALUATED
    assert not any(state_folder(written, number).exists() for number in (1, 2, 3))


def test_who_only_looks_changes_nothing_and_makes_nothing(written, tmp_path):
    before = (written / FILE).read_bytes()
    with Ledger(written, read_only=True) as ledger:
        assert ledger.progress == ledger.resume_point == SWEEP
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            ledger.append(SWEEP)
    assert (written / FILE).read_bytes() == before
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        Ledger(tmp_path / "nowhere", read_only=True)


def test_an_empty_ledger_begins_at_the_beginning(tmp_path):
    assert resumed(tmp_path) == (START, 0, [])


def test_events_carry_their_time_and_come_back_in_order(written):
    with Ledger(written) as ledger:
        made = ledger.append(SWEEP, {"kind": "last", "success": None})
        assert ledger.events()[-1] == made == {"kind": "last", "success": None, "time": made["time"]} and made["time"] > 1.6e9
        assert ledger.append(SWEEP) == {}
        with pytest.raises(ValueError, match="Out of range float"):
            ledger.append(SWEEP, {"loss": float("nan")})


@pytest.mark.parametrize(("at", "keep", "left"), [
    (SWEEP, 2, [4, 5]), (SWEEP, 1, [5]), (SWEEP, 9, [1, 2, 3, 4, 5]),
    (replace(STAGE_1, updates=2), 1, [2, 3, 4, 5])])  # the rest is needed, should the run stop now
def test_old_states_go_but_never_the_one_that_a_resumed_run_needs(tmp_path, at, keep, left):
    for number in range(1, 6):
        state_folder(tmp_path, number).mkdir(parents=True)
    for sweep in (0, 1):
        trunks_folder(tmp_path, sweep).mkdir(parents=True)
    (tmp_path / "states" / "update-000006.writing").mkdir()
    with Ledger(tmp_path) as ledger:
        ledger.append(replace(at, updates=5) if at == SWEEP else at)
        ledger.append(replace(at, updates=6))  # not on disk
        ledger.prune(keep)
    assert [number for number in range(1, 6) if state_folder(tmp_path, number).exists()] == left
    assert [trunks_folder(tmp_path, sweep).exists() for sweep in (0, 1)] == [at.sweep == 0, True]
    assert (tmp_path / "states" / "update-000006.writing").exists()


def test_what_is_no_ledger_is_refused_by_name(tmp_path):
    (tmp_path / FILE).write_text("not a database, but long enough to look like a file of some kind" * 20)
    with pytest.raises(RtpoError, match=r"ledger\.sqlite is not readable as a ledger: file is not a database"):
        Ledger(tmp_path)


def test_a_ledger_of_another_version_is_refused(tmp_path):
    db = sqlite3.connect(tmp_path / FILE)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(RtpoError, match=r"written by another version of rtpo-ray \(its schema is 99; expected 1\)"):
        Ledger(tmp_path)
