"""Roles of three releases on one run, one broker and one registry: replaced in turn while it goes on, and back; then the audit."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from echo_bus.clock import Deadline
from echo_bus.reading.view import CompactedView
from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WORKERS
from tests.chaos.live_run import LiveRun, open_run
from tests.chaos.schedule import SETTLED_STEPS
from tests.chaos.swarm import CONFIG, ENDED_AS_TOLD
from tests.installed import missing
from tests.thorough import only_thorough
from tests.upgrade.releases import NEW_FIELD, NEW_VALUE, ROOT, THIS, Release, next_release, older_release

pytestmark = [pytest.mark.kafka, pytest.mark.slow, only_thorough, pytest.mark.timeout(2_400)]

_BEGINS_WITHIN_S = 400.0
_GOES_ON_WITHIN_S = 240.0
_DRAINED_S = 60.0


@dataclass
class Upgrade:
    """A run in which one role after another is replaced."""

    run: LiveRun
    workers: CompactedView[WorkerStatus]

    def replace(self, release: Release, *names: str) -> None:
        """Each of `names` ends as told and starts again as `release`; the run must go on after each."""
        run, swarm = self.run, self.run.swarm
        for name in names:
            began_s, version = time.monotonic(), run.follower.version
            child = swarm.child(name)
            child.terminate()
            code = swarm.wait_ended(child, Deadline.after(_DRAINED_S), run.wait)
            assert code in ENDED_AS_TOLD, f"{name} ended with {code} at SIGTERM"
            swarm.releases[name] = release.paths
            started_ms = run.bus.clock.time_ms()
            swarm.start(name)
            run.wait_until(swarm.announce(name).exists, _GOES_ON_WITHIN_S, f"{name} of {release.name} answers")
            if name.startswith("worker"):
                run.wait_until(partial(self._takes_part, name, started_ms), _GOES_ON_WITHIN_S, f"{name} takes part")
            # What was under way before is trained by then.
            newest = max(version, run.follower.version)
            run.wait_for(newest + SETTLED_STEPS, _GOES_ON_WITHIN_S, f"{name} was replaced by {release.name}")
            stall_s = run.follower.longest_gap_s(began_s, newest + SETTLED_STEPS)
            _say(f"{name:<12} becomes {release.name}: version {run.follower.version}, longest time without a step {stall_s:.1f} s")

    def _takes_part(self, name: str, since_ms: int) -> bool:
        return any(
            status.worker_id == name and status.time_ms >= since_ms and status.state in {WorkerState.READY, WorkerState.STANDBY}
            for status in self.workers.items().values()
        )


@pytest.fixture
def kafka(jars: None) -> Iterator[EmbeddedKafka]:
    """A broker and a registry of this test alone."""
    if absent := missing("transformers", "faust", "deepspeed"):
        pytest.skip(f"{absent} are missing: install the extra 'all-cpu'")
    with EmbeddedKafka(registry=True, jvm=Jvm(jit=Jit.QUICK)) as kafka:
        yield kafka


def test_roles_of_three_releases_take_turns_and_nothing_is_lost(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    older, following = older_release(tmp_path / "older"), next_release(tmp_path / "next")
    others = ("worker-0", "worker-1", "reward-0", "feeder", "coordinator")
    with _begun(kafka, tmp_path, [older, THIS, following], ECHO_COORDINATOR__ENABLED="true") as upgrade:
        assert {*others, "learner"} == set(upgrade.run.swarm.names)
        upgrade.replace(THIS, "learner")
        upgrade.replace(older, "learner")
        upgrade.replace(THIS, *others, "learner")
        following.command(upgrade.run.swarm.environ, "schemas", "register", "--config", str(CONFIG))
        upgrade.replace(following, "learner")
        upgrade.replace(THIS, "learner")
        upgrade.replace(following, *others, "learner")
        upgrade.replace(THIS, *others, "learner")
        _end(upgrade, tmp_path, [older, THIS, following])
        _check_records(following, upgrade.run.swarm.environ, tmp_path / "records.jsonl")


def test_in_sequential_mode_too(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    """Where the learner asks for each batch, and workers of the other release answer it."""
    older = older_release(tmp_path / "older")
    others = ("worker-0", "worker-1", "reward-0")
    with _begun(kafka, tmp_path, [older, THIS], ECHO_RUN__MODE="sequential") as upgrade:
        assert {*others, "learner"} == set(upgrade.run.swarm.names)
        upgrade.replace(THIS, "learner")
        upgrade.replace(older, "learner")
        upgrade.replace(THIS, *others, "learner")
        _end(upgrade, tmp_path, [older, THIS])


@contextmanager
def _begun(kafka: EmbeddedKafka, folder: Path, releases: Sequence[Release], **changes: str) -> Iterator[Upgrade]:
    """A run whose roles are all the first of `releases`; the schemas of the first two are registered."""
    changes = {
        "ECHO_KAFKA__BOOTSTRAP": kafka.bootstrap,
        "ECHO_REGISTRY__URL": kafka.registry_url,
        "ECHO_ROLLOUT__WORKERS": "2",
        "ECHO_SCORING__CONCURRENCY": "1",
        **changes,
    }
    with open_run(folder, changes) as run, closing(run.bus.view(WORKERS, WorkerStatus)) as workers:
        swarm = run.swarm
        for release in releases:
            release.check(swarm.environ)
        for release in releases[:2]:
            release.command(swarm.environ, "schemas", "register", "--config", str(CONFIG))
        swarm.releases.update(dict.fromkeys(swarm.names, releases[0].paths))
        swarm.start_all()
        run.wait_for(SETTLED_STEPS, _BEGINS_WITHIN_S, f"the run begins as {releases[0].name}")
        yield Upgrade(run, workers)


def _end(upgrade: Upgrade, folder: Path, releases: Sequence[Release]) -> None:
    """All end as told, nobody has ended before, and the audit of each release finds every promise kept."""
    swarm = upgrade.run.swarm
    swarm.terminate_all()
    for name in swarm.names:
        assert swarm.wait_ended(swarm.child(name), Deadline.after(_DRAINED_S), upgrade.run.wait) in ENDED_AS_TOLD
    assert swarm.exits == [], [str(each) for each in swarm.exits]
    for release in releases:
        _say(f"audit of {release.name}: {_audited(release, swarm.environ, folder / 'audit.json')}")


def _say(text: str) -> None:
    """For whoever watches with `-s`."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _audited(release: Release, environ: dict[str, str], file: Path) -> str:
    """Fails unless the release's own audit finds every promise kept, and no record that anybody could not read."""
    release.command(environ, "audit", "--config", str(CONFIG), "--json", str(file))
    (report,) = json.loads(file.read_text(encoding="utf-8"))["runs"]
    assert report["verdict"] == "proved", report
    assert not report["states"]["dead-lettered"], report["states"]
    return f"{report['steps']} steps, {report['trajectories']} trajectories: {report['states']}"


def _check_records(release: Release, environ: dict[str, str], file: Path) -> None:
    """With the eyes of the next release: each kind of record that all releases write is there with its field and without."""
    done = release.run({**environ, "PYTHONPATH": str(ROOT)}, "-m", "tests.upgrade.census", str(CONFIG), str(file))
    assert done.returncode == 0, done.stderr
    seen: dict[str, set[str]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)["record"]
        said = record.partition(f"{NEW_FIELD}=")[2]
        seen.setdefault(record.partition("(")[0], set()).add("with" if said.startswith(repr(NEW_VALUE)) else "without")
    streamed = ("RolloutRequest", "Trajectory", "Reward", "StepReport", "SessionClaim", "Chunk", "WeightManifest")
    assert {name: seen.get(name) for name in streamed} == {name: {"with", "without"} for name in streamed}
