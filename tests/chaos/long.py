"""`python -m tests.chaos.long`: hundreds of faults on one run, unattended, and a table of them. Exits 1 at the first broken promise, with
the run's whole history kept.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from echo_bus.clock import Deadline
from tests.chaos.faults import Fault, Kind, draw
from tests.chaos.proof import in_words, num_sessions, prove, retrain
from tests.chaos.scene import Scene, dump_log, open_scene
from tests.chaos.schedule import Outcome, as_json, suffer, table
from tests.chaos.swarm import ENDED_AS_TOLD

_BEGINS_WITHIN_S = 400.0
_DRAINED_S = 120.0
# Reading the whole log again after each of hundreds of faults would be most of the work.
_CHECK_EVERY = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one schedule; the process's exit code."""
    options = _options(arguments)
    # Ended by whoever waits no longer, it leaves no brokers, disks and networks behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix=f"echoswarm-chaos-{options.seed}-", dir=options.folder))
    outcomes: list[Outcome] = []
    started_s = time.monotonic()
    _say(f"seed {options.seed}, {options.faults} faults, files in {folder}")
    try:
        with open_scene(folder) as scene:
            try:
                _suffer_all(scene, options, outcomes)
            except BaseException:  # whatever ended it, an interrupt included: what happened until then is kept
                _say(traceback.format_exc())
                _say(f"history kept in {folder}: {dump_log(scene.bus, folder / 'records.jsonl')} records, logs of all roles")
                return 1
    finally:
        _say("\n".join(table(outcomes)))
        _say(f"{len(outcomes)} faults in {time.monotonic() - started_s:.0f} s, seed {options.seed}")
        if options.json is not None:
            options.json.write_text(json.dumps({"seed": options.seed, "outcomes": as_json(outcomes)}, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _suffer_all(scene: Scene, options: argparse.Namespace, outcomes: list[Outcome]) -> None:
    rng = random.Random(options.seed)
    scene.wait_for(3, _BEGINS_WITHIN_S, "the run begins")
    for name, why in scene.without.items():
        _say(f"no faults of the {name}: {why}")
    deadline = Deadline.after(60 * options.minutes)
    if options.kills:
        faults = [Fault(Kind.KILL, "learner")] * options.kills
    else:
        faults = draw(rng, options.faults, longest_s=options.longest, without=scene.without)
    for number, fault in enumerate(faults, start=1):
        if deadline.expired():
            _say(f"{options.minutes:g} minutes are over")
            break
        outcomes.append(suffer(scene, fault, rng))
        _say(f"{number:4d}  version {scene.follower.version:5d}  {outcomes[-1]}")
        if number % _CHECK_EVERY == 0:
            _check(scene)
    swarm = scene.swarm
    swarm.terminate_all()
    for name in swarm.names:
        code = swarm.wait_ended(swarm.child(name), Deadline.after(_DRAINED_S), scene.wait)
        assert code in ENDED_AS_TOLD, f"{name} ended with {code} at SIGTERM"
    _check(scene)
    _say(f"{num_sessions(scene.bus)} learners after one another; {retrain(scene.swarm, scene.follower.version)}")


def _check(scene: Scene) -> None:
    _say(f"      {in_words(prove(scene.bus, is_attacked=scene.is_attacked))}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many")
    parser.add_argument("--kills", type=int, default=0, help="instead: so many times kill -9 of the learner")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="of the schedule; by default a new one")
    parser.add_argument("--longest", type=float, default=60.0, help="seconds of the longest freeze or outage")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no fault is begun after so long")
    parser.add_argument("--folder", type=Path, default=None, help="where the run and a kept history lie; by default $TMPDIR")
    parser.add_argument("--json", type=Path, default=None, help="write every fault's numbers there")
    return parser.parse_args(arguments)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
