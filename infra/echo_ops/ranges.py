"""A range of the past as somebody types it, and what it selects: one range, and filters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from echo_replay.selection import Everything, Fate, Groups, Offsets, Selection, Steps, Times, Versions, Where
from echo_schemas.errors import UserError
from echo_schemas.headers import number_of
from echo_schemas.records import Purpose

_SPAN = re.compile(r"v?(\d{1,18})(?:\.\.v?(\d{1,18}))?")
_OFFSETS = re.compile(r"(\d{1,9})[:@](\d{1,18})(?:\.\.(\d{1,18}))?")
_AGO = re.compile(r"(\d{1,9}(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_GROUP = re.compile(r"(?:(?P<run>[A-Za-z0-9][A-Za-z0-9._-]*)/)?(?P<group>(?:eval-|probe-)?\d{1,18})")


Since = Annotated[
    str, typer.Option(metavar="TIME", help="Written at this time or later: 2026-11-22T17:05:00 (UTC), or 90m, 2h or 3d for so long ago.")
]
Until = Annotated[str, typer.Option(metavar="TIME", help="Written at this time or before.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOptions:
    """Which records of the past, as the options were typed; empty where an option was not given."""

    version: Annotated[str, typer.Option(metavar="A..B", help="Trajectories with a token of one of these versions.")] = ""
    step: Annotated[str, typer.Option(metavar="A..B", help="Trajectories that were trained in these steps.")] = ""
    offsets: Annotated[list[str] | None, typer.Option(metavar="P:A..B", help="Offsets of a partition of trajectories; repeatable.")] = None
    since: Since = ""
    until: Until = ""
    groups: Annotated[list[str] | None, typer.Option("--group", metavar="GROUP", help="A group, such as demo/17 or 17; repeatable.")] = None
    worker: Annotated[str, typer.Option(metavar="NAME", help="Only samples of this worker.")] = ""
    task: Annotated[str, typer.Option(metavar="NAME", help="Only samples of this task.")] = ""
    purpose: Annotated[Literal["", "train", "eval", "probe"], typer.Option(help="Only samples with this purpose.")] = ""
    fate: Annotated[
        Literal["", "trained", "dropped", "dead", "evaluated", "probed", "open"], typer.Option(help="Only samples with this fate.")
    ] = ""
    sample: Annotated[int | None, typer.Option(min=0, help="Only this member of each group.")] = None


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
