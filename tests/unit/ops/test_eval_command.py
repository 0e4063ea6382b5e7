"""`echoswarm eval`: which evaluation is meant and which versions can be, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from echo_ops.cli.evaluate import choose_section, choose_versions
from echo_schemas.errors import UserError
from echo_settings import Settings
from echo_settings.evaluation import EvalSettings


def settings(*sections: dict[str, Any]) -> Settings:
    return Settings.model_validate({"eval": list(sections)})


def chosen(settings: Settings, name: str | None = None, **given: Any) -> EvalSettings:
    return choose_section(settings, name, given)


HELD_OUT: dict[str, Any] = {"name": "held-out", "prompts": 32, "samples": 4}


def test_the_file_says_what_is_asked() -> None:
    assert chosen(settings(HELD_OUT)).prompts == 32
    assert chosen(settings(HELD_OUT, {"name": "hard"}), name="held-out").samples == 4


def test_without_a_section_the_options_make_one() -> None:
    made = chosen(settings(), prompts=8, samples=2, pass_at=(1, 2), temperature=0.5)
    assert (made.name, made.prompts, made.samples, made.pass_at, made.temperature) == ("by-hand", 8, 2, (1, 2), 0.5)
    assert chosen(settings(HELD_OUT), name="other", prompts=8).name == "other"
    assert chosen(settings(HELD_OUT), prompts=8).name == "by-hand"


@pytest.mark.parametrize(
    ("options", "sections", "message"),
    [
        ({"name": "held-out", "prompts": 8}, [HELD_OUT], "with other prompts its results could not be compared"),
        ({}, [HELD_OUT, {"name": "hard"}], "several evaluations.*held-out, hard"),
        ({"samples": 2, "pass_at": (4,)}, [], "pass@4 of 2 samples; write samples = 4"),
        ({"samples": 2, "temperature": 0.0}, [], "2 times the same answer"),
        ({"name": "a/b"}, [], "'a/b' cannot be part of a key"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_to_write(options: dict[str, Any], sections: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        chosen(settings(*sections), **options)


def test_the_newest_version_is_meant_unless_one_is_named() -> None:
    assert choose_versions((), [0, 4, 8], "demo") == [8]
    assert choose_versions((8, 0, 8), [0, 4, 8], "demo") == [0, 8]


def test_a_version_that_is_not_kept_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"Version 3 of run 'demo' is not kept\. Kept: 0 to 2, 8, 10 to 11\."):
        choose_versions((3,), [0, 1, 2, 8, 10, 11], "demo")
    with pytest.raises(UserError, match="No weights of run 'demo' are kept"):
        choose_versions((3,), [], "demo")
