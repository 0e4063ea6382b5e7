"""The pages of the viewer: turns a path and its query into the page's data. Independent of HTTP.

/api/overview                           /api/group/17     /api/trajectory/3:1234
/api/metrics?name=kl&run=other          /api/step/12      /api/search?pattern=...     /api/search/<its name>
/api/steps                              /api/lineage/12   /api/sql?question=select...
/api/timeline?step=12&seconds=60        /api/dropped      /api/pool    /api/rewards?a=exact&b=brevity
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echo_bus.clock import SystemClock
from echo_ops.ranges import RangeOptions, selection_of
from echo_ops.viewer.dropped import dropped_page
from echo_ops.viewer.lineage import lineage_page
from echo_ops.viewer.metrics import Frame
from echo_ops.viewer.questions import MOST_ROWS
from echo_ops.viewer.samples import group_page, trajectory_page
from echo_ops.viewer.searches import MOST_HITS
from echo_ops.viewer.source import Source
from echo_ops.viewer.steps import SORTS, find_step, step_page, steps_page
from echo_ops.viewer.timeline import MOST_SECONDS, timeline_page
from echo_ops.viewer.windows import Json, Window
from echo_replay.searching import TextMatcher, TokenMatcher, parse_tokens
from echo_replay.selection import Fate, Selection
from echo_schemas.errors import EchoError, UserError
from echo_schemas.headers import number_of
from echo_schemas.records import DropReason, Purpose

# The largest windows, in entries, so that a page has at most a few hundred kilobytes.
_MOST_ROWS, _MOST_SAMPLES, _MOST_TOKENS, _MOST_POINTS, _MOST_CURVES = 500, 64, 4_000, 2_000, 12
_WITHIN = {"prompt": ("prompt",), "answer": ("completion",), "both": ("prompt", "completion")}
_MOST_PATTERN = 500
_MOST_RUNS = 3


class BadQuery(EchoError):
    """The query of an address is not valid."""


class NoSuchPage(EchoError):
    """No page has this address."""


@dataclass(frozen=True, slots=True)
class Query:
    """The query of an address: each name with its values."""

    values: Mapping[str, Sequence[str]]

    def text(self, name: str, choices: Sequence[str] = ()) -> str:
        """The value; empty if it is not given. Raises BadQuery for a value that is not among `choices`."""
        value = self.values.get(name, [""])[-1]
        if value and choices and value not in choices:
            raise BadQuery(f"{name}={value!r} is none of {', '.join(choices)}.")
        return value

    def number(self, name: str, default: int, most: int = 1 << 62) -> int:
        """The whole number, cut to `most`. Raises BadQuery for other texts."""
        text = self.text(name)
        value = number_of(text) if text else default
        if value is None:
            raise BadQuery(f"{name}={text!r} is no whole number.")
        return min(value, most)

    def optional(self, name: str) -> int | None:
        """The number; None if it is not given."""
        return self.number(name, 0) if self.text(name) else None

    def window(self, limit: int, most: int) -> Window:
        return Window(self.number("offset", 0), self.number("limit", limit, most))


Page = Callable[[Source, Query, str], Json]


def answer(source: Source, path: str, values: Mapping[str, Sequence[str]]) -> Json:
    """Raises NoSuchPage, BadQuery; UserError for what the log does not hold; TransportError, TooMany."""
    for pattern, names, page in _PAGES:
        if (match := re.fullmatch(pattern, path)) is not None:
            known = names.split()
            if unknown := sorted(set(values) - set(known)):
                raise BadQuery(f"{unknown[0]!r} is no parameter of this page.", hint=f"Known: {', '.join(known) or 'nothing'}.")
            return page(source, Query(values), "".join(match.groups()))
    raise NoSuchPage(f"There is no page {path}.", hint="The viewer begins at /.")


def _metrics(source: Source, query: Query, _: str) -> Json:
    names, runs = (list(query.values.get(name, []))[:most] for name, most in (("name", _MOST_CURVES), ("run", _MOST_RUNS)))
    frame = Frame(
        first=query.number("first", 0), last=query.optional("last"), most_points=max(1, query.number("points", 800, _MOST_POINTS))
    )
    return source.curves(names, frame, runs)


def _step(source: Source, query: Query, version: str) -> Json:
    books = source.books()
    step = find_step(books, int(version))
    return step_page(books, step, source.batch(step), query.window(50, _MOST_ROWS), query.text("sort", SORTS) or SORTS[0])


def _group(source: Source, query: Query, group: str) -> Json:
    window, late = query.window(16, _MOST_SAMPLES), bool(query.text("late"))
    with source.reading() as history:
        return group_page(history, group, window, late=late)


def _trajectory(source: Source, query: Query, place: str) -> Json:
    partition, offset = place.split(":")
    window, late = query.window(1_000, _MOST_TOKENS), bool(query.text("late"))
    with source.reading() as history:
        return trajectory_page(history, int(partition), int(offset), window, source.pieces, source.drawings, late=late)


def _dropped(source: Source, query: Query, _: str) -> Json:
    reason, worker = query.text("reason", [each.value for each in DropReason]), query.text("worker")
    return dropped_page(source.books(), query.window(50, _MOST_ROWS), reason=reason, version=query.optional("version"), worker=worker)


def _timeline(source: Source, query: Query, _: str) -> Json:
    seconds = max(1, query.number("seconds", 60, MOST_SECONDS))
    with source.reading() as history:
        return timeline_page(history, until_ms=query.optional("until"), seconds=seconds, step=query.optional("step"))


def _selection(query: Query, run_id: str) -> Selection:
    """The range and the filters of a query. Raises BadQuery."""
    choices = {"purpose": [each.value for each in Purpose], "fate": [each.value for each in Fate]}
    named: dict[str, Any] = {name: query.text(name, choices.get(name, ())) for name in _RANGE.split()}
    try:
        return selection_of(RangeOptions(**named), run_id, SystemClock().time_ms())
    except UserError as exc:
        raise BadQuery(exc.message, hint=exc.hint) from exc


def _search(source: Source, query: Query, _: str) -> Json:
    pattern, tokens = query.text("pattern"), query.text("tokens")
    if pattern and tokens:
        raise BadQuery("Search for a text or for tokens, not for both.")
    if len(pattern) > _MOST_PATTERN:
        raise BadQuery(f"A pattern has at most {_MOST_PATTERN} characters.")
    within = _WITHIN[query.text("in", list(_WITHIN)) or "both"]
    books = source.books()
    selection = _selection(query, books.run_id)
    matcher: TextMatcher | TokenMatcher | None = None
    try:
        if pattern:
            matcher = TextMatcher(pattern, ignore_case=bool(query.text("ignore_case")), within=within)
        elif tokens:
            matcher = TokenMatcher(parse_tokens(tokens))
    except UserError as exc:
        raise BadQuery(exc.message, hint=exc.hint) from exc
    return source.searches.start(books, selection, matcher, query.number("limit", 100, MOST_HITS))


def _sql(source: Source, query: Query, _: str) -> Json:
    question = query.text("question")
    if not question:
        raise BadQuery("There is no question.", hint="Write one SELECT, such as select fate, count(*) from trajectories group by fate.")
    selection = _selection(query, source.run_id)
    if source.questions.export is not None and selection != Selection():
        raise BadQuery("A range belongs to a question of the log; here an export is asked.", hint="Write the range as a WHERE instead.")
    try:
        return source.questions.ask(question, selection, max(1, query.number("limit", 100, MOST_ROWS)), source.reading)
    except UserError as exc:
        raise BadQuery(exc.message, hint=exc.hint) from exc


_RANGE = "version step since until worker task purpose fate"
# The path, the names that its query may have, and the page.
_PAGES: tuple[tuple[str, str, Page], ...] = (
    (r"/api/overview", "", lambda source, query, _: source.overview()),
    (r"/api/metrics", "name first last points run", _metrics),
    (r"/api/steps", "offset limit", lambda source, query, _: steps_page(source.books(), query.window(20, _MOST_ROWS))),
    (r"/api/step/([0-9]{1,15})", "offset limit sort", _step),
    (r"/api/group/((?:eval-|probe-)?[0-9]{1,18})", "offset limit late", _group),
    (r"/api/trajectory/([0-9]{1,9}:[0-9]{1,15})", "offset limit late", _trajectory),
    (r"/api/dropped", "offset limit reason version worker", _dropped),
    (r"/api/timeline", "until seconds step", _timeline),
    (r"/api/pool", "offset limit", lambda source, query, _: source.pool(query.window(50, _MOST_ROWS))),
    (r"/api/rewards", "a b", lambda source, query, _: source.rewards((query.text("a"), query.text("b")))),
    (r"/api/lineage/([0-9]{1,15})", "", lambda source, query, version: lineage_page(source.books(), int(version))),
    (r"/api/sql", f"{_RANGE} question limit", _sql),
    (r"/api/search", f"{_RANGE} pattern tokens in ignore_case limit", _search),
    (r"/api/search/([0-9a-f]{16})", "offset limit", lambda source, query, name: source.searches.look(name, query.window(100, MOST_HITS))),
)
