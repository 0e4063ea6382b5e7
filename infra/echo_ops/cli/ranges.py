"""The options of a range of the past as a selection: one range, and filters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from echo_bus.bus import Bus
from echo_ops.cli.context import reach_bus
from echo_ops.cli.options import RangeOptions
from echo_replay.following import follow
from echo_replay.history import History, Told, open_history
from echo_replay.selection import Everything, Fate, Groups, Offsets, Selection, Steps, Times, Versions, Where
from echo_schemas.errors import UserError
from echo_schemas.headers import number_of
from echo_schemas.libraries import ANALYSIS, require_libraries
from echo_schemas.records import Purpose
from echo_settings import Settings
from echo_settings.section import part_of_key

# Longer than a batch takes to be trained: after this time a record is shown without its fate.
_HOLD_S = 60.0
_SPAN = re.compile(r"v?(\d{1,18})(?:\.\.v?(\d{1,18}))?")
_OFFSETS = re.compile(r"(\d{1,9})[:@](\d{1,18})(?:\.\.(\d{1,18}))?")
_AGO = re.compile(r"(\d{1,9}(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_GROUP = re.compile(r"(?:(?P<run>[A-Za-z0-9][A-Za-z0-9._-]*)/)?(?P<group>(?:eval-|probe-)?\d{1,18})")


def history_of(bus: Bus, run_id: str) -> History:
    """The past of a run. Raises UserError for a malformed name, and for an unknown run."""
    return open_history(bus, run_named(run_id))


def run_named(run_id: str) -> str:
    """`run_id` as it is. Raises UserError if it cannot be the name of a run."""
    try:
        return part_of_key(run_id)
    except ValueError:
        raise UserError(
            f"{run_id!r} is no name of a run.", hint="A run's name has letters, digits, '.', '_' and '-', and no slash; a group is demo/17."
        ) from None


def past_of(settings: Settings, run: str, export: Path | None) -> tuple[str, Callable[[], Bus]]:
    """The name of the run, and a function that opens its past: the log, or a folder of `echoswarm export`. Raises UserError."""
    if export is None:
        return run or settings.run.name, partial(reach_bus, settings)
    require_libraries("An export", "pyarrow", install=ANALYSIS)
    from echo_replay.export.exported_log import bus_of
    from echo_replay.export.manifest import open_export

    home, manifest = open_export(export, run and run_named(run))
    return manifest.run_id, partial(bus_of, home, manifest)


def going_on(history: History, selection: Selection, *, by_time: bool = False) -> Iterator[Told]:
    """The past, and then new records, each when its fate is known or after `_HOLD_S`. Ctrl-C ends it."""
    yield from history.read(selection, by_time=by_time)
    try:
        yield from follow(history, selection, hold_s=_HOLD_S)
    except KeyboardInterrupt:
        # The caller finishes what it has read until now.
        return


def selection_of(options: RangeOptions, run_id: str, now_ms: int) -> Selection:
    """Raises UserError for a malformed range, and for two ranges."""
    given = {
        "--version": options.version,
        "--step": options.step,
        "--offsets": options.offsets,
        "--since and --until": options.since or options.until,
        "--group": options.groups,
    }
    named = [name for name, value in given.items() if value]
    if len(named) > 1:
        raise UserError(f"{' and '.join(named[:2])} are two ranges; one is meant.", hint="Run the command once for each.")
    return Selection(
        range=_range_of(options, run_id, now_ms),
        worker=options.worker,
        task=options.task,
        purposes=frozenset({Purpose(options.purpose)}) if options.purpose else frozenset(),
        fates=frozenset({Fate(options.fate)}) if options.fate else frozenset(),
        sample=options.sample,
    )


def nothing_selected() -> UserError:
    """The error of a command whose range holds no record."""
    return UserError("Nothing in the log is what was asked for.", hint="Ask for a wider range, or leave a filter out.")


def parse_span(text: str, option: str) -> tuple[int, int]:
    """`a..b`, both included, or one number. Raises UserError."""
    match = _SPAN.fullmatch(text.strip())
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else -1
    if last < first:
        raise UserError(f"{option} {text!r} names no range.", hint="Write 100..140, from the lower to the higher, or a single number.")
    return first, last


def parse_group(text: str, run_id: str) -> str:
    """The group id of `17`, `eval-3` or `demo/17`. Raises UserError."""
    match = _GROUP.fullmatch(text.strip())
    if match is None:
        raise UserError(f"{text!r} is no group.", hint=f"Write {run_id}/17 or 17; {run_id}/eval-3 for one of an evaluation.")
    if match["run"] not in (None, run_id):
        raise UserError(f"The group {text!r} is not of the run {run_id!r}.", hint=f"Add --run {match['run']}.")
    return f"{run_id}/{_digits(match['group'])}"


def parse_time(text: str, option: str, now_ms: int) -> int:
    """Unix ms of an ISO 8601 time (UTC where it names no zone), or of so long ago: `90m`, `2h`, `3d`. Raises UserError.

    A time before 1970 is 0: brokers refuse others.
    """
    if (ago := _AGO.fullmatch(text.strip())) is not None:
        return max(0, now_ms - int(float(ago[1]) * _SECONDS[ago[2]] * 1000))
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise UserError(f"{option} {text!r} is no time.", hint="Write 2026-11-22T17:05:00, or 90m, 2h or 3d for so long ago.") from None
    return max(0, int((time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp() * 1000))


def parse_times(since: str, until: str, now_ms: int) -> tuple[int | None, int | None]:
    """Unix ms of --since and --until as `parse_time` reads them; None for an empty one. Raises UserError, also if the second is earlier."""
    first = parse_time(since, "--since", now_ms) if since else None
    last = parse_time(until, "--until", now_ms) if until else None
    if first is not None and last is not None and last < first:
        raise UserError(f"--until {until} lies before --since {since}.", hint="Exchange them.")
    return first, last


def _range_of(options: RangeOptions, run_id: str, now_ms: int) -> Where:
    if options.version:
        return Versions(*parse_span(options.version, "--version"))
    if options.step:
        return Steps(*parse_span(options.step, "--step"))
    if options.offsets:
        return Offsets(dict(_offsets(text) for text in options.offsets))
    if options.groups:
        return Groups(frozenset(parse_group(text, run_id) for text in options.groups))
    if options.since or options.until:
        return Times(*parse_times(options.since, options.until, now_ms))
    return Everything()


def _offsets(text: str) -> tuple[int, tuple[int, int]]:
    match = _OFFSETS.fullmatch(text.strip())
    first, last = (int(match[2]), int(match[3] or match[2])) if match else (0, -1)
    if match is None or last < first:
        raise UserError(f"--offsets {text!r} is no range of a partition.", hint="Write 3:100..200: partition, first and last offset.")
    return int(match[1]), (first, last)


def _digits(group: str) -> str:
    """Without leading zeros, which no group id has."""
    purpose, dash, seq = group.rpartition("-")
    return f"{purpose}{dash}{number_of(seq)}"
