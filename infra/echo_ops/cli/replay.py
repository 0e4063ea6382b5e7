"""`echoswarm replay`: trajectories of the past into a topic, a file, a folder or standard output."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from echo_bus.clock import SystemClock
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import RangeOptions
from echo_ops.cli.output import err
from echo_ops.cli.ranges import going_on, history_of, selection_of
from echo_replay.history import Told
from echo_replay.replaying import at_original_pace, at_rate
from echo_replay.replaying import replay as write_again
from echo_replay.sinks import STREAM, is_whole, open_sink
from echo_schemas.errors import UserError

Pace = Literal["full", "original"]


def replay(config: Path | None, options: RangeOptions, into: str, *, run: str, rate: float | None, pace: Pace, follow: bool) -> None:
    """Write what is selected again, and say how many records that were."""
    if rate is not None and pace == "original":
        raise UserError("--rate and --pace original contradict each other.", hint="Leave one of them out.")
    if follow and is_whole(into):
        raise UserError(f"{into} would never be finished: what is followed has no end.", hint="Follow into a topic, or into -.")
    clock = SystemClock()
    settings = read_settings(config)
    run_id = run or settings.run.name
    selection = selection_of(options, run_id, clock.time_ms())
    bus = reach_bus(settings)
    with history_of(bus, run_id) as history:
        told: Iterator[Told] = (
            going_on(history, selection, by_time=pace == "original") if follow else history.read(selection, by_time=pace == "original")
        )
        first = next(told, None)
        for sentence in history.missing:
            err.print(f"missing: {sentence}", markup=False)
        if first is None:
            raise UserError("Nothing in the log is what was asked for.", hint="Ask for a wider range, or leave a filter out.")
        chosen = {name: value for name, value in asdict(options).items() if value}
        about = {"namespace": bus.namespace.name, "run": run_id, "asked": chosen, "missing": list(history.missing)}
        sink = open_sink(bus, into, sys.stdout, about)

        told = itertools.chain([first], told)
        paced = at_rate(told, rate, clock) if rate else at_original_pace(told, clock) if pace == "original" else told
        begun_s = clock.monotonic_s()
        try:
            count = write_again(paced, sink)
        except BrokenPipeError:
            # Whoever reads standard output has enough; what Python would still write to it at its end goes nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return
        except OSError as exc:
            raise UserError(f"{into} cannot be written: {exc.strerror}.", hint="Nothing of it was left behind.") from exc
        seconds = clock.monotonic_s() - begun_s
    where = "standard output" if into == STREAM else into
    err.print(f"{count:,} trajectories of {run_id} into {where} in {seconds:.1f} s", markup=False)
