"""What the page on running says exists: settings, commands, summary keys, losses, sentences, files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from echo_learner.losses.catalogue import loss_names
from echo_ops.report.run_view import RunView
from echo_ops.report.summary import summarise_run
from echo_schemas.errors import InvalidReason
from echo_settings import Settings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def _table_below(heading: str) -> list[list[str]]:
    """The cells of the first table with this head."""
    rows = PAGE[PAGE.index(heading) :].split("\n\n", 1)[0].splitlines()[2:]
    return [row.strip("| ").split(" | ") for row in rows]


@pytest.mark.parametrize("block", _blocks("toml"))
def test_every_piece_of_a_run_file_is_one(block: str) -> None:
    Settings.model_validate(tomllib.loads(block))


def test_every_setting_in_prose_exists() -> None:
    found = re.findall(r"`\[(\w+)\] (\w+)`", PAGE)
    assert found
    for section, key in found:
        model = Settings.model_fields[section].annotation
        assert isinstance(model, type)
        assert key in model.model_fields, f"[{section}] {key}"


def test_every_key_of_the_summary_stands_in_its_table_and_no_other() -> None:
    view = RunView("r", started_ms=0, steps_wanted=0, budget=0)
    keys = set(summarise_run(view, wall_s=0.0, outcome="finished", software={}))
    named = [name for row in _table_below("| key of the summary |") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(keys)


def test_the_losses_are_those_there_are() -> None:
    sentence = PAGE[PAGE.index("Losses: ") :].split(";")[0]
    assert re.findall(r"`(\w+)`", sentence) == list(loss_names())


def test_the_loss_of_ones_own_keeps_the_contract() -> None:
    torch = pytest.importorskip("torch", reason="losses are torch functions: install the extra 'learner'")
    from echo_learner.losses.custom import CheckedLoss
    from echo_learner.losses.interface import LossInputs

    (block,) = _blocks("python")
    found: dict[str, Any] = {}
    exec(block, found)
    batch = LossInputs(
        learner=torch.tensor([-1.0, -2.0], requires_grad=True),
        sampler=torch.tensor([-1.0, -9.0]),
        advantages=torch.ones(2),
        mask=torch.ones(2, dtype=torch.bool),
        sequence_ids=torch.zeros(2, dtype=torch.int64),
        sequence_lengths=torch.tensor([2]),
        sequence_scales=torch.tensor([0.5]),
    )
    outputs = CheckedLoss("my_losses:capped", found["capped"], {"cap": 3.0})(batch)
    assert outputs.weights.tolist() == [1.0, 3.0]
    assert outputs.loss.item() == pytest.approx(0.5 * (1.0 + 3.0 * 2.0))


def test_the_reasons_and_sentences_that_are_quoted_are_said() -> None:
    assert InvalidReason.RETRIES_EXHAUSTED.value in PAGE
    code = "".join(
        path.read_text(encoding="utf-8") for folder in ("schemas", "infra", "consumers") for path in (ROOT / folder).rglob("*.py")
    )
    said = re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", code))
    for quoted in re.findall(r'"([A-Z][^"|]*…[^"|]*)"', PAGE[PAGE.index("## When something fails") :]):
        for part in quoted.split("…"):
            assert part.strip(" .(,)") in said, f"nothing says {part!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} → {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}, (
                f"{page.name} → #{anchor}"
            )
