"""The learning laboratory: compares learning with the papers. Conditions × tasks × seeds, each a real run, then a table and curves.

    python bench/learning.py [--set nightly] [--conditions A,B] [--tasks A,B] [--seeds N] [--page FILE.md] [--picture FILE.png]
                             [--json FILE] [--folder FOLDER [--matrix FILE] [--steps N] [--engine NAME]]

`bench/laboratory/matrix.toml` lists the cells. A finished cell is a file in `bench/laboratory/cells`, which is committed, and is not run
again: the same command goes on where it was interrupted, and more seeds join those that there are. A failed cell is reported, skipped, and
run again the next time. The results are those of all finished cells, of any set. With --folder the cells are those of FOLDER/cells alone.
A finished cell of another number of steps, or of another engine, than the command asks for is refused before anything runs.
docs/learning.md explains the claims and their tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from command import save
from laboratory.matrix import Cell, Choice, conditions_of_sets, load_cells, names_in_order
from laboratory.page import check_page, draw, figures, put_into, tables
from laboratory.results import Result, read_result, write_result

from echo_rollout.engines.catalogue import check_engine
from echo_schemas.errors import UserError

_MATRIX = Path(__file__).with_name("laboratory") / "matrix.toml"
_COMMITTED = _MATRIX.with_name("cells")
_WORK = Path("runs", "learning", "work")
_PATIENCE_S = 3600.0


def run_cell(cell: Cell, cells: Path, work: Path) -> Result:
    """Run one cell, and keep its result in `cells`. Its folder in `work` stays if it fails."""
    # Imported here: a page of finished cells needs neither torch nor Kafka.
    from laboratory.colocated import run_colocated
    from laboratory.pipeline import run_pipeline

    folder = work / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    core_s = _core_s()
    began, began_s = _others_s(), time.monotonic()
    result = (run_colocated if cell.is_colocated else run_pipeline)(cell, folder.resolve(), _PATIENCE_S)
    others = (_others_s() - began) / (time.monotonic() - began_s)
    ended = time.strftime("%Y-%m-%d %H:%M")
    core_s = round((core_s + _core_s()) / 2, 3)
    conditions = {"others": round(others, 2), "core_s": core_s, "cores": os.cpu_count(), "ended": ended, "commit": _commit()}
    write_result(_file_of(cell, cells), result, {**conditions, "engine": cell.engine})
    shutil.rmtree(folder)
    return result


def _file_of(cell: Cell, cells: Path) -> Path:
    """Where its result is, or will be."""
    return cells / f"{cell.name}.json"


def _commit() -> str:
    """The commit that is checked out, with a mark if files were changed since; empty outside a repository."""
    command = ("git", "-C", str(_MATRIX.parent), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=10")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _core_s() -> float:
    """Seconds of three million turns of a loop, the median of five: how fast a core is now."""
    return statistics.median(_turns_s() for _ in range(5))


def _turns_s() -> float:
    started_s = time.perf_counter()
    for _ in range(3_000_000):
        pass
    return time.perf_counter() - started_s


def _others_s() -> float:
    """Seconds for which the machine's cores were busy, or kept by its host, with other work than this process and its ended children."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in file.readline().split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def run_all(wanted: Sequence[Cell], cells: Path, work: Path) -> int:
    """Run those that have no file in `cells`. Returns the number of failures."""
    cells.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for number, cell in enumerate(wanted, 1):
        if _file_of(cell, cells).exists():
            continue
        try:
            result = run_cell(cell, cells, work)
        except (RuntimeError, UserError) as exc:
            num_failed += 1
            _say(f"[{number}/{len(wanted)}] {cell.name} failed: {exc}")
        else:
            _say(
                f"[{number}/{len(wanted)}] {cell.name} {result.outcome}: accuracy {result.final:.3f}, {result.train_s:.0f} s of "
                f"{result.wall_s:.0f} s"
            )
    return num_failed


