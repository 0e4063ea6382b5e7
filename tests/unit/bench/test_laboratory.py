"""The learning laboratory's matrix, statistics and page; that its cells run is tried in tests/integration/bench."""

from __future__ import annotations

import math
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("scipy", reason="the laboratory's tests of claims are scipy's: install the extra 'all-cpu'")

import learning
from laboratory.matrix import FINAL, HELD_OUT, Cell, Choice, as_toml, load_cells, merged
from laboratory.page import figures, put_into, rows_of, tables
from laboratory.results import Curve, Evaluated, Result, read_result, write_result
from laboratory.statements import Verdict, check_less, check_within, findings, seeds_needed

from echo_schemas.errors import UserError
from echo_settings import Settings, load_settings

_MATRIX = Path(__file__).parents[3] / "bench" / "laboratory" / "matrix.toml"
_SETS = tuple(tomllib.loads(_MATRIX.read_text(encoding="utf-8"))["sets"])
_CONDITIONS = tuple(tomllib.loads(_MATRIX.read_text(encoding="utf-8"))["conditions"])


def result(
    final: float, *, seconds: float = 60.0, others: float = 0.1, core_s: float = 0.1, rewards: tuple[float, ...] = (0.2, 0.4)
) -> Result:
    curve = Curve()
    for index, reward in enumerate(rewards):
        curve.add(index + 1, 1000 + seconds * index / (len(rewards) - 1), 512, reward, 1.0)
    evaluated = [
        Evaluated(name=HELD_OUT, version=0, mean=0.2, stderr=0.02),
        Evaluated(name=FINAL, version=len(rewards), mean=final, stderr=0.01),
    ]
    facts = {"max_staleness": 2, "dropped": 1, "others": others, "core_s": core_s}
    return Result(outcome="finished", wall_s=90.0, curve=curve, evaluated=evaluated, facts=facts)


def cell(condition: str, **choice: object) -> Cell:
    (found,) = load_cells(_MATRIX, "nightly", Choice(conditions=[condition], seeds=1, **choice))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", _SETS)
def test_every_cell_of_every_set_is_a_file_that_a_run_takes(name: str) -> None:
    cells = load_cells(_MATRIX, name, Choice())
    assert len({each.name for each in cells}) == len(cells)
    for each in cells:
        assert tomllib.loads(as_toml(each.settings)) == each.settings
        settings = Settings.model_validate(each.settings)
        assert (settings.run.seed, settings.learner.steps) == (each.seed, 240 if each.condition.endswith("-long") else 120)
        assert [section.name for section in settings.eval] == [HELD_OUT, FINAL]
        assert all(section.every % settings.publication_period == 0 for section in settings.eval)


def test_every_condition_is_in_a_set() -> None:
    assert {each.condition for name in _SETS for each in load_cells(_MATRIX, name, Choice())} == set(_CONDITIONS)


@pytest.mark.parametrize(
    ("condition", "budget", "lead", "period"),
    [("sequential", 0, 0, 1), ("s1", 1, 1, 1), ("s3", 3, 3, 2), ("s6", 6, 6, 5), ("s11", 11, 11, 10)],
)
def test_an_asynchronous_condition_is_echo_2s(condition: str, budget: int, lead: int, period: int) -> None:
    settings = Settings.model_validate(cell(condition).settings)
    assert (settings.budget, settings.lead, settings.publication_period) == (budget, lead, period)


def test_a_condition_begins_with_what_it_is_like() -> None:
    settings = Settings.model_validate(cell("s11-uncorrected").settings)
    assert (settings.budget, settings.learner.loss) == (11, "laboratory.parts:uncorrected")
    assert cell("s3-dying").kill_every_s == 60
    assert cell("co-located").is_colocated


