"""Which address shows what: a path and its query become one query's answer. Knows no HTTP but the names of what can go wrong.

/api/overview                           /api/group/17     /api/trajectory/3:1234
/api/metrics?name=kl&run=other          /api/step/12      /api/search?pattern=...     /api/search/<its name>
/api/steps                              /api/lineage/12   /api/sql?question=select...
/api/timeline?step=12&seconds=60        /api/dropped      /api/pool    /api/rewards?a=exact&b=brevity
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echo_bus.clock import SystemClock
from echo_ops.cli.options import RangeOptions
from echo_ops.cli.ranges import selection_of
from echo_ops.viewer.dropped import dropped_page
from echo_ops.viewer.lineage import lineage_page
from echo_ops.viewer.metrics import Frame
from echo_ops.viewer.questions import MOST_ROWS
from echo_ops.viewer.samples import group_page, trajectory_page
from echo_ops.viewer.searches import MOST_HITS
from echo_ops.viewer.source import Source
from echo_ops.viewer.steps import SORTS, find_step, step_page, steps_page
from echo_ops.viewer.timeline import MOST_SECONDS
from echo_ops.viewer.windows import Json, Window
from echo_replay.searching import TextMatcher, TokenMatcher, parse_tokens
from echo_replay.selection import Fate, Selection
from echo_schemas.errors import EchoError, UserError
from echo_schemas.headers import number_of
from echo_schemas.records import DropReason, Purpose

# The largest windows, in entries: a page stays below a few hundred kilobytes.
_MOST_ROWS, _MOST_SAMPLES, _MOST_TOKENS, _MOST_POINTS, _MOST_CURVES = 500, 64, 4_000, 2_000, 12
_WITHIN = {"prompt": ("prompt",), "answer": ("completion",), "both": ("prompt", "completion")}
_MOST_PATTERN = 500
_MOST_RUNS = 3


class BadQuery(EchoError):
    """An address that asks for something in a way that nobody understands."""


class NoSuchPage(EchoError):
    """An address that shows nothing."""


@dataclass(frozen=True, slots=True)
class Query:
    """What stands behind the question mark: each name with its values."""

    values: Mapping[str, Sequence[str]]

    def check(self, *known: str) -> None:
        """Raises BadQuery for a name that is not known."""
        unknown = sorted(set(self.values) - set(known))
        if unknown:
            raise BadQuery(f"{unknown[0]!r} is not asked for here.", hint=f"Known: {', '.join(known) or 'nothing'}.")

    def text(self, name: str, choices: Sequence[str] = ()) -> str:
        """Empty where it is not given."""
        value = self.values.get(name, [""])[-1]
        if value and choices and value not in choices:
            raise BadQuery(f"{name}={value!r} is none of {', '.join(choices)}.")
        return value

    def number(self, name: str, default: int, most: int = 1 << 62) -> int:
        """At most `most`, whatever is asked for."""
        text = self.text(name)
        value = number_of(text) if text else default
        if value is None:
            raise BadQuery(f"{name}={text!r} is no whole number.")
        return min(value, most)

    def window(self, limit: int, most: int) -> Window:
        """From `offset` and `limit`."""
        return Window(self.number("offset", 0), self.number("limit", limit, most))


Page = Callable[[Source, Query, str], Json]


def answer(source: Source, path: str, values: Mapping[str, Sequence[str]]) -> Json:
    """Raises NoSuchPage, BadQuery; UserError for what the log does not hold; TransportError, TooMany."""
    for pattern, page in _PAGES:
        if (match := pattern.fullmatch(path)) is not None:
            return page(source, Query(values), "".join(match.groups()))
    raise NoSuchPage(f"There is no page {path}.", hint="The viewer begins at /.")


def _overview(source: Source, query: Query, _: str) -> Json:
    query.check()
    return source.overview()


def _metrics(source: Source, query: Query, _: str) -> Json:
    query.check("name", "first", "last", "points", "run")
    names, runs = (list(query.values.get(name, []))[:most] for name, most in (("name", _MOST_CURVES), ("run", _MOST_RUNS)))
    last = query.number("last", 0) if query.text("last") else None
    frame = Frame(first=query.number("first", 0), last=last, most_points=max(1, query.number("points", 800, _MOST_POINTS)))
    return source.curves(names, frame, runs)


def _steps(source: Source, query: Query, _: str) -> Json:
    query.check("offset", "limit")
    return steps_page(source.books(), query.window(20, _MOST_ROWS))


def _step(source: Source, query: Query, version: str) -> Json:
    query.check("offset", "limit", "sort")
    books = source.books()
    step = find_step(books, int(version))
    return step_page(books, step, source.batch(step), query.window(50, _MOST_ROWS), query.text("sort", SORTS) or SORTS[0])


def _group(source: Source, query: Query, group: str) -> Json:
    query.check("offset", "limit", "late")
    window, late = query.window(16, _MOST_SAMPLES), bool(query.text("late"))
    with source.reading() as history:
        return group_page(history, group, window, late=late)


def _trajectory(source: Source, query: Query, place: str) -> Json:
    query.check("offset", "limit", "late")
    partition, offset = place.split(":")
    window, late = query.window(1_000, _MOST_TOKENS), bool(query.text("late"))
    with source.reading() as history:
        return trajectory_page(history, int(partition), int(offset), window, source.pieces, source.drawings, late=late)


def _dropped(source: Source, query: Query, _: str) -> Json:
    query.check("offset", "limit", "reason", "version", "worker")
    version = query.number("version", 0) if query.text("version") else None
    reason = query.text("reason", [each.value for each in DropReason])
    return dropped_page(source.books(), query.window(50, _MOST_ROWS), reason=reason, version=version, worker=query.text("worker"))


def _timeline(source: Source, query: Query, _: str) -> Json:
    query.check("until", "seconds", "step")
    until_ms = query.number("until", 0) if query.text("until") else None
    step = query.number("step", 0) if query.text("step") else None
    return source.timeline(until_ms=until_ms, seconds=max(1, query.number("seconds", 60, MOST_SECONDS)), step=step)


def _pool(source: Source, query: Query, _: str) -> Json:
    query.check("offset", "limit")
    return source.pool(query.window(50, _MOST_ROWS))


def _rewards(source: Source, query: Query, _: str) -> Json:
    query.check("a", "b")
    return source.rewards((query.text("a"), query.text("b")))


def _lineage(source: Source, query: Query, version: str) -> Json:
    query.check()
    return lineage_page(source.books(), int(version))


_RANGE = ("version", "step", "since", "until", "worker", "task", "purpose", "fate")


def _selection(query: Query, run_id: str) -> Selection:
    """The range and the filters of an address."""
    options = RangeOptions(
        version=query.text("version"),
        step=query.text("step"),
        since=query.text("since"),
        until=query.text("until"),
        worker=query.text("worker"),
        task=query.text("task"),
        purpose=query.text("purpose", [each.value for each in Purpose]),
        fate=query.text("fate", [each.value for each in Fate]),
    )
    try:
        return selection_of(options, run_id, SystemClock().time_ms())
    except UserError as exc:
        raise BadQuery(exc.message, hint=exc.hint) from exc


def _search(source: Source, query: Query, _: str) -> Json:
    query.check(*_RANGE, "pattern", "tokens", "in", "ignore_case", "limit")
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
    query.check(*_RANGE, "question", "limit")
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


def _search_on(source: Source, query: Query, name: str) -> Json:
    query.check("offset", "limit")
    return source.searches.look(name, query.window(100, MOST_HITS))


_PAGES: tuple[tuple[re.Pattern[str], Page], ...] = (
    (re.compile(r"/api/overview"), _overview),
    (re.compile(r"/api/metrics"), _metrics),
    (re.compile(r"/api/steps"), _steps),
    (re.compile(r"/api/step/([0-9]{1,15})"), _step),
    (re.compile(r"/api/group/((?:eval-|probe-)?[0-9]{1,18})"), _group),
    (re.compile(r"/api/trajectory/([0-9]{1,9}:[0-9]{1,15})"), _trajectory),
    (re.compile(r"/api/dropped"), _dropped),
    (re.compile(r"/api/timeline"), _timeline),
    (re.compile(r"/api/pool"), _pool),
    (re.compile(r"/api/rewards"), _rewards),
    (re.compile(r"/api/lineage/([0-9]{1,15})"), _lineage),
    (re.compile(r"/api/sql"), _sql),
    (re.compile(r"/api/search"), _search),
    (re.compile(r"/api/search/([0-9a-f]{16})"), _search_on),
)
