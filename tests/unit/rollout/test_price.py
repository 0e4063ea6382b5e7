"""A worker's price from a file that changes while it works."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_bus.clock import ManualClock
from echo_rollout.price import PriceFile
from echo_runtime.notices import Notices
from echo_schemas.errors import UserError


def write(path: Path, text: str) -> None:
    """As a careful writer does: whole, or not at all."""
    beside = path.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def test_a_new_price_holds_from_the_next_heartbeat_on(tmp_path: Path) -> None:
    path = tmp_path / "price"
    write(path, "0.35\n")
    price = PriceFile(path, Notices(ManualClock()))
    assert price.now() == 0.35
    write(path, "1.5")
    assert price.now() == 1.5


@pytest.mark.parametrize(
    ("text", "sentence"), [("", "holds no number"), ("cheap", "holds no number"), ("-1", "no price"), ("nan", "no price")]
)
def test_what_is_no_price_changes_nothing_and_is_said(tmp_path: Path, text: str, sentence: str) -> None:
    path, notices = tmp_path / "price", Notices(ManualClock())
    write(path, "0.35")
    price = PriceFile(path, notices)
    write(path, text)
    assert price.now() == 0.35
    assert sentence in notices.current()["price"]
    assert "The price stays 0.35. Write one number into it" in notices.current()["price"]
    write(path, "0.4")
    assert price.now() == 0.4
    assert not notices.current()


def test_a_file_that_is_taken_away_changes_nothing(tmp_path: Path) -> None:
    path, notices = tmp_path / "price", Notices(ManualClock())
    write(path, "0.35")
    price = PriceFile(path, notices)
    path.unlink()
    assert price.now() == 0.35
    assert "cannot be read" in notices.current()["price"]


def test_a_worker_whose_file_has_no_price_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        PriceFile(tmp_path / "none", Notices(ManualClock()))
    (tmp_path / "bad").write_text("free", encoding="utf-8")
    with pytest.raises(UserError, match="holds no number"):
        PriceFile(tmp_path / "bad", Notices(ManualClock()))
