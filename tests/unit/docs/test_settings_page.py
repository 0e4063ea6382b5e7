"""The page of settings is what the models say, and says every key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_ops.settings_page import settings_page
from echo_settings import Settings
from echo_settings.load import repeated_section

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_the_page_is_what_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["settings"])
    assert printed.exit_code == 0
    assert printed.stdout == PAGE.read_text(encoding="utf-8"), "write it anew: echoswarm settings > docs/settings.md"


def test_every_section_and_key_has_a_row_with_a_meaning() -> None:
    # A section that may stand there several times is headed `[[name]]`.
    parts = [part.split("]\n", 1) for part in settings_page().split("\n## [")[1:]]
    sections = {title.strip("[]"): text for title, text in parts}
    assert [name for name in sections if "." not in name] == list(Settings.model_fields)
    assert {name for name in sections if "." in name} == {"rollout.devices", "rollout.pool"}
    for name, text in sections.items():
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
        assert all(len(row) == 4 and row[3].removesuffix(" |").endswith(".") for row in rows), name
        expected: Any = Settings
        for part in name.split("."):
            annotation = expected.model_fields[part].annotation
            expected = repeated_section(annotation) or annotation
        if hasattr(expected, "model_fields"):
            # What repeats within a section has a table of its own.
            own = {key for key, field in expected.model_fields.items() if repeated_section(field.annotation) is None}
            assert {row[0].strip("| `").split(".")[0] for row in rows} == own


@pytest.mark.parametrize(
    "row",
    [
        '| `bootstrap` | text | `"embedded"` |',
        '| `update` | `"lora"` or `"full"` | `"lora"` |',
        '| `normalisation` | `"sequence"`, `"token"` or `"constant"` | `"token"` |',
        "| `lora.r` | whole number ≥ 1 | `32` |",
        "| `min_p` | number ≥ 0 and < 1 | `0.0` |",
        "| `stop` | list of texts | `[]` |",
        "| `publication_period` | whole number ≥ 1 | none |",
        "| `scale_by_std` | true or false | `true` |",
        '| `password` | secret text | `""` |',
        "| `options` | table | `{}` |",
        "| `<name of a reward>` | number | `exact = 1.0` |",
    ],
)
def test_types_bounds_and_defaults_read_as_in_a_file(row: str) -> None:
    assert row in settings_page()
