"""What the embedded Kafka decides before it starts anything: folders, JVM options, sizes, locked files, memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_bus.errors import TransportError
from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_embedded.artifacts import Artifact, lock_digest, read_lock
from echo_embedded.class_cache import flags_for
from echo_embedded.folders import cache_folder, state_folder
from echo_embedded.installation import KAFKA_VERSION, new_uuid
from echo_embedded.java import Java
from echo_embedded.memory import check_memory
from echo_embedded.registry import REGISTRY_VERSION
from echo_schemas.errors import UserError

JAVA_17 = Java(home=Path("/java"), major=17)
JAVA_25 = Java(home=Path("/java"), major=25)


@pytest.mark.parametrize(
    ("environ", "cache", "state"),
    [
        ({"ECHO_CACHE_FOLDER": "/c", "ECHO_STATE_FOLDER": "/s", "XDG_CACHE_HOME": "/x"}, "/c", "/s"),
        ({"XDG_CACHE_HOME": "/xc", "XDG_STATE_HOME": "/xs", "HOME": "/h"}, "/xc/echoswarm", "/xs/echoswarm"),
    ],
)
def test_folders_come_from_our_variables_then_from_the_desktops(environ: dict[str, str], cache: str, state: str) -> None:
    assert cache_folder(environ) == Path(cache)
    assert state_folder(environ) == Path(state)


def test_folders_lie_in_the_home_of_a_bare_environment() -> None:
    assert cache_folder({"HOME": "/h"}).is_relative_to("/h")
    assert state_folder({"HOME": "/h"}).is_relative_to("/h")


def test_only_the_quick_compiler_leaves_the_second_one_out() -> None:
    assert "-XX:TieredStopAtLevel=1" in Jvm(jit=Jit.QUICK).flags(JAVA_25)
    assert "-XX:TieredStopAtLevel=1" not in Jvm().flags(JAVA_25)


def test_an_old_java_gets_no_option_that_it_does_not_know() -> None:
    assert not [flag for flag in Jvm().flags(JAVA_17) if "unsafe" in flag or "native-access" in flag]
    assert [flag for flag in Jvm().flags(JAVA_25) if "unsafe" in flag]


def test_a_small_heap_does_not_start_larger_than_it_may_grow() -> None:
    flags = Jvm(heap_mb=32).flags(JAVA_25)
    assert "-Xms32m" in flags
    assert "-Xmx32m" in flags


def test_without_a_class_cache_there_is_no_option_for_one() -> None:
    assert flags_for(None) == []
    assert flags_for(Path("/c.aot"))[0] == "-XX:AOTCache=/c.aot"


@pytest.mark.parametrize("brokers", [0, 2, 5])
def test_other_sizes_are_refused(brokers: int) -> None:
    with pytest.raises(UserError, match="1 or 3 brokers"):
        EmbeddedKafka(brokers)


@pytest.mark.parametrize("ports", [[9092], [9092, 9092, 9093]])
def test_too_few_ports_are_refused(ports: list[int]) -> None:
    with pytest.raises(UserError, match=r"need 3 different port\(s\); named: 9092"):
        EmbeddedKafka(3, ports=ports)


def test_nothing_can_be_asked_of_a_kafka_that_is_not_started() -> None:
    kafka = EmbeddedKafka()
    for ask in (lambda: kafka.bootstrap, lambda: kafka.folder, lambda: kafka.registry_url, lambda: kafka.add_user("a", "b")):
        with pytest.raises(TransportError):
            ask()
    assert kafka.client_properties == {}


def test_the_locks_pin_the_versions_that_we_name() -> None:
    kafka = {artifact.name: artifact for artifact in read_lock("kafka.lock")}
    assert kafka["kafka_2.13"].version == kafka["kafka-clients"].version == kafka["kafka-tools"].version == KAFKA_VERSION
    (registry,) = read_lock("registry.lock")
    assert registry.version == REGISTRY_VERSION
    assert registry.file_name == f"apicurio-registry-app-{REGISTRY_VERSION}-all.tar.gz"
    assert all(len(artifact.sha256) == 64 for artifact in (*kafka.values(), registry))


def test_the_digest_of_a_lock_depends_on_the_files_and_not_on_their_order() -> None:
    first = Artifact("g", "a", "1", "11" * 32, 1)
    second = Artifact("g", "b", "1", "22" * 32, 1)
    assert lock_digest([first, second]) == lock_digest([second, first]) != lock_digest([first])


def test_ids_are_what_kafka_reads() -> None:
    ids = {new_uuid() for _ in range(500)}
    assert len(ids) == 500
    assert all(len(one) == 22 and not one.startswith("-") for one in ids)


@pytest.mark.parametrize(("available", "fits"), [(None, True), (1_000, True), (950, True), (949, False), (-5, False)])
def test_three_brokers_and_a_registry_need_room(available: int | None, fits: bool) -> None:
    if fits:
        check_memory(3, registry=True, available=available)
        return
    with pytest.raises(UserError, match="needs about 950 MB") as caught:
        check_memory(3, registry=True, available=available)
    assert "-" not in caught.value.message.split("and")[1]
