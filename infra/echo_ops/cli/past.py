"""The past of a run, as several commands open it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from echo_bus.bus import Bus
from echo_ops.cli.context import reach_bus
from echo_ops.cli.output import remark
from echo_replay.following import follow
from echo_replay.history import History, HistoryRecord
from echo_replay.selection import Selection
from echo_schemas.errors import UserError
from echo_schemas.libraries import ANALYSIS, require_libraries
from echo_settings import Settings
from echo_settings.section import part_of_key

# Longer than a batch takes to be trained: after this time a record is shown without its fate.
_HOLD_S = 60.0


def history_of(bus: Bus, run_id: str) -> History:
    """The past of a run. Raises UserError for a malformed name, and for an unknown run."""
    return History(bus, run_named(run_id))


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


def going_on(history: History, selection: Selection, *, by_time: bool = False) -> Iterator[HistoryRecord]:
    """The past, and then new records, each when its fate is known or after `_HOLD_S`. Ctrl-C ends it."""
    yield from history.read(selection, by_time=by_time)
    try:
        yield from follow(history, selection, hold_s=_HOLD_S)
    except KeyboardInterrupt:
        # The caller finishes what it has read until now.
        return


def remark_later(num_rewards: int) -> None:
    """Say that rewards were left out, because they were written too late."""
    if num_rewards:
        remark("note", [f"the log holds {num_rewards:,} rewards that were written later, of these or of other samples: --late reads them"])


def nothing_selected() -> UserError:
    """The error of a command whose range holds no record."""
    return UserError("Nothing in the log is what was asked for.", hint="Ask for a wider range, or leave a filter out.")
