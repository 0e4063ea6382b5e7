"""`python -m tests.endurance`: a real run watched for so many minutes, then one that makes far more than its learner takes.

The first must hold as much memory, files, threads, metric series and disk at its end as after its warm-up, and its log what retention
keeps. Of the second nothing may be lost, and its learner must hold no more for it. A table, JSON, and exit code 1 with the reasons if not.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_embedded.storage import log_folder
from echo_ops.report.offsets import OffsetWatch
from echo_replay.audit import audit_run
from echo_replay.verdicts import Verdict as Proof
from echo_schemas.topics import TRAJECTORIES, WEIGHTS
from tests.chaos.live_run import LiveRun, open_run
from tests.chaos.proof import in_words, prove
from tests.chaos.swarm import ENDED_AS_TOLD
from tests.endurance.judge import Trend, Verdict
from tests.endurance.watch import Watch, as_json, sizes_of_partitions, table

_OVERLOAD = Path(__file__).with_name("overload.toml")
_BEGINS_WITHIN_S = 400.0
_DRAINED_S = 60.0
_CAUGHT_UP_S = 300.0
_LOOK_S = 2.0
_MIB = 1 << 20
# The least that Kafka allows for a segment, so that retention has something to remove within minutes.
_SEGMENT_BYTES, _KEPT_BYTES = _MIB, 2 * _MIB
# Besides what is kept, the segment that is written to and one that is about to go.
_MOST_BYTES = _KEPT_BYTES + 2 * _SEGMENT_BYTES
_SMALL_LOGS = {
    "segment.bytes": str(_SEGMENT_BYTES),
    "retention.bytes": str(_KEPT_BYTES),
    "file.delete.delay.ms": "1000",
    "min.cleanable.dirty.ratio": "0.1",
}
# Of one version, with the newest's copy under a key of its own until Kafka compacts it.
_MANIFEST_BYTES = 2_560
# Of a run whose learner takes so much less, a learner that kept everything would be found out within a minute.
_LEAST_OVERLOAD = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Both runs; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of the watched run; the overload takes a quarter of it more")
    parser.add_argument("--only", choices=("soak", "overload"), help="one of the two")
    parser.add_argument("--leak", action="store_true", help="with a reward that leaks, which must be found")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    options = parser.parse_args(arguments)
    # Ended by whoever waits no longer, it leaves no broker and no folder behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="echoswarm-endurance-") as name, EmbeddedKafka(jvm=Jvm(jit=Jit.QUICK)) as kafka:
        faults: list[str] = []
        found: dict[str, Any] = {"load": [round(load, 1) for load in os.getloadavg()], "faults": faults}
        if options.only != "overload":
            found["soak"] = _soak(kafka, Path(name) / "soak", 60 * options.minutes, has_leak=options.leak, faults=faults)
        if options.only != "soak":
            found["overload"] = _overload(kafka, Path(name) / "overload", 15 * options.minutes, faults=faults)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    _say("\n".join(["", *(f"FAILED: {fault}" for fault in faults)]) if faults else "\nNothing grows, and nothing was lost.")
    return 1 if faults else 0


def _soak(kafka: EmbeddedKafka, folder: Path, seconds: float, *, has_leak: bool, faults: list[str]) -> dict[str, Any]:
    changes = {
        "ECHO_KAFKA__BOOTSTRAP": kafka.bootstrap,
        "ECHO_RUN__NAME": "soak",
        "ECHO_KAFKA__NAMESPACE": "soak",
        "ECHO_ROLLOUT__WORKERS": "2",
        "ECHO_COORDINATOR__ENABLED": "true",
    }
    if has_leak:
        changes["ECHO_REWARDS__tests.endurance.leak:hoarder"] = "1.0"
    with open_run(folder, changes) as run:
        _keep_little(kafka.bootstrap, run)
        run.swarm.start_all()
        run.wait_for(3, _BEGINS_WITHIN_S, "the run begins")
        first, watch = run.follower.version, Watch(run)
        watch.sample_for(seconds)
        num_steps = run.follower.version - first
        logs = sizes_of_partitions(log_folder(kafka.folder, 1), f"{run.bus.namespace.name}.")
        _end(run, faults)
        trends = watch.trends()
        faults += _growing(watch, trends)
        # Retention does not reach what is kept by version: each has a manifest of its own.
        kept = _MOST_BYTES + _MANIFEST_BYTES * run.follower.version
        most = {name: kept if name == f"{run.bus.namespace.topic(WEIGHTS)}-0" else _MOST_BYTES for name in logs}
        faults += [f"{name} holds {size:,} bytes, above {most[name]:,}" for name, (size, _) in logs.items() if size > most[name]]
        num_cut = sum(first_offset > 0 for _, first_offset in logs.values())
        if not num_cut:
            faults.append("retention had nothing to remove, so that the log is bounded was not tried: let it run longer")
        report = audit_run(run.bus, "soak")
        if report.verdict is Proof.BROKEN:
            faults.append("the audit of the watched run finds a broken promise")
    _say("\n".join(table(trends)))
    _say(f"{num_steps} steps in {seconds:.0f} s. Log: {num_cut} of {len(logs)} partitions were cut by retention, "
         f"the largest holds {max(size for size, _ in logs.values()) / _MIB:.1f} MiB of {_MOST_BYTES / _MIB:g} at most. "
         f"{in_words(report)}")  # fmt: skip
    return {"seconds": seconds, "steps": num_steps, "trends": as_json(trends), "partitions_cut": num_cut, "audit": report.to_plain()}


def _overload(kafka: EmbeddedKafka, folder: Path, seconds: float, *, faults: list[str]) -> dict[str, Any]:
    with open_run(folder, {"ECHO_KAFKA__BOOTSTRAP": kafka.bootstrap, "ECHO_RUN__NAME": "overload"}, config=_OVERLOAD) as run:
        run.swarm.start_all()
        run.wait_for(3, _BEGINS_WITHIN_S, "the run begins")
        size = run.swarm.settings.learner.groups_per_step * run.swarm.settings.rollout.group_size
        with closing(OffsetWatch(run.bus.cluster, run.bus.namespace)) as offsets:
            started_s, version, written = time.monotonic(), run.follower.version, offsets.ends(TRAJECTORIES)
            watch = Watch(run)
            watch.sample_for(seconds)
            taken_s = time.monotonic() - started_s
            made_per_s = (offsets.ends(TRAJECTORIES) - written) / taken_s
        trained_per_s = size * (run.follower.version - version) / taken_s
        caught_up_s = _catch_up(run, most_open=2 * size)
        _end(run, faults)
        report = prove(run.bus)
    if made_per_s < _LEAST_OVERLOAD * trained_per_s:
        faults.append(f"{made_per_s:.0f} samples a second were made and {trained_per_s:.0f} trained: that is no overload")
    trends = {key: trend for key, trend in watch.trends().items() if key[0] == "learner"}
    faults += [f"under overload, {fault}" for fault in _growing(watch, trends)]
    _say("\n".join(["", *table(trends)]))
    _say(f"Overload: {made_per_s:,.0f} samples a second made, {trained_per_s:,.0f} trained; {caught_up_s:.0f} s after the last request "
         f"everything was read. {in_words(report)}")  # fmt: skip
    return {
        "seconds": seconds,
        "made_per_s": round(made_per_s, 1),
        "trained_per_s": round(trained_per_s, 1),
        "caught_up_s": round(caught_up_s, 1),
        "trends": as_json(trends),
        "audit": report.to_plain(),
    }


def _growing(watch: Watch, trends: Mapping[tuple[str, str], Trend]) -> list[str]:
    """What grows, and which metric series are new."""
    return [
        f"{who}: {what} grows" + (f": {', '.join(watch.new_metrics(who))}" if what == "metric series" else "")
        for (who, what), trend in trends.items()
        if trend.verdict is Verdict.GROWS
    ]


def _catch_up(run: LiveRun, *, most_open: int) -> float:
    """Seconds from the end of the feeder until all but `most_open` samples are trained or dropped. Fails if that takes too long."""
    run.swarm.retire("feeder")
    started_s = time.monotonic()
    deadline = Deadline.after(_CAUGHT_UP_S)
    while (num_open := audit_run(run.bus, "overload").counts.get("open", 0)) > most_open:
        assert not deadline.expired(), f"{num_open} samples are neither trained nor dropped {_CAUGHT_UP_S:g} s after the last request"
        run.pause(_LOOK_S)
    return time.monotonic() - started_s


def _end(run: LiveRun, faults: list[str]) -> None:
    """All end as told; who ended by itself before is a fault."""
    faults += [f"ended by itself: {each}" for each in run.swarm.exits]
    run.swarm.terminate_all()
    for name in run.swarm.names:
        code = run.swarm.wait_ended(run.swarm.child(name), Deadline.after(_DRAINED_S), run.wait)
        if code not in ENDED_AS_TOLD:
            faults.append(f"{name} ended with {code} at SIGTERM")


def _keep_little(bootstrap: str, run: LiveRun) -> None:
    """Small segments and little retention on every topic of the run."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    prefix = f"{run.bus.namespace.name}."
    entries = [ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET) for name, value in _SMALL_LOGS.items()]
    topics = [name for name in admin.list_topics(timeout=_DRAINED_S).topics if name.startswith(prefix)]
    resources = [ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries) for name in topics]
    for future in admin.incremental_alter_configs(resources, request_timeout=_DRAINED_S).values():
        future.result()


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
