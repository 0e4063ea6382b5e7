"""Which protocol a learner follows."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_learner.run import run_learner
from echo_schemas.errors import UserError
from tests.unit.learner.pipeline import Pipeline


def test_a_learner_says_that_it_asks_for_no_batches_instead_of_waiting_for_them(pipeline: Pipeline) -> None:
    with pytest.raises(UserError, match="sequential mode") as caught:
        run_learner(pipeline.process(run={"name": "r", "mode": "sequential"}))
    assert "budget = 0" in caught.value.hint
