"""Deltas of snapshots: what is patched is the new one, whatever changed; what does not fit is said."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_bus.blobs import delta as deltas
from echo_bus.blobs.delta import diff, patch
from echo_bus.errors import BlobCorrupt
from tests.thorough import examples

# Some blocks, the last one with an odd number of bytes.
SIZE = 2 * deltas.BLOCK_BYTES + 1001


def changed(data: bytes, places: list[int], seed: int = 0) -> bytes:
    new = bytearray(data)
    for place, value in zip(places, np.random.default_rng(seed).bytes(len(places)), strict=True):
        new[place % len(data)] = value
    return bytes(new)


OLD = np.random.default_rng(1).bytes(SIZE)


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.integers(0, SIZE - 1), max_size=200), st.lists(st.integers(0, SIZE - 1), max_size=50))
def test_what_is_patched_is_the_new_one_and_deltas_are_folded(first: list[int], second: list[int]) -> None:
    one = changed(OLD, first)
    two = changed(one, [*second, SIZE - 1, 0], seed=2)
    deltas_made = [diff([OLD], [one], most_bytes=SIZE), diff([one[:1000], one[1000:]], [two], most_bytes=SIZE)]
    there = [each for each in deltas_made if each is not None]
    assert len(there) == 2
    assert sum(map(len, there)) < 10_000
    assert b"".join(patch([OLD], there[0])) == one
    assert b"".join(patch(patch([OLD], there[0]), there[1])) == two


def test_nothing_and_everything_may_change() -> None:
    same = diff([OLD], [OLD], most_bytes=100)
    assert same is not None
    assert b"".join(patch([OLD], same)) == OLD
    other = bytes(~np.frombuffer(OLD, np.uint8))
    assert diff([OLD], [other], most_bytes=SIZE // 2) is None, "more than it saves"
    whole = diff([OLD], [other], most_bytes=4 * SIZE)
    assert whole is not None
    assert b"".join(patch([OLD], whole)) == other


@pytest.mark.parametrize("new", [OLD[:-1], OLD + b"x", OLD[:10], b""])
def test_snapshots_of_another_size_have_no_delta(new: bytes) -> None:
    assert diff([OLD], [new], most_bytes=SIZE) is None


def test_a_delta_that_does_not_fit_is_said() -> None:
    small = OLD[:5000]
    made = diff([small], [changed(small, [5, 4999])], most_bytes=5000)
    assert made is not None
    for old, delta, says in [
        (small, made[:-1], "unpacked"),
        (small, b"", "unpacked"),
        (small, made + b"x", "another size"),
        (small[:100], made, "beyond the end"),
        (small, struct.pack("<I", 4) + b"junk", "unpacked"),
        (small, _packed(struct.pack("<I", 7)), "another size than it says"),
        (small, _packed(b""), "another size than it says"),
    ]:
        with pytest.raises(BlobCorrupt, match=says):
            b"".join(patch([old], delta))


def _packed(changes: bytes) -> bytes:
    import cramjam

    packed = bytes(cramjam.zstd.compress(changes))
    return struct.pack("<I", len(packed)) + packed
