"""The learning laboratory: compares learning with the papers. Conditions × tasks × seeds, each a real run, then a table and curves.

    python bench/learning.py [--set nightly] [--folder runs/learning] [--conditions A,B] [--tasks A,B] [--seeds N] [--steps N]
                             [--engine NAME] [--page FILE.md] [--picture FILE.png] [--json FILE]

`bench/laboratory/matrix.toml` lists the cells. A finished cell is a file in the folder and is not run again, so the same command goes on
where it was interrupted. A failed cell is reported, skipped, and run again the next time. The results are those of all finished cells in
the folder, of any set. docs/learning.md explains the claims and their tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from command import save
from laboratory.matrix import Cell, Choice, load_cells
from laboratory.page import draw, figures, put_into, tables
from laboratory.results import Result, read_result, write_result

from echo_schemas.errors import UserError

_MATRIX = Path(__file__).with_name("laboratory") / "matrix.toml"
_CELLS, _WORK = "cells", "work"
_PATIENCE_S = 3600.0


def run_cell(cell: Cell, folder: Path) -> Result:
    """Run one cell. Its folder stays if it fails."""
    # Imported here: a page of finished cells needs neither torch nor Kafka.
    from laboratory.colocated import run_colocated
    from laboratory.pipeline import run_pipeline

    work = folder / _WORK / cell.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    began, began_s = _others_s(), time.monotonic()
    result = (run_colocated if cell.is_colocated else run_pipeline)(cell, work.resolve(), _PATIENCE_S)
    others = (_others_s() - began) / (time.monotonic() - began_s)
    conditions = {"others": round(others, 2), "cores": os.cpu_count(), "ended": time.strftime("%Y-%m-%d %H:%M")}
    write_result(folder / _CELLS / f"{cell.name}.json", result, conditions)
    shutil.rmtree(work)
    return result


def _others_s() -> float:
    """Seconds for which the machine's cores were busy, or kept by its host, with other work than this process and its ended children."""
    with Path("/proc/stat").open(encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in file.readline().split()[1:9])
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])


def run_all(cells: Sequence[Cell], folder: Path) -> int:
    """Run the unfinished cells. Returns the number of failures."""
    (folder / _CELLS).mkdir(parents=True, exist_ok=True)
    num_failed = 0
    for number, cell in enumerate(cells, 1):
        if (folder / _CELLS / f"{cell.name}.json").exists():
            continue
        try:
            result = run_cell(cell, folder)
        except (RuntimeError, UserError) as exc:
            num_failed += 1
            _say(f"[{number}/{len(cells)}] {cell.name} failed: {exc}")
        else:
            _say(
                f"[{number}/{len(cells)}] {cell.name} {result.outcome}: accuracy {result.final:.3f}, {result.train_s:.0f} s of "
                f"{result.wall_s:.0f} s"
            )
    return num_failed


def finished(folder: Path) -> dict[str, dict[str, dict[int, Result]]]:
    """Every finished cell of the folder: by task, condition and seed."""
    found: dict[str, dict[str, dict[int, Result]]] = {}
    for file in sorted((folder / _CELLS).glob("*.json")):
        task, condition, seed = file.stem.rsplit(".", 2)
        found.setdefault(task, {}).setdefault(condition, {})[int(seed)] = read_result(file)
    return found


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _names(text: str) -> list[str]:
    return text.split(",")


def main() -> int:
    """Run, print, write; 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="nightly", help="which cells, as the matrix names them")
    parser.add_argument("--matrix", type=Path, default=_MATRIX)
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="where finished cells are kept")
    parser.add_argument("--conditions", type=_names, help="these instead of the set's")
    parser.add_argument("--tasks", type=_names, help="these instead of the set's")
    parser.add_argument("--seeds", type=int, help="so many instead of the set's")
    parser.add_argument("--steps", type=int, help="so many instead of the matrix's")
    parser.add_argument("--engine", help="another engine than the demo's")
    parser.add_argument("--page", type=Path, help="put the tables between the marks of this page")
    parser.add_argument("--picture", type=Path, help="draw the curves there")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args()
    choice = Choice(
        conditions=arguments.conditions, tasks=arguments.tasks, seeds=arguments.seeds, steps=arguments.steps, engine=arguments.engine
    )
    try:
        cells = load_cells(arguments.matrix, arguments.set, choice)
        num_failed = run_all(cells, arguments.folder)
        tasks = finished(arguments.folder)
        text = tables(tasks)
        _say(text)
        if arguments.page is not None:
            put_into(arguments.page, text)
    except UserError as exc:
        _say(f"{exc.message} {exc.hint}")
        return 2
    if arguments.picture is not None and tasks:
        draw(tasks, arguments.picture)
    save(arguments.json, figures(tasks))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
