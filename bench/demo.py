"""The packaged demos with several seeds, as the table of docs/demo.md.

    python bench/demo.py [--seeds N] [--demo reverse|sort|both] [--json FILE]

Runs one command after the other, each with its own Kafka; times count from the command's start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from command import parser_of, save

_PATIENCE_S = 900
_COLUMNS: Mapping[str, str] = {
    "first step": "{seconds_to_first_step:.1f} s",
    "0.70 after": "{seconds_to_070:.0f} s",
    "whole command": "{wall_seconds:.0f} s",
    "exact match": "{reward_first:.2f} → {reward_last:.2f}",
    "a step": "{s_per_step:.2f} s",
    "learner idle": "{bubble_ratio:.1%}",
    "outside compute": "{learner_outside_compute:.1%}",
    "staleness mean, max": "{staleness_mean:.2f}, {max_staleness}",
    "dropped": "{num_dropped}",
    "weights installed in": "{t_bcast_p50_s:.3f} s",
    "log-prob. difference": "{logprob_max_diff:.1e}",
}


def run(demo: str, seed: int) -> dict[str, Any]:
    """The summary of one demo."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [sys.executable, "-m", "echo_ops.cli", "demo", demo, "--seed", str(seed), "--plain", "--summary", str(summary)]
        found = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        if found.returncode != 0:
            sys.exit(f"{demo} with seed {seed} ended with {found.returncode}:\n{found.stdout[-3_000:]}\n{found.stderr[-1_000:]}")
        return dict(json.loads(summary.read_text(encoding="utf-8")))


def row(demo: str, seed: int, summary: Mapping[str, Any]) -> str:
    """One line of the table; – for a value that the run did not reach."""
    values = {**summary, "num_dropped": sum(summary["dropped"].values())}
    cells = [
        template.format(**values) if all(values[name] is not None for name in _names(template)) else "–" for template in _COLUMNS.values()
    ]
    return f"| {demo} | {seed} | {' | '.join(cells)} |"


def _names(template: str) -> list[str]:
    return [part.split("}")[0].split(":")[0] for part in template.split("{")[1:]]


def main() -> None:
    """Measure, print the table, and write the summaries where --json says."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--demo", choices=("reverse", "sort", "both"), default="both")
    arguments = parser.parse_args()
    sys.stdout.write(f"| demo | seed | {' | '.join(_COLUMNS)} |\n|{'---|' * (len(_COLUMNS) + 2)}\n")
    summaries = []
    for demo in ("reverse", "sort") if arguments.demo == "both" else (arguments.demo,):
        for seed in range(arguments.seeds):
            summary = run(demo, seed)
            summaries.append({"demo": demo, "seed": seed, **summary})
            sys.stdout.write(f"{row(demo, seed, summary)}\n")
            sys.stdout.flush()
    save(arguments.json, summaries)


if __name__ == "__main__":
    main()
