"""`echoswarm plan`: from numbers and from a run; a table, JSON, and one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_ops.cli.plan import parse_kind
from echo_ops.measured_run import measured_run
from echo_schemas.errors import UserError
from tests.unit.ops.test_run_view import summary_of
from tests.unit.ops.views import learning_view

NUMBERS = ["plan", "--train-s", "1600", "--broadcast-s", "120", "--rollouts", "1024"]
KINDS = ["--kind", "h100:rate=0.5,price=2.5,count=8", "--kind", "4090:rate=0.2,price=0.4,count=30"]


def test_a_plan_for_each_budget() -> None:
    found = CliRunner().invoke(app, [*NUMBERS, *KINDS, "--budget", "1,3", "--json"])
    assert found.exit_code == 0
    plans = json.loads(found.stdout)["plans"]
    assert [each["budget"] for each in plans] == [1, 3]
    assert plans[0]["workers"] == {"4090": 4}
    assert plans[0]["price_per_hour"] == pytest.approx(1.6)
    assert plans[0]["cost_per_step"] == pytest.approx(1.6 * 1600 / 3600)


def test_the_table_has_a_row_a_budget() -> None:
    found = CliRunner().invoke(app, [*NUMBERS, *KINDS, "--budget", "3,4,6"])
    assert found.exit_code == 0
    assert [line.split()[0] for line in found.stdout.splitlines()[3:]] == ["3", "4", "6"]


def test_where_no_plan_works_the_command_says_what_would_and_ends_with_1() -> None:
    found = CliRunner().invoke(app, [*NUMBERS, "--kind", "4090:rate=0.2,count=3"])
    assert found.exit_code == 1
    assert "add 1 worker of kind 4090" in found.stdout


def test_a_budget_that_no_pool_can_keep_says_which_one_could() -> None:
    weights_take_long = ["plan", "--train-s", "100", "--broadcast-s", "250", "--rollouts", "100", "--kind", "a:rate=50,count=4"]
    found = CliRunner().invoke(app, [*weights_take_long, "--budget", "1"])
    assert found.exit_code == 1
    assert (
        "S = 1: New weights take 250 s to arrive and are published every 100 s: the next ones come before these work. "
        "To mend it, raise the budget to 5, or let weights arrive within 99.4 s."
    ) in found.stdout
    assert CliRunner().invoke(app, [*weights_take_long, "--budget", "5"]).exit_code == 0


def test_a_run_that_has_ended_is_the_source(tmp_path: Path) -> None:
    summary = summary_of(learning_view(30))
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    measured = measured_run(summary)
    assert measured.train_s == pytest.approx(0.4)
    assert measured.broadcast_s == pytest.approx(0.06)
    assert measured.rollouts == 10
    found = CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path), "--kind", "more:rate=100", "--json"])
    assert json.loads(found.stdout)["rollouts_per_step"] == 10


def test_a_summary_without_the_seconds_of_a_step_has_them_from_pace_and_waiting() -> None:
    summary = summary_of(learning_view(30))
    del summary["t_train_p50_s"], summary["rollouts_per_step"]
    measured = measured_run(summary)
    assert measured.train_s == pytest.approx(0.4)
    assert measured.rollouts == 10


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "--from-run", "/nowhere"], "There is no summary"),
        ([*NUMBERS[:-2], *KINDS], "--rollouts is missing"),
        (NUMBERS, "No workers were named"),
        ([*NUMBERS, *KINDS, "--budget", "three"], "not a list of whole numbers"),
        ([*NUMBERS, *KINDS, "--budget", "0"], "lets nothing overlap"),
        ([*NUMBERS, *KINDS, "--kappa", "often"], "neither a whole number nor auto"),
        ([*NUMBERS, *KINDS, "--kappa", "9"], "does not fit a budget of 3"),
        ([*NUMBERS, *KINDS, "--gamma", "0.5"], "below 1"),
        ([*NUMBERS, "--kind", "a:rate=-1"], "cannot make -1"),
        ([*NUMBERS, "--kind", "a:rate=1,price=-1"], "cannot cost -1 an hour"),
        ([*NUMBERS, "--kind", "a:rate=1,price=nan"], "cannot cost nan an hour"),
        ([*NUMBERS, *KINDS, "--learner-price", "-1"], "A learner cannot cost -1 an hour"),
    ],
)
def test_each_mistake_is_one_sentence_with_a_hint(arguments: list[str], sentence: str) -> None:
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert sentence in found.stderr
    assert "hint:" in found.stderr


@pytest.mark.parametrize("text", ["", "a", ":rate=1", "a:price=1", "a:rate=x", "a:rate=1,rate=2", "a:rate=1,count=0", "a:rate=1,count=1.5"])
def test_a_kind_that_cannot_be_read_says_how_one_is_written(text: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_kind(text)
    assert refused.value.hint


def test_a_run_that_was_paid_lends_its_learners_price_and_says_what_a_step_cost(tmp_path: Path) -> None:
    line = {"worker_id": "w", "kind": "k", "samples_per_s": 200.0, "idle_share": 0.0, "price_per_hour": 0.0}
    cost = {"learner_per_hour": 3.6, "per_step": 0.005}
    summary = {
        "run": "r",
        "steps": 5,
        "t_train_p50_s": 1.0,
        "rollouts_per_step": 100,
        "t_bcast_p50_s": 0.1,
        "workers": [line],
        "cost": cost,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    found = CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path), "--budget", "3,4,6", "--json"])
    plain = json.loads(found.stdout)
    assert [each["cost_per_step"] for each in plain["plans"]] == pytest.approx([0.001] * 3)
    assert (plain["measured_cost_per_step"], plain["unpriced"]) == (0.005, ["k"])
    shown = CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path)]).stdout
    assert "In the run a step cost 0.005" in shown
    assert "Without a price k count as free" in shown
    other = CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path), "--learner-price", "36", "--json"])
    assert json.loads(other.stdout)["plans"][0]["cost_per_step"] == pytest.approx(0.01)


def evaluated(*results: tuple[str, int, float]) -> dict[str, object]:
    """A run that was paid and has these evaluations: name, version, mean. A step takes 1 s, and the worker 1 an hour."""
    line = {"worker_id": "w", "kind": "k", "samples_per_s": 200.0, "idle_share": 0.0, "price_per_hour": 1.0}
    return {
        "run": "r",
        "steps": 30,
        "t_train_p50_s": 1.0,
        "rollouts_per_step": 100,
        "t_bcast_p50_s": 0.1,
        "workers": [line],
        "cost": {"learner_per_hour": 2.6, "per_step": 0.005},
        "evaluations": [
            {"name": name, "version": version, "shown": "exact", "rewards": {"other": {"mean": 9.0, "stderr": 0.0}, "exact": stats}}
            for name, version, stats in ((name, version, {"mean": mean, "stderr": 0.01}) for name, version, mean in results)
        ],
    }


CURVE = (("held-out", 0, 0.1), ("other", 30, 0.99), ("held-out", 20, 0.4), ("held-out", 10, 0.5), ("held-out", 30, 0.7))


def test_an_accuracy_costs_what_the_steps_to_it_cost_under_each_budget(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(evaluated(*CURVE)), encoding="utf-8")
    page = tmp_path / "plan.html"
    found = CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path), "--budget", "3,4,6", "--json", "--page", str(page)])
    accuracy = json.loads(found.stdout)["accuracy"]
    assert (accuracy["evaluation"], accuracy["reward"]) == ("held-out", "exact")
    # 3.6 an hour and 1 s: 0.001 a step. Version 20 was worse than 10, and version 0 needs no step.
    assert [(each["steps"], each["mean"]) for each in accuracy["reached"]] == [(10, 0.5), (30, 0.7)]
    assert accuracy["reached"][1]["cost"] == pytest.approx({"3": 0.03, "4": 0.03, "6": 0.03})
    assert accuracy["reached"][1]["cost_in_run"] == pytest.approx(0.15)
    shown = CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path), "--budget", "3,4,6"]).stdout.splitlines()
    head = next(number for number, line in enumerate(shown) if line.startswith("exact"))
    assert shown[head].split() == ["exact", "steps", *["S", "=", "3", "S", "=", "4", "S", "=", "6"], "in", "the", "run"]
    assert shown[head + 2].split() == ["0.700", "±", "0.010", "30", "0.03", "0.03", "0.03", "0.15"]
    content = page.read_text(encoding="utf-8")
    assert content.count("<svg") == 3
    assert "0.700 ± 0.010" in content


def test_many_evaluations_are_shown_as_six_with_the_best(tmp_path: Path) -> None:
    curve = measured_run(evaluated(*(("held-out", version, version / 100) for version in range(101)))).accuracy
    assert curve is not None
    best = curve.best(6)
    assert len(best) <= 6
    assert best[-1].version == 100
    assert min(point.version for point in best) > 0


def test_a_run_without_evaluations_says_that_it_has_no_curve_and_numbers_alone_say_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(json.dumps(evaluated()), encoding="utf-8")
    assert "The run has no evaluations" in CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path)]).stdout
    assert json.loads(CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path), "--json"]).stdout)["accuracy"] is None
    page = tmp_path / "plan.html"
    found = CliRunner().invoke(app, [*NUMBERS, *KINDS, "--budget", "1,3", "--page", str(page)])
    assert "evaluations" not in found.stdout
    assert page.read_text(encoding="utf-8").count("<svg") == 2
    refused = CliRunner().invoke(app, [*NUMBERS, *KINDS, "--page", str(tmp_path / "none" / "plan.html")])
    assert refused.exit_code == 2
    assert "cannot be read or written" in refused.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"steps": 3}'])
def test_a_file_that_is_no_summary_is_a_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(text, encoding="utf-8")
    assert CliRunner().invoke(app, ["plan", "--from-run", str(tmp_path)]).exit_code == 2
