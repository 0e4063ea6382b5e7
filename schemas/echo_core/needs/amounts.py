"""Bytes, seconds, rates and money of an estimate as text, without exponents. Pure."""

from __future__ import annotations

import math

_CENT = 0.1
"""Smaller amounts of money are printed with two digits that count, not with cents."""
_LEAST_MONEY = 1e-4
_WHOLE = 999.5
"""From here on, rounded to three digits, a number has a thousand or more: it is printed as a whole number."""
_LEAST_PLAIN = 1e-4
"""Below it Python's `g` writes exponents."""


def size(num_bytes: float) -> str:
    """In TB, GB, MB or kB of powers of ten: 606.1 GB, 40.4 MB."""
    for unit, one in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= one:
            return f"{num_bytes / one:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"


def figure(value: float) -> str:
    """Three digits that count, or a whole number: 0.277, 12.4, 1,031, 116,000."""
    if value >= _WHOLE:
        return f"{value:,.0f}"
    if 0 < value < _LEAST_PLAIN:
        return f"{value:.{2 - math.floor(math.log10(value))}f}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """1,131.1 s, 0.3 s, 4.2 ms, less than 0.1 ms."""
    if value >= 0.1 or value == 0:
        return f"{value:,.1f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-4 else "less than 0.1 ms"


def whole_seconds(value: float) -> str:
    """As `seconds`, from ten on without a fraction: 1,131 s, 7.3 s."""
    return f"{value:,.0f} s" if value >= 10 else seconds(value)


def money(amount: float) -> str:
    """$5.83, $0.016, less than $0.0001."""
    if amount >= _CENT:
        return f"${amount:,.2f}"
    return f"${amount:.2g}" if amount >= _LEAST_MONEY else "less than $0.0001"