def check_finished(wanted: Sequence[Cell], cells: Path) -> None:
    """Raise UserError if a file in `cells` is of another number of steps, or of another engine, than its wanted cell."""
    for cell in wanted:
        file = _file_of(cell, cells)
        if file.exists() and (difference := _difference(read_result(file), cell)):
            raise UserError(
                f"{file} {difference}.", hint="Name another --folder for such cells, or remove this file if the cell shall run again."
            )


def _difference(result: Result, cell: Cell) -> str:
    """How a result differs from what `cell` asks for; empty if it does not."""
    # A run that diverged ended before its last step.
    is_whole = result.outcome == "finished"
    if result.num_steps > cell.num_steps or (is_whole and result.num_steps != cell.num_steps):
        return f"is a cell of {result.num_steps} steps, but {cell.num_steps} are asked for"
    if result.engine is not None and result.engine != cell.engine:
        return f"is a cell of the engine {result.engine!r}, but {cell.engine!r} is asked for"
    return ""


def finished(cells: Path, matrix: Path = _MATRIX) -> dict[str, dict[str, dict[int, Result]]]:
    """Every finished cell: by task, condition and seed, in the order of the matrix's sets."""
    found: dict[str, dict[str, dict[int, Result]]] = {}
    for file in sorted(cells.glob("*.json")):
        task, condition, seed = file.stem.rsplit(".", 2)
        found.setdefault(task, {}).setdefault(condition, {})[int(seed)] = read_result(file)
    tasks, conditions = names_in_order(matrix)
    return {
        task: {name: dict(sorted(found[task][name].items())) for name in sorted(found[task], key=_place_in(conditions))}
        for task in sorted(found, key=_place_in(tasks))
    }


def _place_in(names: Sequence[str]) -> Callable[[str], tuple[int, str]]:
    """A key to sort by: the place in `names`, others after them."""
    return lambda name: (names.index(name) if name in names else len(names), name)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _names(text: str) -> list[str]:
    return text.split(",")


def _wanted_cells(arguments: argparse.Namespace, cells: Path) -> list[Cell]:
    """The cells that the command line asks for. Raises UserError for every mistake in it that can be seen before anything runs."""
    if arguments.folder is None and (arguments.matrix != _MATRIX or arguments.steps is not None or arguments.engine is not None):
        raise UserError("Such cells are not comparable with the committed ones.", hint="Give them a place of their own: --folder.")
    choice = Choice(
        conditions=arguments.conditions, tasks=arguments.tasks, seeds=arguments.seeds, steps=arguments.steps, engine=arguments.engine
    )
    wanted = load_cells(arguments.matrix, arguments.set, choice)
    if arguments.engine is not None:
        check_engine(arguments.engine, {})
    if arguments.page is not None:
        check_page(arguments.page)
    check_finished(wanted, cells)
    return wanted


def main() -> int:
    """Run, print, write; 1 if a cell failed, 2 if the command line is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="nightly", help="which cells, as the matrix names them")
    parser.add_argument("--matrix", type=Path, default=_MATRIX)
    parser.add_argument("--folder", type=Path, help="keep finished cells there, apart from the committed ones")
    parser.add_argument("--conditions", type=_names, help="these instead of the set's")
    parser.add_argument("--tasks", type=_names, help="these instead of the set's")
    parser.add_argument("--seeds", type=int, help="so many instead of the set's")
    parser.add_argument("--steps", type=int, help="so many instead of the matrix's")
    parser.add_argument("--engine", help="another engine than the demo's")
    parser.add_argument("--page", type=Path, help="put the tables between the marks of this page")
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args()
    cells, work = (_COMMITTED, _WORK) if arguments.folder is None else (arguments.folder / "cells", arguments.folder / "work")
    try:
        num_failed = run_all(_wanted_cells(arguments, cells), cells, work)
        tasks = finished(cells, arguments.matrix)
        text = tables(tasks)
        _say(text)
        if arguments.page is not None:
            put_into(arguments.page, text)
    except UserError as exc:
        _say(f"{exc.message} {exc.hint}")
        return 2
    if arguments.picture is not None and tasks:
        draw(tasks, conditions_of_sets(arguments.matrix), arguments.picture)
    save(arguments.json, figures(tasks))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
