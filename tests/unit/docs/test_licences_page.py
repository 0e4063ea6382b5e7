"""docs/licences.md has every package of constraints.txt in its version, with a licence."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_page_has_every_pinned_package_with_its_licence() -> None:
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "licences.md").read_text(encoding="utf-8").splitlines()]
    listed = {row[0]: row[1] for row in rows[rows.index(["---|---|---"]) + 1 :] if row[2].strip()}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.partition(";")[0].strip().split("==") for line in lines if line and not line.startswith("#"))
    assert listed == pinned, "write it anew: make licences"
