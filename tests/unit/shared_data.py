"""Public data sets for tests, kept outside of the project."""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("RTPO_DATA", Path(__file__).parents[3] / "shared" / "data"))


def shared_data(name: str) -> Path:
    """A file of the folder RTPO_DATA, by default ../shared/data beside the project. Skips the test where it is absent."""
    if not (FOLDER / name).is_file():
        pytest.skip(f"{FOLDER / name} is absent; set RTPO_DATA to the folder that holds it")
    return FOLDER / name


def shared_rows(name: str) -> list[dict]:
    """The rows of a jsonl file there."""
    return [json.loads(line) for line in shared_data(name).read_text().splitlines()]
