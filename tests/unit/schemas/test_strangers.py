"""What strangers write into headers and entries is read as far as it makes sense, and never raises anything else."""

from __future__ import annotations

import pytest

from echo_schemas.entry import parse_entry
from echo_schemas.headers import number_of, oldest_version


@pytest.mark.parametrize("text", ["", "-1", "+1", " 1", "1.0", "1_000", "٣", "²", "9" * 19, "9" * 5_000, b"\xff", None])
def test_a_header_that_is_no_count_says_nothing(text: str | bytes | None) -> None:
    assert number_of(text) is None
    if isinstance(text, str):
        assert oldest_version([("echo-version", text.encode())]) is None


def test_a_count_is_read() -> None:
    assert number_of("0") == number_of(b"00") == 0
    assert number_of("9" * 18) == 10**18 - 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "more than 64 levels"),
        ('{"a":' * 100_000, "more than 64 levels"),
        ('{"a":' * 70 + "1" + "}" * 70, "more than 64 levels"),
        ('{"a":' * 100, "not JSON"),
        ('{"a": ' + "9" * 5_000 + "}", "not JSON"),
        ("[1]", "list, not an object"),
        ("NaN", "float, not an object"),
    ],
)
def test_an_entry_that_is_no_plain_object_is_refused_with_a_sentence(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_entry(text)


def test_an_entry_may_be_broad_and_nested() -> None:
    assert parse_entry('{"a": [' + ",".join(["[[]]"] * 1_000) + "]}")["a"][0] == [[]]
    assert parse_entry('{"a":' * 60 + "1" + "}" * 60)
