"""What a feeder needs of `requests` at its start: found from the end backwards, whole, without the day that lies before it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline, ManualClock
from echo_bus.metrics import BusMetrics
from echo_bus.requests.issued_requests import read_issued
from echo_memory import MemoryCluster
from echo_schemas.columns import pack_tokens
from echo_schemas.naming import Namespace
from echo_schemas.records import Purpose, RolloutRequest, Sampling, group_id_of
from echo_schemas.topics import REQUESTS

NUM_PARTITIONS = 2
HOUR_S = 3600.0


class Log:
    """`requests` in memory, written and read with a clock that a test moves."""

    def __init__(self) -> None:
        self.clock, self.metrics = ManualClock(), BusMetrics()
        self.cluster = MemoryCluster(clock=self.clock)
        self.bus = Bus(
            cluster=self.cluster,
            namespace=Namespace("test"),
            metrics=self.metrics,
            clock=self.clock,
            role="feeder",
            run_id="demo",
        )
        for created in self.cluster.admin().create_topics([NewTopic("test.requests", NUM_PARTITIONS, 1)]).values():
            created.result(5)
        self.publisher = self.bus.publisher(profiles.PRODUCER_LATENCY)

    def write(self, seqs: Sequence[int], *, run_id: str = "demo", resends: int = 0, partition: int | None = None) -> None:
        receipts = []
        for seq in seqs:
            request = RolloutRequest(
                run_id=run_id,
                group_id=group_id_of(run_id, seq),
                seq=seq,
                purpose=Purpose.TRAIN,
                task="letters",
                prompt_token_ids=pack_tokens([1]),
                group_size=2,
                sampling=Sampling(max_new_tokens=4),
                required_version=0,
                learner_version=0,
                issued_ms=self.clock.time_ms(),
                resends=resends,
            )
            where = seq % NUM_PARTITIONS if partition is None else partition
            receipts.append(self.publisher.publish(REQUESTS, request, partition=where))
        for receipt in receipts:
            receipt.wait(5)

    def read(self, floor: int, committed: Sequence[int] | None, since_ms: int | None = None) -> tuple[list[int], float]:
        """The seqs that were found, and how many records were read for it."""
        with closing(self.bus.look([REQUESTS])) as reader:
            found = read_issued(
                reader,
                floor=floor,
                committed=dict(enumerate(committed or ())),
                since_ms=since_ms,
                patience=Deadline.after(5, self.clock),
            )
        return sorted(request.seq for request in found), self.metrics.records_read.labels("test.requests")._value.get()


@pytest.fixture
def log() -> Log:
    return Log()


def test_only_the_end_is_read_where_it_shows_a_seq_below_the_floor(log: Log) -> None:
    log.write(range(1600))
    found, num_read = log.read(floor=1500, committed=(790, 790))
    assert set(range(1500, 1600)) <= set(found)
    assert num_read <= 1024


def test_what_no_worker_has_committed_is_found_however_old_it_is(log: Log) -> None:
    log.write(range(1600))
    found, _ = log.read(floor=1590, committed=(100, 790))
    assert set(range(200, 1600, 2)) | set(range(1591, 1600, 2)) <= set(found)
    assert log.read(floor=1590, committed=None)[0] == list(range(1600))


def test_a_partition_full_of_another_run_is_read_further_back(log: Log) -> None:
    log.write(range(10))
    log.write(range(2000), run_id="other")
    assert set(range(6, 10)) <= set(log.read(floor=6, committed=(900, 900))[0])


def test_a_seq_that_was_issued_again_does_not_hide_what_is_before_it(log: Log) -> None:
    log.write(range(20))
    log.write([0, 1], resends=1)
    log.write(range(1000), run_id="other")
    assert set(range(2, 20)) <= set(log.read(floor=2, committed=(500, 500))[0])


def test_where_one_partition_shows_the_time_the_others_need_nothing_from_before(log: Log) -> None:
    log.write(range(1500), run_id="other", partition=1)
    log.clock.advance(5 * HOUR_S)
    log.write(range(0, 40, 2), partition=0)
    found, num_read = log.read(floor=20, committed=(20, 1500))
    assert set(range(20, 40, 2)) <= set(found)
    assert num_read <= 600


def test_a_run_that_has_just_begun_reads_nothing_of_those_before_it(log: Log) -> None:
    log.write(range(1500), run_id="other")
    log.clock.advance(5 * HOUR_S)
    begun_ms = log.clock.time_ms()
    log.write(range(8))
    assert log.read(floor=0, committed=(750, 750), since_ms=begun_ms) == (list(range(8)), 8)
