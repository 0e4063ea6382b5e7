"""Searches that run in the background, each on its own thread; pages show their hits in windows.

The server's threads call `start` and `look`. A search reads the log until it has enough hits, until the end, or until no page has asked for
it for a while; it checks this at each trajectory that passes its filters.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from echo_bus.clock import Clock
from echo_ops.harmless import harmless
from echo_ops.viewer.windows import Json, Window, number
from echo_replay.history import History, HistoryRecord
from echo_replay.origin import became
from echo_replay.searching import Hit, TextMatcher, TokenMatcher
from echo_replay.selection import Selection
from echo_schemas.errors import EchoError, UserError
from echo_schemas.records import Trajectory

logger = logging.getLogger(__name__)

Matcher = TextMatcher | TokenMatcher
MOST_HITS = 500
_MOST_AT_ONCE = 2
_KEPT = 8
_FORGOTTEN_S = 20.0
# Characters and tokens that are shown before and after a hit.
_AROUND, _TOKENS_AROUND = 60, 6
# A search that ends within this time is answered completely.
_WAIT_S = 0.5


class TooMany(EchoError):
    """The most searches, readers or questions at a time are running already."""


@dataclass(slots=True, eq=False)
class _Search:
    asked_s: float
    hits: list[Json] = field(default_factory=list)
    num_looked_at: int = 0
    missing: list[str] = field(default_factory=list)
    error: str = ""
    is_done: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class Searches:
    """The searches of one viewer. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._searches: dict[str, _Search] = {}

    def start(self, history: History, selection: Selection, matcher: Matcher | None, limit: int) -> Json:
        """Begin a search, and give its hits after half a second. `history`: the search's own (`History.beside`). `matcher` None: all match.

        Raises TooMany.
        """
        search = _Search(self._clock.monotonic_s())
        name = secrets.token_hex(8)
        with self._lock:
            if sum(not each.is_done for each in self._searches.values()) >= _MOST_AT_ONCE:
                raise TooMany(
                    f"{_MOST_AT_ONCE} searches are going on.", hint="Wait for one to end; a search whose page is closed ends by itself."
                )
            while len(self._searches) >= _KEPT:
                del self._searches[next(key for key, each in self._searches.items() if each.is_done)]
            self._searches[name] = search
        arguments = (search, history.read(selection), history, matcher, min(limit, MOST_HITS))
        threading.Thread(target=self._run, args=arguments, name="search", daemon=True).start()
        search.ended.wait(_WAIT_S)
        return self.look(name, Window(0, limit))

    def look(self, name: str, window: Window) -> Json:
        """The hits of a search so far. Raises UserError for a search that was deleted."""
        with self._lock:
            search = self._searches.get(name)
        if search is None:
            raise UserError("This search no longer exists.", hint="Search again.")
        search.asked_s = self._clock.monotonic_s()
        hits = list(search.hits)
        return {
            "search": name,
            "is_done": search.is_done,
            "num_looked_at": search.num_looked_at,
            "window": window.plain(len(hits)),
            "hits": list(window.of(hits)),
            "missing": search.missing,
            "error": search.error,
        }

    def _run(self, search: _Search, records: Iterator[HistoryRecord], history: History, matcher: Matcher | None, limit: int) -> None:
        try:
            for each in records:
                search.num_looked_at += 1
                hit = None if matcher is None or each.trajectory is None else matcher.find(each.trajectory)
                if hit is not None or matcher is None:
                    search.hits.append(_found(each, hit))
                if len(search.hits) >= limit or self._clock.monotonic_s() - search.asked_s > _FORGOTTEN_S:
                    break
            search.missing = list(history.missing)
        except EchoError as exc:
            search.error = f"{exc.message} {exc.hint}".strip()
        except Exception:  # the edge of the thread: log the traceback, and show an error on the page
            logger.exception("A search ended")
            search.error = "The search ended with an error; the viewer's own output says which."
        finally:
            search.is_done = True
            search.ended.set()


def _found(record: HistoryRecord, hit: Hit | None) -> Json:
    trajectory = record.trajectory
    return {
        "partition": record.where.partition,
        "offset": record.where.offset,
        "group": None if trajectory is None else trajectory.group_id.rpartition("/")[2],
        "index": None if trajectory is None else trajectory.index,
        "worker": None if trajectory is None else trajectory.worker_id,
        "became": became(record),
        "step": record.step,
        "rewards": {harmless(name): number(value) for name, value in sorted(record.rewards.items())},
        "in": None if hit is None else hit.where,
        "snippet": None if trajectory is None else _snippet(trajectory, hit),
    }


def _snippet(trajectory: Trajectory, hit: Hit | None) -> list[str]:
    """The text before the hit, the hit, and the text after it."""
    if hit is None:
        return [harmless(trajectory.completion[:_AROUND]), "", ""]
    if hit.where == "tokens":
        tokens = trajectory.tokens.tolist()
        parts = tokens[max(0, hit.start - _TOKENS_AROUND) : hit.start], tokens[hit.start : hit.end], tokens[hit.end :][:_TOKENS_AROUND]
        return [" ".join(map(str, part)) for part in parts]
    end = min(hit.end, hit.start + 4 * _AROUND)
    before, inside, behind = hit.text[max(0, hit.start - _AROUND) : hit.start], hit.text[hit.start : end], hit.text[end:][:_AROUND]
    return [harmless(before), harmless(inside), harmless(behind)]
