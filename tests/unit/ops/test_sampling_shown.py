"""`echoswarm show` says from what a sample's tokens were drawn."""

from __future__ import annotations

from typing import Any

import pytest

from echo_ops.cli.show import _drawn_line
from echo_schemas.records import LogprobDistribution, LogprobSource, Sampling
from tests.unit.core.records import trajectory


@pytest.mark.parametrize(
    ("sampling", "fields", "line"),
    [
        ({}, {}, "temperature 1"),
        ({"temperature": 0.7, "top_p": 0.95}, {}, "temperature 0.7, top_p 0.95; log-probabilities of what was left to draw from"),
        (
            {"top_k": 40, "min_p": 0.1},
            {"logprob_distribution": LogprobDistribution.FULL},
            "temperature 1, top_k 40, min_p 0.1; log-probabilities of the whole distribution",
        ),
        ({}, {"logprob_source": LogprobSource.RECOMPUTED}, "temperature 1; the learner computes the log-probabilities"),
    ],
)
def test_what_tokens_were_drawn_from(sampling: dict[str, Any], fields: dict[str, Any], line: str) -> None:
    assert _drawn_line(trajectory(0, 0, sampling=Sampling(max_new_tokens=4, **sampling), **fields)) == line
