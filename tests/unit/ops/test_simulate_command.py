"""`echoswarm simulate`: files that are right and wrong, what is printed, the page, the paper's set-up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from echo_core.simulation.weights import demand_of
from echo_ops.cli.main import app
from echo_ops.simulation import paper
from echo_ops.simulation.paper_page import misses, paper_page

EXAMPLE = Path(__file__).parents[3] / "examples" / "fleets" / "small.toml"
SMALL = """
steps = 10
[learner]
train_s = 100.0
groups_per_step = 8
group_size = 4
[weights]
plan = "fixed"
broadcast_s = 20.0
[[workers]]
kind = "w"
count = 2
rate = 0.5
price_per_hour = 1.0
"""


def run(tmp_path: Path, content: str, *options: str) -> tuple[int, str, str]:
    file = tmp_path / "fleet.toml"
    file.write_text(content, encoding="utf-8")
    found = CliRunner().invoke(app, ["simulate", str(file), *options])
    return found.exit_code, found.stdout, found.stderr


def test_a_scenario_is_simulated_and_printed(tmp_path: Path) -> None:
    code, table, _ = run(tmp_path, SMALL)
    assert code == 0
    names = [line.split("  ")[0] for line in table.splitlines()]
    assert names == ["steps", "steps/s", "bubble", "wait", "staleness", "T_bcast", "cost/step", "workers", "stale", "redelivered", "bias"]
    code, plain, _ = run(tmp_path, SMALL, "--json", "--steps", "5", "--seed", "3")
    found = json.loads(plain)
    assert (code, found["steps"], found["broadcast_s"]) == (0, 5, 20.0)
    # 32 rollouts a step; one rollout a second together.
    assert found["rollouts_per_s"] == pytest.approx(0.32)
    assert found["bubble_ratio"] == 0.0


def test_the_page_is_one_file_that_asks_nobody(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    assert run(tmp_path, SMALL, "--page", str(page))[0] == 0
    content = page.read_text(encoding="utf-8")
    assert "<script" not in content
    assert "http" not in content.replace("http://www.w3.org/2000/svg", "")
    svgs = [part.partition("</svg>")[0] + "</svg>" for part in content.split("<svg")[1:]]
    assert len([ElementTree.fromstring("<svg" + svg) for svg in svgs]) == 4
    code, _, error = run(tmp_path, SMALL, "--page", str(tmp_path / "none" / "out.html"))
    assert code == 2
    assert "cannot be read or written" in error


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("train_s", "trian_s", "[learner] has no key 'trian_s'"),
        ("[learner]", "[lerner]", "has no section 'lerner'"),
        ("[[workers]]", "[workers]", "Write [[workers]], with two brackets"),
        ("train_s = 100.0", "", "train_s: Field required"),
        ("broadcast_s = 20.0", "broadcast_s = 500.0", "the next ones come before these work"),
        ('plan = "fixed"', 'plan = "star"', "The weights have no size"),
        ("count = 2", "count = 0", "the pool is empty"),
        ("count = 2", "count = 1000000", "too many to simulate"),
        ("rate = 0.5", "rate = -1", "[workers.1] rate: Input should be greater than or equal to 0"),
        ("rate = 0.5", "rate = 0.5\nfailures_per_day = 86400\nrepair_s = 1", "waited for groups that never came"),
        ("steps = 10", "steps = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tmp_path: Path, old: str, new: str, says: str) -> None:
    code, _, error = run(tmp_path, SMALL.replace(old, new))
    assert code == 2
    assert says in " ".join(error.split())


def test_nothing_named_and_a_file_that_is_not_there() -> None:
    for arguments, says in ((["simulate"], "No scenario was named"), (["simulate", "nowhere.toml"], "There is no configuration file")):
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 2
        assert says in found.stderr


def test_the_example_runs() -> None:
    found = CliRunner().invoke(app, ["simulate", str(EXAMPLE), "--json", "--steps", "10"])
    assert found.exit_code == 0
    assert json.loads(found.stdout)["staleness_max"] <= 3


@pytest.mark.slow
def test_the_papers_set_up_gives_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "_SEEDS", 30)
    monkeypatch.setattr(paper, "_COUNTS", range(5, 9))
    found = paper.reproduce(replace(paper.paper_scenario(), steps=16))
    assert set(found) == {"table2", "fig1", "fig3c", "fig4", "cost_saving"}
    assert found["fig1"]["oldest_steps"][:2] == found["fig1"]["paper_oldest_steps"]
    enough = [curve["enough_workers"] for curve in found["fig3c"]["curves"]]
    assert enough == sorted(enough, reverse=True), "a larger S needs no more workers"
    assert [abs(each - curve["predicted_workers"]) <= 1 for each, curve in zip(enough, found["fig3c"]["curves"], strict=True)] == [True] * 3
    fig4 = found["fig4"]
    assert fig4["star_limited"][-1] > 5 * fig4["star_limited"][4]
    assert fig4["chains"][-1] < 1.4 * fig4["chains"][0]
    rows = found["table2"]["rows"]
    costs = [row["simulated"]["cost_per_step"] for row in rows]
    assert costs[0] < costs[1] < costs[3], "P2P saves, and choosing by cost saves more"
    assert all(abs(row["off"]["broadcast_s"]) < 0.05 for row in rows if row["paper"]["machines"] == 9)
    assert rows[0]["used_as_input"] == ["cost_per_step"], "what an input was inferred from is no result"
    (saving,) = (row for row in found["cost_saving"]["rows"] if row["budget"] == 3)
    assert -0.37 < saving["saving_async"] < saving["saving_sync"] < -0.33
    said = misses(found)
    wrong = sum(not all(row["within_5_percent"].values()) for row in rows)
    assert len(said) == wrong > 0
    page = paper_page(found)
    assert all(sentence.split(":")[0] in page for sentence in said)
    assert "<script" not in page


def test_the_papers_results_are_in_no_scenario_but_for_the_prices() -> None:
    base = paper.paper_scenario()
    assert demand_of(base).rollouts == 2048
    prices = [kind.price_per_hour for kind in paper.mixed_pool(base).kinds]
    assert prices[0] == 0.35
    assert prices == sorted(prices)


def test_policies_and_budgets_are_compared(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    code, plain, _ = run(tmp_path, SMALL, "--compare", "policies", "--json", "--page", str(page))
    assert code == 0
    assert list(json.loads(plain)) == ["drop", "withhold", "downweight", "free"]
    assert "Bias by length" in page.read_text(encoding="utf-8")
    code, table, _ = run(tmp_path, SMALL, "--compare", "budgets")
    assert code == 0
    assert [line.split("  ")[0] for line in table.splitlines()[1:]] == ["S = 1", "S = 2", "S = 3", "S = 4", "S = 6", "S = 10"]


def test_a_budget_whose_weights_come_too_late_is_named_beside_the_others(tmp_path: Path) -> None:
    slow = SMALL.replace("broadcast_s = 20.0", "broadcast_s = 150.0").replace("[weights]", "[staleness]\nbudget = 3\n[weights]")
    code, plain, _ = run(tmp_path, slow, "--compare", "budgets", "--json")
    found = json.loads(plain)
    assert code == 0
    assert "the next ones come before these work" in found["S = 1"]["error"]
    assert found["S = 3"]["steps"] == 10
    assert "come before these work" in run(tmp_path, slow, "--compare", "budgets")[1]


@pytest.mark.slow
def test_the_papers_figures_are_printed_with_what_did_not_come_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(paper.paper_scenario(), steps=6)
    monkeypatch.setattr("echo_ops.cli.simulate.paper_scenario", lambda: small)
    monkeypatch.setattr(paper, "_SEEDS", 2)
    monkeypatch.setattr(paper, "_COUNTS", range(6, 9))
    page = tmp_path / "out.html"
    found = CliRunner().invoke(app, ["simulate", "--paper", "--page", str(page)])
    assert found.exit_code == 0
    lines = found.stdout.splitlines()
    assert lines[0].split() == ["table", "2", "$", "per", "step", "T_bcast", "wait", "by", "eq.", "1"]
    assert any(line.startswith("Table 2, w/o P2P with 10 machines: ") and "T_bcast 2035 instead of 1872" in line for line in lines)
    assert any(line.startswith("Figure 1: staleness 3 in v3→v4, v5→v6") for line in lines)
    assert "Figure 3c, as eq. 1 counts" in page.read_text(encoding="utf-8")
    plain = CliRunner().invoke(app, ["simulate", "--paper", "--json"])
    assert set(json.loads(plain.stdout)) == {"table2", "fig1", "fig3c", "fig4", "cost_saving"}
