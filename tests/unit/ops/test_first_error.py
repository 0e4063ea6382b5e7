"""A role that ends by an error says that error, and not what closing its clients met afterwards."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from echo_bus.errors import ClusterUnreachable, DeadlineExceeded
from echo_ops.cli.run import first_error

ENDED_BY = ClusterUnreachable("No broker answers.")


def cannot_flush() -> None:
    raise DeadlineExceeded("23 records were not acknowledged within 10 s; they may still be.")


def end() -> None:
    with ExitStack() as clients:
        clients.callback(cannot_flush)
        clients.callback(cannot_flush)
        raise ENDED_BY


def end_with_a_cause() -> None:
    try:
        raise ENDED_BY
    except ClusterUnreachable as exc:
        raise DeadlineExceeded("The coordinator did not answer.") from exc


def test_what_closing_meets_does_not_hide_what_ended_the_role() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        end()
    assert first_error(caught.value) is ENDED_BY


def test_an_error_that_names_its_cause_is_the_one() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        end_with_a_cause()
    assert first_error(caught.value) is caught.value
