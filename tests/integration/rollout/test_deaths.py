"""Workers as processes that a request kills, that lose Kafka for a while, and that are told to end while they are busy."""

from __future__ import annotations

import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_runtime.announcement import read_announcement
from echo_schemas.columns import pack_tokens
from echo_schemas.naming import Namespace
from echo_schemas.topics import REQUESTS_DEAD
from tests.integration.rollout.conftest import NUM_PARTITIONS, SESSION_MS, Fleet, await_in, open_fleet
from tests.unit.rollout.swarm import RUN, WAIT_S

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
POISON = 9
NUM_REQUESTS = 8
# A limit of three seconds, and what a crowded machine adds to the clean way out.
GONE_S = 20.0


@pytest.fixture
def own_kafka(jars: None) -> Iterator[EmbeddedKafka]:
    """A broker that a test may freeze."""
    with EmbeddedKafka(jvm=Jvm(jit=Jit.QUICK)) as kafka:
        yield kafka


def whole(fleet: Fleet) -> set[str]:
    """Groups of which an attempt is complete."""
    attempts: dict[tuple[str, str], set[int]] = {}
    for record in fleet.trajectories():
        attempts.setdefault((record.group_id, record.attempt), set()).add(record.index)
    return {group for (group, _), indices in attempts.items() if indices == {0, 1}}


def test_a_request_that_kills_three_workers_is_a_dead_letter_and_all_others_are_done(fleet: Fleet) -> None:
    poisoned = 3
    for seq in range(NUM_REQUESTS):
        tokens = pack_tokens([POISON, 2] if seq == poisoned else [1, 2])
        fleet.ask(fleet.request(seq, prompt_token_ids=tokens), partition=seq % NUM_PARTITIONS)
    for number in range(3):
        # The journal of each is its own: only the group can tell the next of the deaths before.
        process = fleet.launch("worker", f"w{number}", kind="PoisonedEngine", poison=POISON)
        assert process.wait(WAIT_S) == -signal.SIGKILL, fleet.log(f"w{number}")
        del fleet.processes[f"w{number}"]
    fleet.launch("worker", "w3", kind="PoisonedEngine", poison=POISON)
    await_in(fleet, lambda: fleet.records(REQUESTS_DEAD), "the dead letter")
    others = {f"{RUN}/{seq}" for seq in range(NUM_REQUESTS) if seq != poisoned}
    await_in(fleet, lambda: whole(fleet) == others, "all other groups")
    assert [record.seq for record in fleet.records(REQUESTS_DEAD)] == [poisoned]
    await_in(fleet, lambda: sum(fleet.committed()) == NUM_REQUESTS, "every request to be over")


def ready(fleet: Fleet, name: str) -> str:
    """What /readyz of a process says."""
    announced = read_announcement(fleet.announcement(name))
    if announced is None:
        return ""
    try:
        with urllib.request.urlopen(f"{announced.url}/readyz", timeout=WAIT_S) as answer:
            return str(answer.read())
    except urllib.error.HTTPError as refused:
        with refused:
            return str(refused.read())


def test_a_worker_without_kafka_keeps_its_groups_and_delivers_each_once_when_it_is_back(
    own_kafka: EmbeddedKafka, namespace: Namespace, tmp_path: Path
) -> None:
    with closing(open_fleet(own_kafka.bootstrap, namespace, tmp_path)) as fleet:
        held = fleet.folder / "held"
        held.touch()
        fleet.launch("worker", "w0", held=str(held))
        fleet.ask(*(fleet.request(seq) for seq in range(NUM_REQUESTS)))
        await_in(fleet, lambda: sum(line[0] == "+" for line in fleet.journal("w0")) == NUM_REQUESTS, "all groups in hand")
        own_kafka.nodes[0].suspend()
        frozen_s = time.monotonic()
        held.unlink()
        await_in(fleet, lambda: f"{NUM_REQUESTS} finished groups wait for Kafka" in ready(fleet, "w0"), "the worker to say so")
        # Longer than a session: the group has given the worker up when the broker wakes.
        await_in(fleet, lambda: time.monotonic() - frozen_s > 1.5 * SESSION_MS / 1000, "the session to end")
        own_kafka.nodes[0].resume()
        await_in(fleet, lambda: sum(fleet.committed()) == NUM_REQUESTS, "every request to be over")
        await_in(fleet, lambda: '"ok"' in ready(fleet, "w0"), "the worker to be ready again")
        assert len(fleet.trajectories()) == 2 * NUM_REQUESTS, "something was lost, or done twice"
        assert whole(fleet) == {f"{RUN}/{seq}" for seq in range(NUM_REQUESTS)}


def ended_after(process: subprocess.Popen[bytes]) -> float:
    """Seconds from SIGTERM to the end."""
    told_s = time.monotonic()
    process.terminate()
    process.wait(WAIT_S)
    return time.monotonic() - told_s


def test_a_busy_worker_and_one_without_kafka_are_gone_soon_and_what_they_had_is_done_by_the_next(
    own_kafka: EmbeddedKafka, namespace: Namespace, tmp_path: Path
) -> None:
    with closing(open_fleet(own_kafka.bootstrap, namespace, tmp_path)) as fleet:
        held = fleet.folder / "held"
        held.touch()
        fleet.ask(*(fleet.request(seq) for seq in range(NUM_REQUESTS)))
        for name, freezes in (("w0", False), ("w1", True)):
            process = fleet.launch("worker", name, held=str(held))
            await_in(fleet, lambda: sum(line[0] == "+" for line in fleet.journal(name)) == NUM_REQUESTS, "all groups in hand")  # noqa: B023
            if freezes:
                own_kafka.nodes[0].suspend()
            seconds = ended_after(process)
            del fleet.processes[name]
            own_kafka.nodes[0].resume()
            assert seconds < GONE_S, fleet.log(name)
        held.unlink()
        fleet.launch("worker", "w2")
        await_in(fleet, lambda: sum(fleet.committed()) == NUM_REQUESTS, "every request to be over")
        assert whole(fleet) == {f"{RUN}/{seq}" for seq in range(NUM_REQUESTS)}


def test_a_second_signal_ends_a_worker_at_once(fleet: Fleet) -> None:
    held = fleet.folder / "held"
    held.touch()
    fleet.ask(*(fleet.request(seq) for seq in range(NUM_REQUESTS)))
    process = fleet.launch("worker", "w0", held=str(held))
    await_in(fleet, lambda: sum(line[0] == "+" for line in fleet.journal("w0")) == NUM_REQUESTS, "all groups in hand")
    deadline = Deadline.after(WAIT_S)
    while process.poll() is None:
        # One that comes before the first was delivered is merged with it.
        process.terminate()
        assert not deadline.expired(), "waited for the end"
    assert fleet.processes.pop("w0").returncode == 128 + signal.SIGTERM, fleet.log("w0")
