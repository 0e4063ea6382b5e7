"""The next release that the upgrade test meets can be made of this one."""

from __future__ import annotations

from pathlib import Path

from tests.upgrade.releases import NEW_FIELD, next_release


def test_a_next_release_has_a_field_more_in_every_record_and_checkpoint(tmp_path: Path) -> None:
    release = next_release(tmp_path)
    schemas = tmp_path / "schemas" / "echo_schemas"
    newest = {
        file.name.split(".")[0]: file for file in sorted((schemas / "avro").glob("*.avsc"), key=lambda file: int(file.suffixes[0][2:]))
    }
    assert [name for name, file in newest.items() if NEW_FIELD not in file.read_text()] == []
    assert NEW_FIELD in (release.root / "consumers" / "echo_learner" / "commit" / "learner_state.py").read_text()