@pytest.mark.parametrize(("condition", "ages"), [("co-located", {0}), ("co-located-s3", {2, 3}), ("co-located-s6", {2, 3, 4, 5, 6})])
def test_one_process_samples_as_old_as_a_pipeline_would(condition: str, ages: set[int]) -> None:
    pytest.importorskip("torch", reason="the baseline trains: install the extra 'learner'")
    from laboratory.colocated import steps_to_sample

    settings = Settings.model_validate(cell(condition).settings)
    sampled_at: dict[int, int] = {}
    for version in range(40):
        ready = sum(step >= version for step in sampled_at)
        due = steps_to_sample(version, ready, lead=settings.lead, period=settings.publication_period, last=40)
        sampled_at |= dict.fromkeys(due, version)
    assert list(sampled_at) == list(range(40))
    # The first steps, up to the lead, are all of version 0.
    assert {step - version for step, version in sampled_at.items() if step > settings.lead} == ages


def test_what_is_held_is_not_trained() -> None:
    torch = pytest.importorskip("torch", reason="the baseline trains: install the extra 'learner'")
    from laboratory.colocated import holding

    held = cell("co-located-full-inner").held
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(3, 2), "q_proj": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    load: Any = holding(lambda config: cast("Any", model), held)
    optimizer = torch.optim.AdamW(load(None).parameters(), lr=0.1, weight_decay=0.0)
    model["norm"](model["q_proj"](model["embed_tokens"](torch.tensor([0, 1])))).square().sum().backward()
    optimizer.step()
    assert {name for name, parameter in model.named_parameters() if not parameter.equal(before[name])} == {"q_proj.weight", "q_proj.bias"}


def test_the_command_line_wins_over_the_file() -> None:
    settings = Settings.model_validate(cell("s3", steps=2, engine="transformers").settings)
    assert (settings.learner.steps, settings.rollout.engine, settings.rollout.options) == (2, "transformers", {})
    assert [section.every for section in settings.eval] == [0, 0]
    elsewhere = Settings.model_validate(cell("s3-elsewhere", engine="transformers").settings).rollout
    assert (elsewhere.engine, elsewhere.options["engine"]) == ("laboratory.parts:Elsewhere", "transformers")


def test_conditions_of_one_set_are_drawn_together() -> None:
    some = {0: result(0.8)}
    tasks = {"digits": dict.fromkeys(("a", "b", "c"), some), "rooms": {"a": some, "b": some}, "twins": {"a": some}}
    rows = rows_of(tasks, {"first": ["a", "b"], "second": ["a", "c"], "third": ["a"], "fourth": ["d"]})
    assert {label: list(runs) for label, runs in rows.items()} == {
        "digits, first": ["a", "b"],
        "digits, second": ["a", "c"],
        "rooms": ["a", "b"],
    }


def test_what_has_nothing_to_be_compared_with_is_drawn_alone() -> None:
    twins = {"twins": {"a": {0: result(0.8)}}}
    assert rows_of(twins, {"first": ["a", "b"]}) == twins


@pytest.mark.parametrize("each", load_cells(_MATRIX, "papers", Choice()), ids=lambda each: each.task)
def test_a_twin_differs_from_its_paper_s_run_in_sizes_alone(each: Cell) -> None:
    asked = tomllib.loads(_MATRIX.read_text(encoding="utf-8"))["tasks"][each.task]
    paper, twin = load_settings(_MATRIX.parents[2] / "examples" / asked["example"], {}), Settings.model_validate(each.settings)
    assert (twin.run.mode, twin.budget, twin.lead, twin.publication_period) == (
        paper.run.mode,
        paper.budget,
        paper.lead,
        paper.publication_period,
    )
    assert (twin.rollout.group_size, twin.rollout.top_p, twin.rollout.temperature) == (
        paper.rollout.group_size,
        paper.rollout.top_p,
        paper.rollout.temperature,
    )
    assert (twin.policy.update, twin.policy.lora) == (paper.policy.update, paper.policy.lora)
    sizes = {"groups_per_step": 1, "lr": 1.0, "steps": 1, "ranks": 1, "deepspeed": "", "gradient_checkpointing": False}
    sizes |= {"micro_batch_tokens": 1, "price_per_hour": 0.0}
    assert twin.learner.model_copy(update=sizes) == paper.learner.model_copy(update=sizes)


