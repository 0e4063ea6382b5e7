"""Every page of the viewer over HTTP, of one run from two sources, compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_ops.painting import Pieces
from echo_ops.viewer.server import ViewerServer
from echo_ops.viewer.source import Source
from echo_replay.history import History

_WAIT_S = 60.0
# What depends on when somebody looks, and the other runs of a namespace, of which an export of one knows nothing.
_OF_NOW = frozenset({"now_ms", "silent_s", "ended_s", "search", "runs"})


class Viewer:
    """Asks one viewer."""

    def __init__(self, server: ViewerServer) -> None:
        self._server = server

    def page(self, path: str, **query: object) -> Any:
        """Without what depends on the time."""
        return _timeless(self._get(f"{path}?{urlencode(query)}"))

    def found(self, **query: object) -> Any:
        """The page of a search that has ended."""
        deadline = Deadline.after(_WAIT_S)
        page = self._get(f"search?{urlencode(query)}")
        while not page["is_done"]:
            assert not deadline.expired(), "waited for the end of a search"
            page = self._get(f"search/{page['search']}?limit=500")
        return _timeless(page)

    def _get(self, address: str) -> Any:
        with urlopen(f"{self._server.url}api/{address}", timeout=_WAIT_S) as response:
            return json.load(response)


@contextmanager
def opened(bus: Bus, run_id: str, pieces: Pieces | None) -> Iterator[Viewer]:
    """A viewer of one run."""
    history = History(bus, run_id)
    with Source(history.bus, history, pieces=pieces) as source, ViewerServer(source) as server:
        source.refresh()
        yield Viewer(server)


def assert_pages_alike(log: Bus, exported: Bus, run_id: str, pieces: Pieces | None = None) -> None:
    """Overview, Metrics, Steps, Step, Group, Trajectory, Timeline, Rewards, Pool, Lineage, Dropped, Search and SQL."""
    with opened(log, run_id, pieces) as one, opened(exported, run_id, pieces) as other:

        def page(path: str, **query: object) -> Any:
            found = one.page(path, **query)
            assert other.page(path, **query) == found, path
            return found

        version = page("overview")["version"]
        assert page("metrics")["curves"]
        assert page("steps")["steps"]
        seq = page(f"step/{version}")["groups"][0]["seq"]
        samples = page(f"group/{seq}")["samples"]
        assert all(each["rewards"] for each in samples)
        assert page(f"trajectory/{samples[0]['partition']}:{samples[0]['offset']}")["tokens"]
        timeline = page("timeline", seconds=60)
        assert timeline["lanes"]
        assert timeline["lags"]
        assert page("rewards")["lines"]
        assert page("pool")["workers"]
        assert page(f"lineage/{version - 1}")["trained"]
        page("dropped")
        assert page("sql", question="select fate, count(*) as n from trajectories group by 1 order by 1", step=f"1..{version}")["rows"]
        hits = one.found(step=f"{version - 1}..{version}", limit=500)
        assert hits["hits"]
        assert other.found(step=f"{version - 1}..{version}", limit=500) == hits


def _timeless(page: Any) -> Any:
    if isinstance(page, dict):
        return {name: _timeless(value) for name, value in page.items() if name not in _OF_NOW}
    return [_timeless(each) for each in page] if isinstance(page, list) else page
