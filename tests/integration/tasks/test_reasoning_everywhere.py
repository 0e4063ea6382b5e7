"""reasoning-gym whole: every data set makes items that its own scorer rewards, and another process makes the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from echo_tasks.procedural import dataset_names, item, score

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# They give items without a reference answer; the scorer judges what an answer does.
WITHOUT_REFERENCE = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
_SAMPLED = ("knights_knaves", "sokoban")
_PROGRAM = f"import json; from echo_tasks.procedural import item; print(json.dumps([item(name, {{}}, 1, 2) for name in {_SAMPLED}]))"


# One of its libraries leaves files to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_data_set_makes_items_that_travel_as_json_and_are_rewarded() -> None:
    found = {}
    for name in dataset_names():
        made = item(name, {}, -3, 2**62)
        assert made["question"], name
        assert json.loads(json.dumps(made)) == made, name
        if made["answer"] is not None:
            found[name] = score(name, {}, made["answer"], made)
    assert set(dataset_names()) - set(found) == WITHOUT_REFERENCE
    assert {name: value for name, value in found.items() if value != 1.0} == {}


def test_items_are_the_same_in_another_process() -> None:
    """With another hash seed: what is asked again after a restart is what was asked."""
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, env=environ, timeout=500)
    assert json.loads(done.stdout) == [item(name, {}, 1, 2) for name in _SAMPLED]