@pytest.mark.parametrize(
    ("set_name", "choice", "hint"),
    [
        ("nightly", Choice(conditions=["sequentail"]), "Did you mean 'sequential'?"),
        ("nightly", Choice(conditions=["zzz"]), f"Its {len(_CONDITIONS)} sections [conditions.NAME] say which names there are."),
        ("nightli", Choice(), f"Did you mean 'nightly'? There are: {', '.join(_SETS)}."),
        ("zzz", Choice(), f"There are: {', '.join(_SETS)}."),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_with_all_if_they_are_few(set_name: str, choice: Choice, hint: str) -> None:
    with pytest.raises(UserError, match=r"The matrix has no \[(conditions|sets)\.") as caught:
        load_cells(_MATRIX, set_name, choice)
    assert caught.value.hint == hint


def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no \[tasks\.sort-digit\]") as caught:
        load_cells(_MATRIX, "nightly", Choice(tasks=["sort-digit"]))
    assert caught.value.hint.startswith("Did you mean 'sort-digits'?")


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """What `learning.py` says when it refuses `options`; it must not run a cell."""

    def run(chosen: Cell, cells: Path, work: Path) -> Result:
        raise AssertionError(f"{chosen.name} was run")

    monkeypatch.setattr(learning, "run_cell", run)
    monkeypatch.setattr("sys.argv", ["learning.py", *options])
    assert learning.main() == 2
    return capsys.readouterr().out


def cells_of_two_steps(folder: Path, *, engine: str | None = None, outcome: str = "finished") -> Path:
    """A folder in which the first seed of `s3` has finished with two steps; `engine`: the one that it says, if any."""
    (folder / "cells").mkdir()
    file = folder / "cells" / "reverse-digits.s3.0.json"
    write_result(file, replace(result(0.7), outcome=outcome), {} if engine is None else {"engine": engine})
    return file


def test_a_finished_cell_of_other_steps_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cells_of_two_steps(tmp_path)
    said = refusal(monkeypatch, capsys, "--folder", str(tmp_path), "--conditions", "sequential,s3", "--steps", "3")
    assert f"{file} is a cell of 2 steps, but 3 are asked for. Name another --folder" in said
    assert "remove this file" in said


def test_a_finished_cell_of_another_engine_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cells_of_two_steps(tmp_path, engine="transformers")
    said = refusal(monkeypatch, capsys, "--folder", str(tmp_path), "--conditions", "s3", "--steps", "2")
    assert f"{file} is a cell of the engine 'transformers', but 'vllm' is asked for." in said


@pytest.mark.parametrize(
    ("engine", "outcome", "steps", "is_refused"),
    [
        (None, "finished", 2, False),
        ("vllm", "finished", 2, False),
        ("vllm", "finished", 3, True),
        ("transformers", "finished", 2, True),
        # One that diverged has no more steps.
        ("vllm", "diverged", 3, False),
    ],
)
def test_finished_cells_are_those_that_are_asked_for(
    tmp_path: Path, engine: str | None, outcome: str, steps: int, is_refused: bool
) -> None:
    cells_of_two_steps(tmp_path, engine=engine, outcome=outcome)
    with pytest.raises(UserError) if is_refused else nullcontext():
        learning.check_finished([cell("s3", steps=steps)], tmp_path / "cells")


def test_a_cell_keeps_the_name_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the baseline is imported: install the extra 'learner'")
    pytest.importorskip("faust", reason="a pipeline is imported: install the extra 'streams'")
    from laboratory import pipeline

    monkeypatch.setattr(pipeline, "run_pipeline", lambda chosen, folder, patience_s: result(0.7))
    for condition in ("s3", "s3-elsewhere"):
        chosen = cell(condition, engine="transformers", steps=2)
        learning.run_cell(chosen, tmp_path, tmp_path / "work")
        assert read_result(tmp_path / f"{chosen.name}.json").engine == "transformers"


def test_all_committed_cells_are_of_the_steps_that_the_matrix_asks_for() -> None:
    files = sorted(_MATRIX.with_name("cells").glob("*.json"))
    runs = dict.fromkeys(tuple(file.stem.rsplit(".", 2)[:2]) for file in files)
    assert runs
    for task, condition in runs:
        learning.check_finished(load_cells(_MATRIX, "nightly", Choice(tasks=[task], conditions=[condition], seeds=20)), files[0].parent)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--steps", "0"), "--steps 0 is too few"),
        (("--steps", "1"), "Write --steps 2 or more."),
        (("--seeds", "0"), "--seeds 0 asks for no cell. Write --seeds 1 or more."),
        (("--seeds", "-1"), "--seeds -1 asks for no cell."),
        (("--engine", "vlm"), "There is no engine 'vlm'. Did you mean 'vllm'?"),
        (("--page", "missing.md"), "There is no page missing.md. --page takes a file that exists"),
        (("--matrix", "nope.toml"), "There is no file nope.toml. --matrix names a file like"),
    ],
)
def test_a_mistake_is_refused_before_anything_runs(
    option: tuple[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refusal(monkeypatch, capsys, "--folder", "mine", *option)
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<!-- measured: end --> before <!-- measured: begin -->", "has no place for tables. Write <!-- measured: begin -->"),
        (b"\x89PNG", "is no text file. --page takes a Markdown file"),
    ],
)
def test_a_page_that_takes_no_tables_is_refused_before_anything_runs(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_bytes(content)
    assert said in refusal(monkeypatch, capsys, "--folder", str(tmp_path / "mine"), "--page", str(tmp_path / "page.md"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"steps =", "is no TOML: "),
        (b"\xff", "is no TOML: "),
        (b"steps = 2\n[sets]\n[tasks]\n", "is no matrix: it lacks [evaluation], [conditions]."),
        (b"[evaluation]\n[sets]\n[tasks]\n[conditions]\n", "is no matrix: it lacks steps."),
    ],
)
def test_a_matrix_that_is_none_is_refused(
    content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_bytes(content)
    assert said in refusal(monkeypatch, capsys, "--folder", str(tmp_path / "mine"), "--matrix", str(tmp_path / "mine.toml"))


def test_changes_lie_over_what_is_there_key_by_key() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "d": [5]}) == {"a": {"b": 4, "c": 2}, "d": [5]}


