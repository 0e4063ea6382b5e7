"""A learner that waits while all that comes is dropped says so, and why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from echo_core.groups import DropDecision
from echo_learner.drops_since import DropsSinceBatch
from echo_schemas.records import DropReason
from tests.unit.core.records import at
from tests.unit.learner.test_intake import Setup


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.intake.close()


def test_a_wait_names_what_was_dropped_and_why_until_there_is_a_batch(setup: Setup) -> None:
    setup.intake.start(None)
    setup.intake.expect_weights("f" * 64)
    for number in range(2):
        setup.feed_group(number, number)
    setup.wait_until(lambda: setup.intake.num_ready == 2, "two groups are ready")
    assert setup.batch(timeout_s=0.02) is None
    setup.intake.settle()
    said = setup.intake.describe_wait()
    assert "Since the last batch samples were dropped: 4 as wrong_version. The last one: A sample comes from the weights" in said
    assert "Nothing else has come" not in said
    setup.intake.expect_weights("0" * 64)
    for number in range(2, 4):
        setup.feed_group(number, number, weights_sha256="0" * 64)
    assert setup.batch() == [2, 3]
    assert "dropped" not in setup.intake.describe_wait()


def test_reasons_are_counted_by_sample_and_groups_give_the_sentence() -> None:
    dropped = DropsSinceBatch()
    assert dropped.sentence() == ""
    dropped.add(DropDecision(seq=0, why=DropReason.STALE, where=at(place)) for place in range(1200))
    assert dropped.sentence() == "Since the last batch samples were dropped: 1,200 as stale."
    dropped.add([DropDecision(seq=1, why=DropReason.FAILED, detail="No."), DropDecision(seq=1, why=DropReason.FAILED, where=at(0))])
    assert dropped.sentence() == "Since the last batch samples were dropped: 1,200 as stale, 1 as failed. The last one: No."
