"""The scene that the chaos suite's tests share; seeds and kept histories in the summary of a test run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.scene import Scene, dump_log, open_scene
from tests.chaos.schedule import Outcome, table
from tests.installed import missing
from tests.thorough import IS_THOROUGH

SEED_VARIABLE, FOLDER_VARIABLE = "ECHO_CHAOS_SEED", "ECHO_CHAOS_FOLDER"
_BEGINS_WITHIN_S = 400.0
_told: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _told:
        terminalreporter.section("chaos")
        for line in _told:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def seed() -> int:
    """Of all schedules; ECHO_CHAOS_SEED names another."""
    return int(os.environ.get(SEED_VARIABLE, "6"))


@pytest.fixture(scope="session")
def outcomes() -> list[Outcome]:
    """What the tests met, for the summary."""
    return []


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest, jars: None, seed: int, outcomes: list[Outcome]) -> Iterator[Scene]:
    """A run that has made its first steps. If a test fails, its log and its roles' logs are kept."""
    if absent := missing("transformers", "faust", "deepspeed"):
        pytest.skip(f"{absent} are missing: install the extra 'all-cpu'")
    parent = os.environ.get(FOLDER_VARIABLE)
    folder = Path(tempfile.mkdtemp(prefix=f"echoswarm-chaos-{seed}-", dir=parent))
    failed_before = request.session.testsfailed
    # Steps are as quick as they can be where nothing runs beside them.
    with open_scene(folder, {} if IS_THOROUGH else {"ECHO_SCORING__CONCURRENCY": "1"}) as opened:
        opened.wait_for(3, _BEGINS_WITHIN_S, "the run begins")
        yield opened
        _told.append(
            f"seed {seed} ({SEED_VARIABLE}); {opened.follower.version} steps"
            + "".join(f"; no {name}: {why}" for name, why in opened.without.items())
        )
        _told.extend(table(outcomes))
        is_kept = request.session.testsfailed > failed_before
        if is_kept:
            num_records = dump_log(opened.bus, folder / "records.jsonl")
            _told.append(f"history kept in {folder}: {num_records} records, logs of all roles")
    if not is_kept:
        shutil.rmtree(folder, ignore_errors=True)
