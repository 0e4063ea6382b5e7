"""The model of a run, its summary and its lines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_core.bottleneck import Place, PlaceUse
from echo_ops.report import run_view
from echo_ops.report.observer import parse_places
from echo_ops.report.plain import PlainLines, closing_lines
from echo_ops.report.run_view import Milestone, RunView
from echo_ops.report.summary import seconds_to, summarise_run
from echo_schemas.records import DropReason, Progress, RewardTerm
from echo_schemas.topics import PROGRESS
from tests.unit.ops.views import drop, empty_view, example, learning_view, manifest, status, step


def summary_of(view: RunView) -> dict[str, object]:
    return summarise_run(view, wall_s=30.0, outcome="finished", software={"python": "3.11"})


def test_the_reward_is_the_exact_match_and_its_mean_runs_over_ten_steps() -> None:
    view = learning_view(20)
    assert view.is_exact
    assert view.steps[0].reward == pytest.approx(0.03)
    means = view.mean_rewards()
    assert means[0] == pytest.approx(0.03)
    assert means[9] == pytest.approx(0.03 * 5.5)
    assert means[19] == pytest.approx(0.03 * 15.5)


def test_a_step_that_is_reported_again_counts_once_and_version_0_is_no_step() -> None:
    view = empty_view()
    view.apply(step(0, 5.0, 0.0, histogram=()))
    for number in (1, 2, 2, 1):
        view.apply(step(number, 10.0 + number, 0.5))
    assert [found.number for found in view.steps] == [1, 2]
    assert view.milestones[Milestone.STEP] == 11.0


def test_a_run_that_goes_on_is_shown_from_the_command_on() -> None:
    view = RunView("demo", started_ms=20_000, steps_wanted=40, budget=3)
    for record in (manifest(2, 11.0), status("dead", 11.5, version=2), step(2, 12.0, 0.1), step(3, 12.5, 0.1)):
        view.apply(record)
    view.apply(replace(example(PROGRESS, Progress), version=3, time_ms=12_500))
    assert not view.steps
    assert not view.milestones
    assert not view.pool.lines()
    assert not view.broadcasts()
    assert view.num_steps == 3
    for record in (step(4, 30.0, 0.2), step(5, 30.5, 0.3)):
        view.apply(record)
    summary = summary_of(view)
    assert (summary["steps"], summary["seconds_to_first_step"], summary["s_per_step"]) == (2, 10.0, 0.5)
    assert view.num_steps == 5


def test_a_run_that_goes_on_installs_another_version_than_0() -> None:
    view = RunView("demo", started_ms=20_000, steps_wanted=100, budget=3)
    for record in (status("w", 21.0, version=60), manifest(61, 22.0), status("w", 23.0, version=61)):
        view.apply(record)
    assert view.words_of(Milestone.INSTALLED) == "version 60 installed"
    assert view.words_of(Milestone.PUBLISHED) == "version 61 published"
    assert empty_view().words_of(Milestone.INSTALLED) == "version 0 installed"


def test_rewards_of_the_file_that_are_not_in_force_are_said() -> None:
    view = empty_view()
    assert view.other_rewards({"exact": 0.5}) == ""
    view.apply(replace(step(1, 10.0, 0.5), reward_terms=(RewardTerm(name="exact", weight=1.0),)))
    assert view.other_rewards({"exact": 1.0}) == ""
    assert "trained with exact = 1, its first rewards" in view.other_rewards({"exact": 0.5})
    assert "are not in force" in view.other_rewards({"exact": 1.0, "brevity": 0.2})


def test_staleness_adds_up_over_steps_of_different_widths() -> None:
    view = empty_view()
    view.apply(step(1, 1.0, 0.1, histogram=(8,)))
    view.apply(step(2, 2.0, 0.1, histogram=(1, 3, 4)))
    assert view.staleness() == (9, 3, 4)
    assert view.staleness(last=1) == (1, 3, 4)


def test_the_wait_for_the_start_up_is_not_part_of_the_bubble() -> None:
    view = empty_view()
    view.apply(step(1, 10.0, 0.1))
    assert view.bubble_ratio() is None
    view.apply(step(2, 10.5, 0.1))
    assert view.bubble_ratio() == pytest.approx(0.2)


def test_pace_throughput_and_time_to_go() -> None:
    view = learning_view(30)
    assert view.s_per_step() == pytest.approx(0.5)
    assert view.samples_per_s() == pytest.approx(20.0)
    assert view.eta_s() == pytest.approx(5.0)
    assert empty_view().eta_s() is None


def test_a_version_is_installed_when_each_worker_first_names_it() -> None:
    view = empty_view()
    view.apply(manifest(2, 11.0))
    for time_s in (11.2, 12.2):
        view.apply(status("worker-0", time_s, version=2))
    view.apply(status("worker-1", 11.5, version=2))
    (cast,) = view.broadcasts()
    assert (cast.version, cast.created_s, cast.installed_s) == (2, 11.0, {"worker-0": 11.2, "worker-1": 11.5})


def test_busy_shares_come_from_one_heartbeat_to_the_next() -> None:
    view = empty_view()
    for time_s, busy_s in ((1.0, 0.5), (2.0, 1.25), (2.0, 1.25), (4.0, 1.0)):
        view.apply(status("w", time_s, busy_s=busy_s))
    assert view.busy_intervals() == {"w": [(1.0, 2.0, 0.75), (2.0, 4.0, 0.0)]}


def test_places_count_from_the_first_step_and_a_process_that_ended_stays_counted() -> None:
    view = empty_view()
    view.read_places("worker-0", {Place.GENERATION: PlaceUse(empty_s=10.0)})
    view.close_reading(5.0)
    view.apply(step(1, 6.0, 0.1))
    view.read_places("worker-0", {Place.GENERATION: PlaceUse(busy_s=1.0, empty_s=10.0)})
    view.close_reading(6.0)
    view.read_places("worker-0", {Place.GENERATION: PlaceUse(busy_s=3.0, empty_s=10.0)})
    view.read_places("worker-1", {Place.GENERATION: PlaceUse(busy_s=1.0, empty_s=1.0)})
    view.read_places("learner", {Place.TRAIN: PlaceUse(busy_s=1.0, empty_s=1.0)})
    view.close_reading(8.0)
    assert view.place_use() == {Place.GENERATION: PlaceUse(busy_s=3.0, empty_s=1.0), Place.TRAIN: PlaceUse(busy_s=1.0, empty_s=1.0)}
    assert view.bottleneck().place is Place.GENERATION


def test_recent_use_forgets_what_lies_further_back() -> None:
    view = empty_view()
    for time_s in range(40):
        busy = min(20, time_s)
        view.read_places("learner", {Place.TRAIN: PlaceUse(busy_s=busy, empty_s=time_s - busy)})
        view.close_reading(time_s)
    assert view.place_use(recent=True)[Place.TRAIN] == PlaceUse(empty_s=15.0)


def test_the_summary_has_the_promised_keys_and_their_values() -> None:
    view = learning_view(30)
    for reason in (DropReason.STALE, DropReason.STALE, DropReason.EXPIRED):
        view.apply(drop(reason))
    found = summary_of(view)
    assert found["steps"] == 30
    assert found["reward_first"] == pytest.approx(0.165)
    assert found["reward_last"] == pytest.approx(0.765)
    assert found["seconds_to_first_step"] == pytest.approx(10.5)
    assert found["wall_seconds"] == 30.0
    assert found["s_per_step"] == pytest.approx(0.5)
    assert found["max_staleness"] == 1
    assert found["dropped"] == {"expired": 1, "stale": 2}
    assert found["trajectories_published"] == 307
    assert found["trajectories_trained"] == 300
    assert found["bubble_ratio"] == pytest.approx(0.2)
    assert found["t_bcast_p50_s"] == pytest.approx(0.06)
    assert found["t_train_p50_s"] == pytest.approx(0.4)
    assert found["rollouts_per_step"] == 10
    assert found["seconds_to_070"] == pytest.approx(10 + 0.5 * 28)
    assert found["learner_outside_compute"] == pytest.approx(0.08)
    assert found["logprob_max_diff"] == 2e-5
    assert found["logprob_samples"] == 120


def test_a_run_without_a_step_has_a_summary_of_nothing() -> None:
    found = summary_of(empty_view())
    for key in ("reward_first", "reward_last", "seconds_to_first_step", "s_per_step", "max_staleness", "bubble_ratio", "t_bcast_p50_s"):
        assert found[key] is None, key
    for key in ("seconds_to_070", "learner_outside_compute", "logprob_max_diff"):
        assert found[key] is None, key
    assert (found["steps"], found["dropped"], found["logprob_samples"]) == (0, {}, 0)


def test_the_goal_counts_only_for_ten_whole_steps() -> None:
    view = empty_view()
    for number in range(1, 10):
        view.apply(step(number, float(number), 0.9))
    assert seconds_to(view, 0.7) is None
    view.apply(step(10, 10.0, 0.9))
    assert seconds_to(view, 0.7) == 10.0


def test_without_the_learners_measurement_the_log_says_how_long_weights_took() -> None:
    view = empty_view()
    view.apply(step(1, 1.0, 0.1))
    view.apply(manifest(1, 2.0))
    view.apply(status("worker-0", 2.5, version=1))
    assert summary_of(view)["t_bcast_p50_s"] == pytest.approx(0.5)


def test_places_are_read_from_the_text_of_a_scrape() -> None:
    text = (
        "# TYPE echo_place_seconds_total counter\n"
        'echo_place_seconds_total{place="train",use="busy"} 12.5\n'
        'echo_place_seconds_total{place="train",use="empty"} 1e-05\n'
        'echo_place_seconds_created{place="train",use="busy"} 1.7e+09\n'
        'echo_bus_lag{topic="x"} 3\n'
    )
    assert parse_places(text) == {Place.TRAIN: PlaceUse(busy_s=12.5, empty_s=1e-05)}


def test_lines_are_said_once_and_in_the_order_of_time() -> None:
    lines = PlainLines()
    view = empty_view()
    view.note(Milestone.TOPICS, 3.1)
    view.note(Milestone.KAFKA, 2.9)
    assert list(lines.news(view)) == ["   2.9 s  Kafka answers", "   3.1 s  topics are there"]
    view.apply(step(1, 12.44, 0.221))
    first, second = lines.news(view)
    assert first == "  12.4 s  first step"
    assert second == "  12.4 s  step 1/40  reward 0.221 (mean of 10: 0.221)  staleness max 1  waited 0.10 s  trained 0.40 s"
    assert list(lines.news(view)) == []


def test_a_milestone_that_is_learned_of_late_is_still_said() -> None:
    lines = PlainLines()
    view = empty_view()
    view.note(Milestone.TOPICS, 3.0)
    assert len(list(lines.news(view))) == 1
    view.note(Milestone.KAFKA, 2.0)
    assert list(lines.news(view)) == ["   2.0 s  Kafka answers"]


def test_the_closing_lines_say_what_was_reached() -> None:
    lines = closing_lines(summary_of(learning_view(30)), "exact match")
    assert 6 <= len(lines) <= 8
    assert lines[0] == "finished: 30 steps in 30 s, the first after 10.5 s, then 0.50 s a step"
    assert lines[1].startswith("exact match: 0.165 → 0.765")
    assert "0.70 after 24 s" in lines[1]


def test_what_is_kept_of_workers_and_versions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_view, "_MOST_READINGS", 400)
    monkeypatch.setattr(run_view, "_KEPT_INSTALLS", 20)
    view = empty_view()
    word, made = status("w", 0.0, busy_s=0.0, version=0), manifest(0, 0.0)
    for version in range(50):
        view.apply(replace(made, version=version, created_ms=made.created_ms + 1000 * version))
        for tenth in range(10):
            at_ms = 1000 * version + 100 * tenth
            view.apply(replace(word, installed_version=version, time_ms=word.time_ms + at_ms, busy_s=at_ms / 2000))
        view.apply(replace(word, worker_id="slow", installed_version=version, time_ms=word.time_ms + 1000 * version + 550))
    intervals = view.busy_intervals()["w"]
    assert len(intervals) < 400
    assert {round(share, 6) for _, _, share in intervals} == {0.5}
    assert sum(end - start for start, end, _ in intervals) == pytest.approx(49.9)
    casts = view.broadcasts()
    assert [len(cast.installed_s) for cast in casts] == 30 * [1] + 20 * [2]
    assert {round(max(cast.installed_s.values()) - cast.created_s, 2) for cast in casts} == {0.55}
