"""Reads a child process's place counters from its /metrics, and its notices from its /healthz."""

from __future__ import annotations

import json
import re
import urllib.request
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from echo_core.bottleneck import Place, PlaceUse, Use

_LINE = re.compile(r'^echo_place_seconds_total\{place="(\w+)",use="(\w+)"\} ([0-9.e+-]+)$', re.MULTILINE)
_TIMEOUT_S = 1.0


def scrape_places(url: str) -> dict[Place, PlaceUse] | None:
    """The counters now; None if the process does not answer within a second."""
    text = _read(f"{url}/metrics")
    return None if text is None else parse_places(text)


def scrape_notices(url: str) -> dict[str, str] | None:
    """The process's notices now, by place, or else its health problems; None if it does not answer."""
    try:
        said = json.loads(_read(f"{url}/healthz") or "")
    except ValueError:
        return None
    # A blocked event loop is among the problems and the notices.
    return dict(said.get("notices") or said.get("problems") or {})


def _read(url: str) -> str | None:
    """The body of the answer, also of an answer with an error status; None without an answer."""
    try:
        try:
            # A child of ours wrote the address.
            answer: Any = urllib.request.urlopen(url, timeout=_TIMEOUT_S)  # noqa: S310
        except HTTPError as exc:
            answer = exc
        with answer:
            return str(answer.read().decode())
    except (HTTPException, OSError, UnicodeDecodeError):
        return None


def parse_places(text: str) -> dict[Place, PlaceUse]:
    """Parse the place counters in Prometheus' text format, and nothing else, to save time."""
    seconds: dict[Place, dict[Use, float]] = {}
    for place, use, value in _LINE.findall(text):
        seconds.setdefault(Place(place), {})[Use(use)] = float(value)
    return {
        place: PlaceUse(busy_s=uses.get(Use.BUSY, 0.0), empty_s=uses.get(Use.EMPTY, 0.0), blocked_s=uses.get(Use.BLOCKED, 0.0))
        for place, uses in seconds.items()
    }
