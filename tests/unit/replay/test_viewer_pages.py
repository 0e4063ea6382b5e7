"""The viewer's pages: what each says of the sound run, in windows, as JSON without NaN."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_ops.viewer.drawings import Drawings
from echo_ops.viewer.dropped import dropped_page
from echo_ops.viewer.lineage import lineage_page
from echo_ops.viewer.metrics import Frame, metrics_page
from echo_ops.viewer.overview import overview_page
from echo_ops.viewer.samples import group_page, trajectory_page
from echo_ops.viewer.steps import SORTS, find_step, histogram, step_page, steps_page
from echo_ops.viewer.windows import Json, Window, number, shown
from echo_replay.history import History
from echo_replay.selection import Fate
from echo_replay.steps import read_batch
from echo_schemas.errors import UserError
from echo_schemas.records import Progress, Trajectory
from echo_schemas.topics import PROGRESS
from echo_tasks.sokoban import Sokoban
from echo_tasks.sokoban.board import drawn
from tests.examples import load_examples
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, sample
from tests.unit.replay.forged import STEPS_TRAINED, SoundRun, only

SAMPLES = GROUPS_PER_STEP * GROUP_SIZE


@pytest.fixture(scope="module")
def history(sound: SoundRun) -> Iterator[History]:
    with History(sound.pipeline.bus, "demo") as history:
        yield history


def as_json(page: Json) -> Json:
    json.dumps(page, allow_nan=False)
    return page


def step_of(history: History, version: int, window: Window = Window(), sort: str = "spread") -> Json:  # noqa: B008  frozen
    step = find_step(history, version)
    return as_json(step_page(history, step, read_batch(history.bus, step), window, sort))


def test_overview_says_how_far_it_is_and_what_nobody_says(history: History) -> None:
    page = as_json(overview_page(history, None, {}, {}, 0))
    assert page["version"] == page["num_steps"] == STEPS_TRAINED
    assert page["num_trained"] == STEPS_TRAINED * SAMPLES
    assert page["num_dropped"] > 0
    assert any("has not said yet" in each for each in page["troubles"])


def test_a_run_that_has_ended_is_no_alarm_but_a_silent_learner_is(history: History) -> None:
    progress = next(each for each in load_examples(PROGRESS).values() if isinstance(each, Progress))
    later_ms = progress.time_ms + 600_000
    assert overview_page(history, progress, {}, {}, later_ms)["ended_s"] == 600
    assert overview_page(history, progress, {}, {}, progress.time_ms + 1_000)["troubles"] == ["No worker is at work."]


def test_curves_are_exact_for_few_steps_and_stretches_for_many(history: History) -> None:
    reports = [step.report for step in history.log.steps]
    every = as_json(metrics_page(reports, ["reward: exact", "nothing"], Frame()))
    assert every["versions"] == list(range(1, STEPS_TRAINED + 1))
    assert every["unknown"] == ["nothing"]
    means = every["curves"]["reward: exact"]["mean"]
    few = metrics_page(reports, ["reward: exact"], Frame(most_points=2))
    assert few["steps_a_point"] == 3
    assert few["versions"] == [3, 6]
    assert few["curves"]["reward: exact"]["mean"] == pytest.approx([np.mean(means[:3]), np.mean(means[3:])])
    assert few["curves"]["reward: exact"]["high"][0] == max(means[:3])
    assert metrics_page(reports, [], Frame(first=2, last=3))["versions"] == [2, 3]


def test_another_run_is_drawn_beside_this_one_by_its_own_versions(history: History) -> None:
    reports = [step.report for step in history.log.steps]
    page = as_json(metrics_page(reports, ["reward: exact"], Frame(), {"fork": reports[2:4]}))
    assert page["others"]["fork"]["versions"] == [3, 4]
    assert page["others"]["fork"]["curves"]["reward: exact"]["mean"] == page["curves"]["reward: exact"]["mean"][2:4]


def test_steps_come_newest_first_in_windows(history: History) -> None:
    page = as_json(steps_page(history, Window(1, 2)))
    assert [each["version"] for each in page["steps"]] == [STEPS_TRAINED - 1, STEPS_TRAINED - 2]
    assert page["window"] == {"offset": 1, "limit": 2, "total": STEPS_TRAINED}


def test_a_step_shows_what_was_trained(history: History) -> None:
    page = step_of(history, 2)
    assert (page["previous"], page["next"]) == (1, 3)
    assert sum(page["histograms"]["exact"]["counts"]) == SAMPLES == sum(page["staleness"]["total"])
    assert page["window"]["total"] == len(page["groups"]) == GROUPS_PER_STEP
    assert all(group["spread"] > 0 and group["advantage_most"] > 0 for group in page["groups"])
    assert len(step_of(history, 2, Window(1, 1))["groups"]) == 1
    assert {tuple(sorted(group["seq"] for group in step_of(history, 2, sort=sort)["groups"])) for sort in SORTS} == {
        tuple(sorted(group["seq"] for group in page["groups"]))
    }
    with pytest.raises(UserError, match="no report of step 90"):
        find_step(history, 90)


def test_a_group_stands_side_by_side_with_every_attempt(history: History) -> None:
    page = as_json(group_page(history, "1", Window()))
    assert page["step"] == 1
    assert Counter(each["fate"] for each in page["samples"])[Fate.TRAINED] == GROUP_SIZE
    assert page["window"]["total"] == 2 * GROUP_SIZE, "the attempt that came second belongs to the group too"
    assert [each["became"] for each in page["samples"][:GROUP_SIZE]] == ["trained in v1"] * GROUP_SIZE
    assert {each["rewards"]["exact"] for each in page["samples"]} == {float(index) for index in range(GROUP_SIZE)}
    assert len(group_page(history, "1", Window(0, 1))["samples"]) == 1
    assert group_page(history, "eval-0", Window())["samples"][0]["fate"] == Fate.EVALUATED
    with pytest.raises(UserError, match="no group 900"):
        group_page(history, "900", Window())


def test_from_the_curve_to_the_token_by_what_the_pages_name(history: History) -> None:
    version = metrics_page([step.report for step in history.log.steps], [], Frame())["versions"][-1]
    seq = step_of(history, version)["groups"][0]["seq"]
    member = group_page(history, str(seq), Window())["samples"][0]
    page = as_json(trajectory_page(history, member["partition"], member["offset"], Window(), None, Drawings()))
    assert page["step"] == version
    assert page["group"] == str(seq)
    generated = sum(span["end"] - span["start"] for span in page["spans"])
    assert sum(value is not None for value in page["tokens"]["logprobs"]) == generated == page["num_generated"]
    assert page["turns"][-1]["end"] == len(page["tokens"]["ids"]) == page["num_tokens"]


def test_tokens_come_in_windows_with_their_texts(history: History) -> None:
    member = group_page(history, "1", Window())["samples"][0]
    place = member["partition"], member["offset"]
    whole = trajectory_page(history, *place, Window(), lambda ids: [f"<{token}>" for token in ids], Drawings())
    part = trajectory_page(history, *place, Window(1, 1), lambda ids: [f"<{token}>" for token in ids], Drawings())
    for name in ("ids", "texts", "logprobs"):
        assert part["tokens"][name] == whole["tokens"][name][1:2]
    assert trajectory_page(history, *place, Window(900, 5), None, Drawings())["tokens"]["ids"] == []


def test_a_record_that_nobody_can_read_is_shown_as_such(history: History) -> None:
    dead = next(each for each in history.read(rewards=False) if each.trajectory is None)
    page = as_json(trajectory_page(history, dead.where.partition, dead.where.offset, Window(), None, Drawings()))
    assert page["fate"] == Fate.DEAD
    assert page["tokens"] is None


def test_drops_are_counted_and_filtered(history: History) -> None:
    page = as_json(dropped_page(history, Window()))
    assert sum(page["reasons"].values()) == page["num_dropped"] == len(page["drops"]) == sum(each["count"] for each in page["versions"])
    reason, count = next(iter(page["reasons"].items()))
    some = dropped_page(history, Window(0, 1), reason=reason)
    assert some["window"]["total"] == count
    assert len(some["drops"]) == 1
    assert sum(page["lengths"]["counts"]) == sum(each["num_tokens"] > 0 and each["offset"] is not None for each in page["drops"]) > 0
    assert any(each["sampled_by"] == 0 for each in page["drops"])
    assert dropped_page(history, Window(), worker="nobody")["drops"] == []


def test_what_a_policy_wrote_is_shown_and_does_nothing(sound: SoundRun, tmp_path: Path) -> None:
    text = "<script>alert(1)</script>\x1b[2J\u202e"
    copy = sound.forge(tmp_path, only(Trajectory, lambda record: [replace(record, completion=text)]))
    with History(copy.bus, "demo") as history:
        page = group_page(history, "1", Window())
    assert page["samples"][0]["answer"]["text"] == "<script>alert(1)</script>␛[2J\\u202e"


def test_a_sokoban_episode_is_played_again(history: History) -> None:
    task = Sokoban(size=(5, 5), boxes=1, moves=(2, 6), reward="success", style="board", rounds=1)
    level = task.level(0, 3)
    entry = json.dumps({"board": drawn(level.room, level.state), "moves": len(level.solution)})
    answer = f"<answer>{' || '.join(level.solution)}</answer>"
    played = replace(sample(0, 0), task="sokoban", entry=entry, completion=answer)
    frames = Drawings().of(played, None, "{}")
    assert [frame["label"].split()[1] for frame in frames[1:]] == [move.value for move in level.solution]
    assert "√" in frames[-1]["board"]
    assert "X" not in frames[-1]["board"]
    assert Drawings().of(replace(played, entry="{}"), None, "{}") == []
    assert Drawings().of(replace(played, task="other"), None, "{}") == []
    assert "no_answer" in Drawings().of(replace(played, completion="no answer"), None, '{"task": 7}')[1]["label"]


def test_a_user_draws_a_task_and_a_drawing_that_fails_says_so(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def frames(entry, answers):\n    yield 'grid', entry['grid'] + '\\x1b[2J'\n    yield 'answer', answers[7]\n")
    found = Drawings.parse([f"mine={file}:frames"]).of(replace(sample(0, 0), task="mine", entry='{"grid": "x.o"}'), None, "{}")
    assert found[0] == {"label": "grid", "text": "x.o␛[2J"}
    assert "IndexError" in found[1]["text"]
    for wrong in ("mine", f"mine={file}:nothing", f"mine={tmp_path}/none.py:frames"):
        with pytest.raises(UserError):
            Drawings.parse([wrong])


def test_a_hand_of_poker_is_played_again() -> None:
    pytest.importorskip("pyspiel", reason="hands are played by OpenSpiel: install the extra 'tasks'")
    entry = json.dumps({"cards": [2, 0], "seat": 0, "opponent": "call-station", "seed": "s"})
    played = replace(sample(0, 0), task="kuhn-poker", entry=entry, completion="<answer>Bet</answer>")
    deal, end = Drawings().of(played, None, "{}")
    assert (deal["table"]["hand"], deal["table"]["pot"]) == (("King",), 2)
    assert (end["label"], end["table"]["pot"]) == ("answer 1: bet, +2", 4)
    assert Drawings().of(replace(played, entry="{}"), None, "{}") == []


def test_a_version_knows_what_made_it_and_what_became_of_its_samples(history: History) -> None:
    page = as_json(lineage_page(history, 2))
    assert (page["previous"], page["next"]) == (1, 3)
    assert sum(each["count"] for each in page["step"]["sampled_by"]) == page["step"]["num_samples"] == SAMPLES
    assert page["step"]["sampled_by"][0]["version"] == 0
    first = lineage_page(history, 0)
    assert first["step"] is None
    assert first["dropped"]["stale"] > 0
    # Offline ones were sampled by no version.
    live = [each for each in history.read(rewards=False) if each.trajectory and not each.trajectory.is_exempt]
    told = Counter(each.step for each in live if each.step and each.trajectory and each.trajectory.min_version == 0)
    assert {each["step"]: each["count"] for each in first["trained"]} == dict(told)
    with pytest.raises(UserError, match="no version 90"):
        lineage_page(history, 90)


def test_histograms_keep_few_values_exactly() -> None:
    assert histogram(np.array([0.0, 1.0, 1.0, np.nan])) == {"values": [0.0, 1.0], "counts": [1, 2]}
    many = histogram(np.linspace(0, 1, 1_000))
    assert sum(many["counts"]) == 1_000
    assert len(many["edges"]) == len(many["counts"]) + 1


def test_numbers_and_texts_fit_into_json() -> None:
    assert number(float("nan")) is None
    assert shown("abcdef", 3) == {"text": "abc", "length": 6, "is_cut": True}