def test_two_one_sided_tests_agree_with_a_table() -> None:
    # Deviation 0.01, n = 3: t = (0.03 - 0.01) / 0.0057735 = 3.4641 with 2 degrees of freedom, so p = 0.0371.
    found = check_within([0.0, 0.01, 0.02], 0.03)
    assert found.num == 3
    assert found.mean == pytest.approx(0.01)
    assert found.stderr == pytest.approx(0.01 / math.sqrt(3))
    assert found.p == pytest.approx(0.0371, abs=1e-4)
    assert found.verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([0.0, 0.001, -0.001], Verdict.HOLDS),
        ([0.1, 0.101, 0.102], Verdict.REFUTED),
        ([-0.1, 0.1, 0.0], Verdict.OPEN),
        ([0.01] * 3, Verdict.HOLDS),
    ],
)
def test_equal_within_a_margin_is_shown_or_refuted_or_left_open(values: list[float], verdict: Verdict) -> None:
    assert check_within(values, 0.03).verdict is verdict


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([-0.5, -0.6, -0.4], Verdict.HOLDS),
        ([0.5, 0.6, 0.4], Verdict.REFUTED),
        ([-0.5, 0.5, 0.1], Verdict.OPEN),
        ([0.0, 0.0], Verdict.OPEN),
    ],
)
def test_less_is_shown_or_refuted_or_left_open(values: list[float], verdict: Verdict) -> None:
    assert check_less(values, 0.0).verdict is verdict


