"""`echoswarm dlq`: dead letters by reason; each redriven exactly once, or discarded."""

from __future__ import annotations

import functools
import getpass
import json
import math
import socket
import sys
from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any

import typer
from rich.table import Table

from echo_bus.bus import Bus
from echo_bus.client.cluster import RawMessage
from echo_bus.clock import SystemClock
from echo_bus.errors import TopicMissing
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import AsJson, Config, Yes
from echo_ops.cli.output import ExitCode, err, fail, out, shown_time
from echo_ops.harmless import harmless
from echo_ops.ranges import Since, Until, parse_times
from echo_ops.redrive.letters import Letter, letter_of, reason_of
from echo_ops.redrive.preparing import Handling, Prepared, load_mend
from echo_ops.redrive.redriving import ROLE, Backlog, Redrive, Tally, discard, require_reasons, require_redrivable
from echo_runtime.garbage import seldom_collected
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.naming import DEAD_LETTER_SUFFIX
from echo_schemas.topics import BY_NAME, Topic

_SAID = 110
_BYTES_SHOWN = 256
# Clients that connect at once.
_AT_ONCE = 4

Times = tuple[int | None, int | None]
"""The first and the last time of letters, Unix ms; None: without this bound."""
DeadTopic = Annotated[str, typer.Argument(help="The topic that the messages belong on, such as trajectories.")]
Reasons = Annotated[list[str] | None, typer.Option("--reason", help="Only letters with this reason; may be repeated.")]


@dataclass(slots=True, kw_only=True)
class LetterGroup:
    """Letters of one topic and reason. `offsets`: of all of them, ascending; `position`: those before it were handled; `last_done`: how,
    and by whom."""

    newest: RawMessage
    topic: Topic
    oldest_ms: int
    newest_ms: int
    offsets: array[int] = field(default_factory=functools.partial(array, "q"))
    position: int = 0
    last_done: str = ""

    @property
    def handled(self) -> int:
        return bisect_left(self.offsets, self.position)

    @property
    def waiting(self) -> int:
        return len(self.offsets) - self.handled

    @property
    def example(self) -> str:
        return letter_of(self.newest, self.topic).message

    def plain(self) -> dict[str, int | str]:
        times = {"oldest_ms": self.oldest_ms, "newest_ms": self.newest_ms}
        return {"waiting": self.waiting, "handled": self.handled, "last_done": self.last_done, **times, "example": self.example}

    def add(self, raw: RawMessage) -> None:
        time_ms = raw.timestamp()[1]
        self.offsets.append(raw.offset() or 0)
        self.oldest_ms, self.newest_ms, self.newest = min(self.oldest_ms, time_ms), max(self.newest_ms, time_ms), raw


def list_letters(
    topics: Annotated[list[str] | None, typer.Argument(help="Topics, such as trajectories; all unless given.")] = None,
    config: Config = None,
    reason: Reasons = None,
    since: Since = "",
    until: Until = "",
    as_json: AsJson = False,
) -> None:
    """Print how many letters wait, by topic and reason."""
    wanted, times = require_reasons(reason or ()), _times(since, until)
    chosen = [_topic(name) for name in topics or ()] or list(BY_NAME.values())
    bus = reach_bus(read_settings(config), all_runs=True)
    groups: dict[tuple[str, str], LetterGroup] = {}
    # To list an empty topic is to wait for a client to connect.
    with seldom_collected(), ThreadPoolExecutor(_AT_ONCE) as threads:
        for topic, found in zip(chosen, threads.map(functools.partial(_groups_of, bus, wanted, times), chosen), strict=True):
            groups |= {(topic.name, reason): group for reason, group in found.items()}
    if as_json:
        sys.stdout.write(
            json.dumps([{"topic": topic, "reason": reason, **group.plain()} for (topic, reason), group in groups.items()]) + "\n"
        )
        return
    if not groups:
        out.print(f"No {'such ' if topics or wanted or since or until else ''}dead letters in {bus.namespace.name}.")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("topic", "reason", "waiting", "handled", "last done", "oldest", "newest", "the newest says"):
        # What the other commands are given is never cut.
        table.add_column(title, no_wrap=title in {"topic", "reason", "waiting"})
    for (name, why), group in sorted(groups.items(), key=lambda item: (-item[1].waiting, item[0])):
        handled = (f"{group.waiting:,}", f"{group.handled:,}", harmless(group.last_done))
        table.add_row(name, why, *handled, shown_time(group.oldest_ms), shown_time(group.newest_ms), _cut(group.example))
    out.print(table)


