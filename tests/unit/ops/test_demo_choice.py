"""Which packaged run `echoswarm demo` means."""

from __future__ import annotations

from importlib import resources

import pytest

from echo_ops.cli.up import demo_name
from echo_schemas.errors import UserError


@pytest.mark.parametrize(
    ("name", "task", "packaged"),
    [
        (None, None, "reverse"),
        ("reverse", None, "reverse"),
        ("sort", None, "sort"),
        (None, "sokoban", "sokoban"),
        (None, "knights-knaves", "knights-knaves"),
    ],
)
def test_every_choice_is_packaged(name: str | None, task: str | None, packaged: str) -> None:
    assert demo_name(name, task) == packaged
    assert resources.files("echo_ops.demo").joinpath(f"{packaged}.toml").is_file()


def test_a_digits_demo_of_a_task_is_refused() -> None:
    with pytest.raises(UserError, match=r"no demo sort of sokoban.*`echoswarm demo sort` or `echoswarm demo --task sokoban`"):
        demo_name("sort", "sokoban")
