"""What headers say of a trajectory."""

from __future__ import annotations

import pytest

from echo_schemas.headers import Header, headers_of
from echo_schemas.records import Purpose
from echo_streams.intake import Identity, Intake, Passed, Stale, identity_of
from tests.unit.core.records import trajectory

INTAKE = Intake("demo", budget=2, drop_stale=True)


def headers(seq: int = 7, *, version: int = 0, purpose: Purpose = Purpose.TRAIN, run_id: str = "demo") -> list[Header]:
    return headers_of(trajectory(seq, 1, attempt="a1", version=version, purpose=purpose, run_id=run_id), source="worker", time_ms=5)


@pytest.mark.parametrize("purpose", Purpose)
def test_a_name_gives_back_what_it_was_made_of(purpose: Purpose) -> None:
    record = trajectory(7, 1, attempt="a1", purpose=purpose)
    assert identity_of(record.name, "demo") == Identity(group_id=record.group_id, seq=7, purpose=purpose, attempt="a1", index=1)


@pytest.mark.parametrize(
    "name",
    [
        *("", "demo", "demo/7", "demo/7/a", "demo/7/a/x", "demo/-7/a/1", "demo/07/a/1"),
        *("demo/train-7/a/1", "demo/test-7/a/1", "demo/7//1", "other/7/a/1"),
    ],
)
def test_a_name_that_is_none_leaves_it_to_the_body(name: str) -> None:
    assert identity_of(name, "demo") is None


def test_another_run_is_passed_over() -> None:
    assert INTAKE.look(headers(run_id="other"), 0) is Passed.OTHER_RUN


def test_a_probe_is_passed_over_at_any_age() -> None:
    assert INTAKE.look(headers(purpose=Purpose.PROBE), 100) is Passed.PROBE


@pytest.mark.parametrize(("learner_version", "is_stale"), [(None, False), (4, False), (6, False), (7, True), (100, True)])
def test_above_the_budget_is_stale(learner_version: int | None, is_stale: bool) -> None:
    found = INTAKE.look(headers(version=4), learner_version)
    if not is_stale:
        assert found is None
        return
    assert found == Stale(Identity(group_id="demo/7", seq=7, purpose=Purpose.TRAIN, attempt="a1", index=1), 4)


def test_an_evaluation_is_never_stale() -> None:
    assert INTAKE.look(headers(purpose=Purpose.EVAL), 100) is None


def test_where_the_learner_downweights_every_age_is_scored() -> None:
    assert Intake("demo", budget=0, drop_stale=False).look(headers(), 100) is None


@pytest.mark.parametrize("missing", ["ce_id", "echo-group", "echo-version", "echo-run"])
def test_headers_that_say_too_little_leave_it_to_the_body(missing: str) -> None:
    kept = [(name, value) for name, value in headers(version=0) if name != missing]
    # The run stands in the sample's name too.
    assert (INTAKE.look(kept, 100) is None) == (missing != "echo-run")


def test_headers_that_are_no_text_or_contradict_one_another_leave_it_to_the_body() -> None:
    assert INTAKE.look([], 100) is None
    assert INTAKE.look([(name, b"\xff\xfe") for name, _ in headers() if name != "echo-run"], 100) is None
    assert INTAKE.look([(name, b"demo/8" if name == "echo-group" else value) for name, value in headers()], 100) is None
    assert INTAKE.look([("ce_id", None), *((name, value) for name, value in headers() if name != "ce_id")], 100) is None  # type: ignore[list-item]
