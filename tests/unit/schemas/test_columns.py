"""Seqs as bitmaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.columns import MOST_SEQS, pack_seqs, seqs_of


@given(base=st.integers(0, 10**12), steps=st.sets(st.integers(-5, 3_000)))
def test_seqs_come_back_as_they_were_from_the_base_on(base: int, steps: set[int]) -> None:
    assert seqs_of(base, pack_seqs(base, (base + step for step in steps))) == sorted(base + step for step in steps if step >= 0)


def test_a_thousand_seqs_close_together_take_125_bytes_and_far_ones_none() -> None:
    assert len(pack_seqs(10**9, range(10**9, 10**9 + 1_000))) == 125
    assert pack_seqs(0, (0, MOST_SEQS, 10**12)) == b"\x01"
    assert len(seqs_of(0, b"\xff" * MOST_SEQS)) == MOST_SEQS