def test_one_pair_is_no_test() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        check_less([0.1], 0.0)


def test_more_noise_needs_more_seeds() -> None:
    quiet, loud = seeds_needed([0.01, -0.01, 0.0], 0.03), seeds_needed([0.04, -0.04, 0.0], 0.03)
    assert quiet is not None
    assert loud is not None
    assert quiet < loud
    assert seeds_needed([10.0, -10.0], 0.001) is None


def test_claims_are_made_of_the_seeds_that_both_conditions_have() -> None:
    runs = {
        "co-located": {0: result(0.80), 1: result(0.81), 2: result(0.10)},
        "sequential": {0: result(0.801, seconds=100), 1: result(0.809, seconds=100)},
        "s3": {0: result(0.80, seconds=50), 1: result(0.81, seconds=51)},
    }
    found = {(each.letter, each.claim): each.tested for each in findings(runs)}
    assert found["a", "sequential learns as co-located does"].num == 2
    assert found["a", "sequential learns as co-located does"].verdict is Verdict.HOLDS
    assert found["b", "in 0.77 of its time"].verdict is Verdict.HOLDS
    assert found["b", "in 0.77 of its time"].mean == pytest.approx((math.log(0.5) + math.log(0.51)) / 2)
    assert {letter for letter, _ in found} == {"a", "b"}


def test_seconds_beside_other_work_are_neither_shown_nor_compared() -> None:
    runs = {
        name: {seed: result(0.8, seconds=seconds, others=others) for seed, others in enumerate((0.1, 0.2, 0.3))}
        for name, seconds in (("sequential", 100), ("s3", 50))
    }
    (found,) = (each for each in findings(runs) if each.claim == "in 0.77 of its time")
    assert (found.tested.num, found.tested.verdict) == (2, Verdict.HOLDS)
    text = tables({"reverse-digits": runs})
    assert "| 100 (2) |" in text
    former = result(0.8)
    former.facts.pop("others")
    assert not former.is_timed
    assert "| not measured |" in tables({"reverse-digits": {"s3": {0: former}}})


def test_seconds_on_cores_of_another_speed_are_not_compared() -> None:
    sequential = {seed: result(0.8, seconds=100, core_s=0.1) for seed in range(3)}
    slow = {0: result(0.8, seconds=50, core_s=0.1), 1: result(0.8, seconds=51, core_s=0.105), 2: result(0.8, seconds=150, core_s=0.3)}
    (found,) = (each for each in findings({"sequential": sequential, "s3": slow}) if each.claim == "in 0.77 of its time")
    assert (found.tested.num, found.tested.verdict) == (2, Verdict.HOLDS)
    # An earlier laboratory did not say how fast they were.
    slow[0].facts.pop("core_s")
    assert not [each for each in findings({"sequential": sequential, "s3": slow}) if each.claim == "in 0.77 of its time"]


def test_a_fall_of_the_reward_counts_as_unstable() -> None:
    steady, falling = (0.5,) * 30, (0.5,) * 15 + (0.1,) * 15
    runs = {
        "s11": {seed: result(0.5, rewards=steady) for seed in range(2)},
        "s11-uncorrected": {seed: result(0.5, rewards=falling) for seed in range(2)},
    }
    (found,) = (each for each in findings(runs) if each.claim == "or less stable")
    assert found.tested.mean == pytest.approx(-0.4)
    assert found.tested.verdict is Verdict.HOLDS