def _groups_of(bus: Bus, wanted: frozenset[str], times: Times, topic: Topic) -> dict[str, LetterGroup]:
    """The letters of a topic with the reasons `wanted` (none: all) and of some time, by reason; none of a topic that never had a reader."""
    groups: dict[str, LetterGroup] = {}
    with suppress(TopicMissing), Backlog(bus, topic) as backlog:
        first, end = backlog.offsets_between(*times)
        for raw in backlog.messages(first=first, end=end):
            reason = reason_of(raw)
            if wanted and reason not in wanted:
                continue
            if reason not in groups:
                time_ms = raw.timestamp()[1]
                groups[reason] = LetterGroup(newest=raw, topic=topic, oldest_ms=time_ms, newest_ms=time_ms)
            groups[reason].add(raw)
        # Each reason has a group, and a client of its own that asks for it.
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for (reason, group), position in zip(groups.items(), threads.map(backlog.position, groups), strict=True):
                group.position, group.last_done = position, backlog.last_done(reason)
    return groups


def show(
    topic: DeadTopic,
    offset: Annotated[int | None, typer.Argument(help="Of the letter; the newest ones unless given.", min=0)] = None,
    config: Config = None,
    reason: Reasons = None,
    since: Since = "",
    until: Until = "",
    last: Annotated[int, typer.Option("--last", "-n", help="How many of the newest.", min=1)] = 5,
) -> None:
    """Print one letter by its offset, or the newest ones."""
    asked, wanted, times = _topic(topic), require_reasons(reason or ()), _times(since, until)
    bus = reach_bus(read_settings(config), all_runs=True)
    with Backlog(bus, asked) as backlog:
        first, end = backlog.offsets_between(*times)
        if offset is not None:
            first, end = max(first, offset), min(end, offset + 1)
        elif not wanted:
            first = max(first, end - last)
        found = (letter for letter in backlog.letters(first=first, end=end) if not wanted or letter.reason in wanted)
        letters = deque(found, maxlen=last)
        for letter in letters:
            _show(bus, letter, is_waiting=letter.offset >= backlog.position(letter.reason))
    if not letters:
        is_choice = wanted or since or until or offset is not None
        raise UserError(
            f"{topic} has no such dead letter." if is_choice else f"{topic} has no dead letters.",
            hint="`echoswarm dlq list` says what there is.",
        )


def redrive(
    topic: DeadTopic,
    config: Config = None,
    reason: Reasons = None,
    until: Until = "",
    limit: Annotated[int | None, typer.Option(help="At most this many letters.", min=1)] = None,
    rate: Annotated[float | None, typer.Option(help="At most this many letters a second.", min=0.01)] = None,
    mend: Annotated[str, typer.Option(help="A function that mends a letter: file.py:function.")] = "",
    pass_by: Annotated[bool, typer.Option("--pass-by", help="Pass by letters that would come straight back.")] = False,
    yes: Yes = False,
) -> None:
    """Print what would be done, and with `yes` do it."""
    times = _times("", until)
    wanted, target, mended = require_reasons(reason or ()), require_redrivable(_bare(topic)), load_mend(mend) if mend else None
    if rate is not None and not math.isfinite(rate):
        raise UserError(f"--rate {rate} is no number of letters a second.", hint="Leave it out to write as fast as the brokers take them.")
    bus = reach_bus(read_settings(config), ROLE)
    with Backlog(bus, target) as backlog:
        _, end = backlog.offsets_between(*times)
        work = Redrive(bus, backlog, by=_me(), mend=mended)

        def letters() -> Iterator[Letter]:
            return islice(backlog.waiting(wanted, end), limit)

        if not yes:
            _say_plan(work.prepared(letters()))
            return
        tally = Tally()
        try:
            work.run(letters(), tally, rate=rate, passes_by=pass_by, note=_progress)
        except KeyboardInterrupt:
            _say_done(tally)
            err.print("Interrupted. The rest waits: the same command goes on behind these.")
            raise
    _say_done(tally)


def discard_letters(topic: DeadTopic, config: Config = None, reason: Reasons = None, until: Until = "", yes: Yes = False) -> None:
    """Print which letters would be discarded, and with `yes` do it."""
    wanted, asked, times = require_reasons(reason or ()), _topic(topic), _times("", until)
    bus = reach_bus(read_settings(config), ROLE)
    with Backlog(bus, asked) as backlog:
        _, end = backlog.offsets_between(*times)
        waiting = backlog.waiting(wanted, end)
        counts = discard(bus, backlog, waiting, by=_me()) if yes else Counter(letter.reason for letter in waiting)
    if not counts:
        out.print("Nothing waits.")
        return
    done = "Discarded" if yes else "Would discard"
    counted = ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
    out.print(f"{done}: {counted}. They stay readable until their retention is over." + ("" if yes else " Add --yes."))


