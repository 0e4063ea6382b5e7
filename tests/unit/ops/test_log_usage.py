"""What a log takes and how far back it goes; and the record with which a cluster is tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo_bus.bus import Bus
from echo_bus.errors import DeadlineExceeded, TopicMissing
from echo_memory import MemoryCluster
from echo_ops.log_usage import PartitionUse, read_use, use_of
from echo_ops.probe import probe
from echo_ops.topic_admin import TopicAdmin
from echo_schemas.naming import Namespace
from echo_schemas.records import Control
from echo_schemas.topic_files import TopicSpec, load_topic_specs
from echo_schemas.topics import CONTROL, TRAJECTORIES
from tests.unit.schemas.samples import trajectory

SPEC = next(spec for spec in load_topic_specs() if spec.name == "trajectories")
NAMESPACE = Namespace("echo.test")


@pytest.fixture
def bus() -> Bus:
    cluster = MemoryCluster()
    return Bus(
        cluster=cluster,
        namespace=NAMESPACE,
        role="operator",
        run_id=None,
    )


def made(bus: Bus) -> Bus:
    admin = TopicAdmin(bus.cluster, NAMESPACE, replicas=1)
    admin.apply(admin.plan())
    return bus


def spec(**config: str) -> TopicSpec:
    return replace(SPEC, config={"cleanup.policy": "delete", **{name.replace("_", "."): value for name, value in config.items()}})


def test_size_ends_the_log_before_time_does_in_the_partition_that_grows_fastest() -> None:
    uses = {0: PartitionUse(records=1000, recent=60, mean_bytes=100), 1: PartitionUse(records=10, recent=6, mean_bytes=100)}
    used = use_of(spec(retention_ms="86400000", retention_bytes="36000"), uses, recent_s=600)
    assert used.num_bytes == 101_000
    assert used.bytes_per_s == 11
    assert (used.horizon_s, used.is_by_size) == (3600, True)


@pytest.mark.parametrize(
    ("config", "recent", "horizon_s"),
    [
        ({"retention_ms": "86400000", "retention_bytes": "1000000"}, 0, 86400),
        ({"retention_ms": "1000", "retention_bytes": "1000000"}, 6, 1),
        ({"retention_ms": "-1", "retention_bytes": "-1"}, 6, None),
        ({"retention_ms": "-1", "retention_bytes": "600"}, 0, None),
        ({"cleanup_policy": "compact"}, 6, None),
    ],
)
def test_time_ends_it_where_it_is_shorter_and_nothing_ends_what_is_kept(
    config: dict[str, str], recent: int, horizon_s: float | None
) -> None:
    used = use_of(spec(**config), {0: PartitionUse(records=10, recent=recent, mean_bytes=100)}, recent_s=600)
    assert (used.horizon_s, used.is_by_size) == (horizon_s, False)


def test_what_is_read_is_the_size_of_what_was_written(bus: Bus) -> None:
    assert read_use(bus) == []
    made(bus)
    assert read_use(bus) == []
    publisher = bus.publisher()
    for seq in range(30):
        publisher.publish(TRAJECTORIES, trajectory(seq=seq, group_id=f"demo/{seq}"))
    publisher.close()
    (used,) = read_use(bus)
    size = len(bus.codec.encode(trajectory(seq=1)))
    assert used.name == "trajectories"
    assert 30 * size < used.num_bytes < 30 * (size + 400)
    assert used.bytes_per_s > 0


def test_a_record_goes_the_whole_way_and_no_reader_sees_it(bus: Bus) -> None:
    with pytest.raises(TopicMissing):
        probe(bus)
    found = probe(made(bus))
    assert min(found.write_s, found.read_s, found.commit_s) >= 0
    assert bus.newest(CONTROL, Control) == {}


def test_a_record_that_is_acknowledged_and_gone_is_said(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    made(bus)
    monkeypatch.setattr("echo_replay.raw_log.RawLog.between", lambda *_: iter(()))
    with pytest.raises(DeadlineExceeded, match="is not there"):
        probe(bus)


def test_a_commit_that_is_not_kept_is_said(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    made(bus)
    monkeypatch.setattr("echo_ops.probe.committed_offsets", lambda *_: {})
    with pytest.raises(DeadlineExceeded, match="has not committed"):
        probe(bus)
