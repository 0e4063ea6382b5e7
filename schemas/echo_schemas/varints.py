"""Numbers as Avro writes them: zig-zag coded, seven bits a byte, the lowest first, the highest bit of each byte but the last set.

For code that reads whole records or some of their fields, one line after the other (`straight`, `projection`): `READ_CODED` and
`READ_NUMBER` are lines of such a function, in which `data` are the bytes and `at` is the position. Most numbers of a record fill one or two
bytes, and the next most are times; a call for each of them would take half of the reading.

    0, -1, 1, 63 are one byte (coded 0, 1, 2, 126); 64 to 8191 are two; Unix milliseconds are six

Wire format: Avro 1.11 specification, "Binary Encoding".
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from typing import Any

_ONE_BYTE = 0x7F
# Zig-zag coded, a number below 64 is one byte of twice its value.
_SMALL = tuple(bytes([2 * number]) for number in range(64))
# Unix milliseconds, from 1987 to 2527, fill so many bytes.
_TIME_BYTES = 6


# Times and offsets come again and again: within a group, and a moment later.
@functools.lru_cache(maxsize=1024, typed=True)
def coded(value: int) -> bytes:
    """The bytes of a number. Raises OverflowError for one of more than 64 bits."""
    value = operator.index(value)
    if not -(1 << 63) <= value < 1 << 63:
        raise OverflowError
    rest, found = (value << 1) ^ (value >> 63), bytearray()
    while rest > _ONE_BYTE:
        found.append(rest & _ONE_BYTE | 0x80)
        rest >>= 7
    found.append(rest)
    return bytes(found)


def _unfold(data: bytes, at: int) -> tuple[int, int]:
    """The number of three bytes or more at a position, still zig-zag coded, and the position behind it. Raises IndexError if the bytes end
    before it, ValueError if it has more than 64 bits."""
    third = data[at + 2]
    if third <= _ONE_BYTE:
        return data[at] & _ONE_BYTE | (data[at + 1] & _ONE_BYTE) << 7 | third << 14, at + 3
    fourth = data[at + 3]
    if fourth <= _ONE_BYTE:
        return data[at] & _ONE_BYTE | (data[at + 1] & _ONE_BYTE) << 7 | (third & _ONE_BYTE) << 14 | fourth << 21, at + 4
    time = _time_of(data[at : at + _TIME_BYTES])
    return _unfold_any(data, at) if time is None else (time, at + _TIME_BYTES)


# The trajectories of a group were asked for at the same time, and started at the same time.
@functools.lru_cache(maxsize=1024)
def _time_of(some: bytes) -> int | None:
    """The number that fills exactly these bytes; None if it ends earlier or later."""
    try:
        found, end = _unfold_any(some, 0)
    except IndexError:
        return None
    return found if end == _TIME_BYTES else None


def _unfold_any(data: bytes, at: int) -> tuple[int, int]:
    found = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        found |= (byte & _ONE_BYTE) << shift
        if byte <= _ONE_BYTE:
            if found >> 64:
                break
            return found, at
    message = "A number of more than 64 bits."
    raise ValueError(message)


READ_CODED = (
    "n = data[at]",
    "at += 1",
    f"if n > {_ONE_BYTE}:",
    "    more = data[at]",
    f"    if more > {_ONE_BYTE}:",
    "        n, at = unfold(data, at - 1)",
    "    else:",
    f"        n = n & {_ONE_BYTE} | more << 7",
    "        at += 1",
)
"""Lines that read the next number, still zig-zag coded, into `n`. If the number is not negative, `n` is twice the number."""
READ_NUMBER = (*READ_CODED, "n = n >> 1 if not n & 1 else ~(n >> 1)")
"""Lines that read the next number into `n`."""
READ_SCOPE: Mapping[str, Any] = {"unfold": _unfold}
"""What these lines name."""


def write_number(value: str) -> str:
    """A line that adds the number in the variable `value` to the parts of a record."""
    return f"add(small[{value}] if 0 <= {value} < 64 else coded({value}))"


WRITE_SCOPE: Mapping[str, Any] = {"small": _SMALL, "coded": coded}
"""What that line names."""
