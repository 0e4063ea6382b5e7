"""Sokoban's boards and turns per second, in ECHO's configuration, on one core.

    python bench/sokoban.py [--boards N]

Prints one JSON object. Seconds are processor time, so that other load on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

from echo_tasks.sokoban import Sokoban
from echo_tasks.sokoban.board import Move


def measure(num_boards: int = 300) -> dict[str, Any]:
    """`boards_per_s`; `step_us`: microseconds of a turn of 25 actions and its observation; `solution_moves`: a board's mean."""
    task = Sokoban()
    started_s = time.process_time()
    levels = [task.level(0, seq) for seq in range(num_boards)]
    made_s = time.process_time()
    rng = random.Random(0)
    answers = [" || ".join(rng.choices(list(Move), k=task.actions_per_round)) for _ in range(64)]
    entries = [task.prompt(0, seq).entry for seq in range(64)]
    played_s, num_turns = 0.0, 0
    for entry in entries * 4:
        episode = task.environment(entry)
        before_s = time.process_time()
        for answer in answers[: task.rounds]:
            num_turns += 1
            if episode.step(f"<answer>{answer}</answer>").done:
                break
        played_s += time.process_time() - before_s
    return {
        "boards_per_s": num_boards / (made_s - started_s),
        "step_us": played_s / num_turns * 1e6,
        "solution_moves": sum(len(level.solution) for level in levels) / num_boards,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--boards", type=int, default=300)
    sys.stdout.write(json.dumps(measure(parser.parse_args().boards)) + "\n")


if __name__ == "__main__":
    main()
