"""`echoswarm replay`: trajectories of the past into a topic, a file, a folder or standard output."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Literal

import typer

from echo_bus.clock import SystemClock
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, Follow, RunName, in_range
from echo_ops.cli.output import err, remark
from echo_ops.cli.past import going_on, history_of, nothing_selected
from echo_ops.ranges import RangeOptions, selection_of
from echo_replay.history import HistoryRecord
from echo_replay.sinks import STREAM, at_original_pace, at_rate, is_whole, open_sink
from echo_replay.sinks import replay as write_again
from echo_schemas.errors import UserError

Pace = Literal["full", "original"]


@in_range
def replay(
    into: Annotated[
        str,
        typer.Option(
            "--into", metavar="TARGET", help="A topic, a FILE.jsonl, a folder (with a slash in its name), or - for standard output."
        ),
    ],
    config: Config = None,
    run: RunName = "",
    rate: Annotated[float | None, typer.Option(min=0.001, help="Records a second at most.")] = None,
    pace: Annotated[Pace, typer.Option(help="As fast as possible, or with the original gaps.")] = "full",
    *,
    options: RangeOptions,
    follow: Follow = False,
) -> None:
    """Write the selected trajectories again, and print how many."""
    if rate is not None and pace == "original":
        raise UserError("--rate and --pace original contradict each other.", hint="Leave one of them out.")
    if follow and is_whole(into):
        raise UserError(f"{into} would never be finished, since --follow has no end.", hint="Follow into a topic, or into -.")
    clock = SystemClock()
    settings = read_settings(config)
    run_id = run or settings.run.name
    selection = selection_of(options, run_id, clock.time_ms())
    bus = reach_bus(settings)
    with history_of(bus, run_id) as history:
        is_paced = pace == "original"
        records: Iterator[HistoryRecord] = (
            going_on(history, selection, by_time=is_paced) if follow else history.read(selection, by_time=is_paced)
        )
        first = next(records, None)
        remark("missing", history.missing)
        if first is None:
            raise nothing_selected()
        chosen = {name: value for name, value in asdict(options).items() if value}
        about = {"namespace": bus.namespace.name, "run": run_id, "asked": chosen, "missing": list(history.missing)}
        sink = open_sink(bus, into, sys.stdout, about)

        records = itertools.chain([first], records)
        paced = at_rate(records, rate, clock) if rate else at_original_pace(records, clock) if is_paced else records
        begun_s = clock.monotonic_s()
        try:
            count = write_again(paced, sink)
        except BrokenPipeError:
            # The reader of standard output has ended. Python would still write to it at exit, so it goes to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        except OSError as exc:
            raise UserError(f"{into} cannot be written: {exc.strerror}.", hint="Nothing of it was left behind.") from exc
        seconds = clock.monotonic_s() - begun_s
    where = "standard output" if into == STREAM else into
    err.print(f"{count:,} trajectories of {run_id} into {where} in {seconds:.1f} s", markup=False)