def _times(since: str, until: str) -> Times:
    return parse_times(since, until, SystemClock().time_ms())


def _say_plan(prepared: Iterable[Prepared]) -> None:
    examples: dict[tuple[Handling, str], Prepared] = {}
    counts: Counter[tuple[Handling, str]] = Counter()
    for each in prepared:
        where = (each.handling, each.letter.reason)
        counts[where] += 1
        examples.setdefault(where, each)
    if not counts:
        out.print("Nothing waits.")
        return
    table = Table("would", "reason", "letters", "for example", box=None, pad_edge=False)
    for (handling, reason), count in sorted(counts.items(), key=lambda item: (item[0][0] is not Handling.WRITE, -item[1])):
        example = examples[handling, reason]
        table.add_row(_WOULD[handling], reason, f"{count:,}", _cut(f"{example.letter.offset}: {example.why or example.letter.message}"))
    out.print(table)
    if any(handling is Handling.STOP for handling, _ in counts):
        out.print(
            "It ends before the first letter that would come straight back: --mend mends them, --pass-by passes them by, "
            "`echoswarm dlq discard` ends their waiting."
        )
    out.print("Nothing was written. Add --yes.")


def _say_done(tally: Tally) -> None:
    parts = [f"{count:,} {_DONE[handling]}" for handling, count in tally.done.items()]
    out.print(f"{', '.join(parts) or 'Nothing'}.")
    if tally.stopped is not None:
        fail(
            f"It ended before the letter {tally.stopped.letter.offset}, which would come straight back: {tally.stopped.why}",
            "Mend it (--mend), pass such ones by (--pass-by), or discard them. What was written stays written, and is not written again.",
            ExitCode.FAILED,
        )


_WOULD = {
    Handling.WRITE: "write again",
    Handling.STOP: "stop here",
    Handling.TOO_OFTEN: "pass by: came back twice",
    Handling.LEFT: "pass by: left by the mend",
    Handling.REPEATED: "pass by: another reader's letter of the same message",
}
_DONE = {
    Handling.WRITE: "written again",
    Handling.STOP: "passed by, since they would come straight back",
    Handling.TOO_OFTEN: "passed by, since they came back twice",
    Handling.LEFT: "passed by, since the mend left them",
    Handling.REPEATED: "passed by, since another reader's letter of the same message was written",
}


def _progress(tally: Tally) -> None:
    if err.is_terminal:
        err.print(f"{tally.done.total():,} done", end="\r")


def _show(bus: Bus, letter: Letter, *, is_waiting: bool) -> None:
    state = "waits" if is_waiting else "was brought back or discarded"
    out.print(
        f"{letter.topic.name}{DEAD_LETTER_SUFFIX} @{letter.offset}  {shown_time(letter.time_ms)}  {state}", style="bold cyan", markup=False
    )
    origin = "unknown" if letter.origin is None else f"{letter.topic.name}[{letter.origin.partition}]@{letter.origin.offset}"
    rows = {
        "reason": f"{letter.reason}: {letter.message}",
        "lay at": origin,
        "read by": letter.reader,
        "written by": letter.writer,
        "came back": f"{letter.num_redriven} times",
        "key": "none" if letter.key is None else letter.key.decode(errors="replace"),
        "headers": "  ".join(f"{name}={(value or b'').decode(errors='replace')}" for name, value in letter.headers),
        "value": _content(bus, letter),
    }
    for name, text in rows.items():
        out.print(f"  {name:<11}{harmless(text)}", markup=False)


def _content(bus: Bus, letter: Letter) -> str:
    if letter.value is None:
        return "none in this copy" if letter.is_cut else "none"
    cut = " (cut)" if letter.is_cut else ""
    try:
        record: Any = bus.codec.decode(letter.value)
    except InvalidRecord:
        return f"{len(letter.value):,} bytes{cut}: {letter.value[:_BYTES_SHOWN].hex(' ')}"
    return f"{record}{cut}"


def _topic(name: str) -> Topic:
    if (found := BY_NAME.get(_bare(name))) is None:
        raise UserError(f"There is no topic {name!r}.", hint=f"Known: {', '.join(BY_NAME)}.")
    return found


def _bare(name: str) -> str:
    return name.removesuffix(DEAD_LETTER_SUFFIX)


def _me() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):
        # The user of a container may have no name.
        return socket.gethostname()


def _cut(text: str) -> str:
    text = harmless(text)
    return text if len(text) <= _SAID else f"{text[:_SAID]}…"
