"""`python -m tests.fuzz --cases 100000`: so many hostile messages for every topic. Exits 1 at the first that makes a reader fall.

`--topic` for one topic; `--seed` for other messages; `--case` repeats one with its traceback.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from echo_schemas.topics import TOPICS
from tests.fuzz.cases import Fell, run_cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--topic", choices=[topic.name for topic in TOPICS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    failed = 0
    for topic in TOPICS:
        if options.topic not in {None, topic.name}:
            continue
        began_s = time.monotonic()
        if options.case is not None:
            run_cases(topic.name, 1, seed=options.seed, first=options.case)
            continue
        try:
            tally = run_cases(topic.name, options.cases, seed=options.seed)
        except Fell as exc:
            failed = 1
            _say(str(exc))
            continue
        _say(
            f"{tally.topic:<15} {tally.num_read:>8} read {tally.num_invalid:>8} invalid {tally.num_ignored:>7} passed over, the slowest "
            f"{tally.slowest_s * 1000:.0f} ms, {time.monotonic() - began_s:.0f} s  {', '.join(tally.readers)}"
        )
    return failed


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