def test_the_page_has_each_condition_and_claim_between_its_marks(tmp_path: Path) -> None:
    tasks = {"reverse-digits": {name: {0: result(0.8), 1: result(0.82)} for name in ("co-located", "sequential")}}
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- measured: begin -->\nformer\n<!-- measured: end -->\n\nAfter\n", encoding="utf-8")
    put_into(page, tables(tasks))
    text = page.read_text(encoding="utf-8")
    assert "| sequential | 2 | 0.810 ± 0.010 |" in text
    assert "| a | sequential learns as co-located does |" in text
    assert "former" not in text
    assert text.endswith("<!-- measured: end -->\n\nAfter\n")
    assert figures(tasks)["reverse-digits"]["claims"][0]["verdict"] == "holds"


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(UserError, match="no place for tables"):
        put_into(page, "text")


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "cell.json"
    write_result(file, result(0.7), {"cores": 2})
    found = read_result(file)
    assert (found.final, found.train_s, found.facts["cores"]) == (0.7, 60.0, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["cell.json"]


def test_what_has_finished_is_not_run_again_and_what_failed_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = load_cells(_MATRIX, "nightly", Choice(seeds=1))
    ran: list[str] = []

    def run(chosen: Cell, cells: Path, _: Path) -> Result:
        ran.append(chosen.condition)
        if chosen.condition == "s3":
            raise RuntimeError("the learner died")
        write_result(cells / f"{chosen.name}.json", result(0.7), {})
        return result(0.7)

    monkeypatch.setattr(learning, "run_cell", run)
    cells = tmp_path / "cells"
    assert learning.run_all(wanted, cells, tmp_path) == 1
    assert learning.run_all(wanted, cells, tmp_path) == 1
    assert ran == ["co-located", "sequential", "s3", "s3"]
    assert {name: list(seeds) for name, seeds in learning.finished(cells)["reverse-digits"].items()} == {
        "co-located": [0],
        "sequential": [0],
    }


def test_cells_are_shown_in_the_order_of_the_sets(tmp_path: Path) -> None:
    for name in (
        "sokoban.s3.0",
        "reverse-digits.co-located-s3.0",
        "reverse-digits.s3.10",
        "reverse-digits.s3.9",
        "reverse-digits.co-located.0",
    ):
        write_result(tmp_path / f"{name}.json", result(0.7), {})
    found = learning.finished(tmp_path)
    assert list(found) == ["reverse-digits", "sokoban"]
    assert list(found["reverse-digits"]) == ["co-located", "s3", "co-located-s3"]
    assert list(found["reverse-digits"]["s3"]) == [9, 10]


def test_the_page_says_when_and_at_which_commit_its_cells_were_taken(tmp_path: Path) -> None:
    taken = (("2026-11-20 10:00", "abc"), ("2026-11-25 10:00", "def"))
    for seed, (ended, commit) in enumerate(taken):
        file = tmp_path / f"reverse-digits.s3.{seed}.json"
        write_result(file, result(0.7), {"others": 0.1 + seed, "cores": 2, "ended": ended, "commit": commit})
    assert "2 cells, 2026-11-20 to 2026-11-25, at abc, def; 1 had the cores to themselves." in tables(learning.finished(tmp_path))


@pytest.mark.parametrize("option", [("--steps", "2"), ("--engine", "transformers"), ("--matrix", "mine.toml")])
def test_what_cannot_be_compared_does_not_join_the_committed_cells(
    option: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["learning.py", *option])
    assert learning.main() == 2
    assert "not comparable with the committed ones. Give them a place of their own: --folder." in capsys.readouterr().out


def test_each_committed_cell_is_one_of_the_matrix_and_says_how_it_was_taken() -> None:
    cells = [each for name in _SETS for each in load_cells(_MATRIX, name, Choice(seeds=1))]
    known = {each.name.rsplit(".", 1)[0]: each.settings["learner"]["steps"] for each in cells}
    for file in sorted(_MATRIX.with_name("cells").glob("*")):
        found = read_result(file)
        assert file.suffix == ".json", file.name
        assert file.stem.rsplit(".", 1)[0] in known, file.name
        assert file.stat().st_size < 8192, file.name
        assert {"others", "cores", "ended", "commit"} <= found.facts.keys(), file.name
        steps = known[file.stem.rsplit(".", 1)[0]]
        assert found.outcome == "diverged" or found.curve.version == list(range(1, steps + 1)), file.name
        assert found.outcome == "diverged" or len(found.held_out()) == 1 + steps // 40, file.name
