"""Reads the place counters of a child from its /metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError

from echo_core.bottleneck import Place, PlaceUse, Use

_LINE = re.compile(r'^echo_place_seconds_total\{place="(\w+)",use="(\w+)"\} ([0-9.e+-]+)$', re.MULTILINE)
_TIMEOUT_S = 1.0


def scrape_places(url: str) -> dict[Place, PlaceUse] | None:
    """The counters now; None if the process does not answer to the end (it is ending, or busy beyond a second)."""
    try:
        # The address is one that a child of ours wrote.
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:  # noqa: S310
            return parse_places(answer.read().decode())
    except (HTTPException, OSError):
        return None


def scrape_notices(url: str) -> dict[str, str] | None:
    """What the process says of itself now, by place, problems of its health included; None if it does not answer."""
    try:
        # The address is one that a child of ours wrote.
        with urllib.request.urlopen(f"{url}/healthz", timeout=_TIMEOUT_S) as answer:  # noqa: S310
            said = json.load(answer)
    except HTTPError as exc:
        # A process that is not well says so with its notices.
        try:
            said = json.load(exc)
        except (OSError, ValueError):
            return None
    except (OSError, ValueError):
        return None
    # The problems of an event loop that is held up are among the notices too.
    return dict(said.get("notices") or said.get("problems") or {})


def parse_places(text: str) -> dict[Place, PlaceUse]:
    """From the text format of Prometheus, without the cost of parsing everything else in it."""
    seconds: dict[Place, dict[Use, float]] = {}
    for place, use, value in _LINE.findall(text):
        seconds.setdefault(Place(place), {})[Use(use)] = float(value)
    return {
        place: PlaceUse(busy_s=uses.get(Use.BUSY, 0.0), empty_s=uses.get(Use.EMPTY, 0.0), blocked_s=uses.get(Use.BLOCKED, 0.0))
        for place, uses in seconds.items()
    }
