"""How workers come to pass weights on: settings, certificates, addresses on `workers`, lists of chunks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_bus.blobs.chunk_list import list_chunks, read_chunk_list
from echo_bus.blobs.transfer import CHUNK_BYTES
from echo_bus.clock import ManualClock
from echo_bus.errors import BlobCorrupt
from echo_embedded.security import Security
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.heartbeat import first_status
from echo_rollout.weights.peers.client import split_address
from echo_rollout.weights.peers.line import Line
from echo_rollout.weights.peers.opening import follow_neighbours, tls_contexts
from echo_rollout.weights.peers.source import PeerSource
from echo_rollout.weights.sources import PublishedSource
from echo_schemas.errors import UserError
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WEIGHT_CHUNKS, WORKERS
from echo_settings import Settings, load_settings
from echo_settings.public import public_config
from echo_settings.rules import store_from_bytes
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.peer_rig import MemoryTruth, data_of, manifest_of, rig
from tests.unit.rollout.swarm import RUN, wait_until

pytestmark = pytest.mark.slow

SECRET = "0123456789abcdef" * 2


def test_workers_of_a_run_find_one_another_and_install_what_they_passed_on(make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PeerSource] = []
    monkeypatch.setattr("echo_rollout.weights.peers.opening.PeerSource", lambda *args, **options: _noted(made, *args, **options))
    swarm = make_swarm(weights={"source": "peers", "secret": SECRET})
    for name in ("w0", "w1"):
        swarm.start_worker(ScriptedEngine(), name)
    wait_until(lambda: len({status.worker_id for status in swarm.statuses() if status.peer_address}) == 2, "both to say where they serve")
    wait_until(lambda: all(len(source._neighbours()) == 1 for source in made), "both to know one another")
    swarm.publish_version(0)
    wait_until(lambda: {status.worker_id for status in swarm.statuses() if status.installed_version == 0} == {"w0", "w1"}, "version 0")
    received = [source._metrics.peer_bytes.labels("received")._value.get() for source in made]
    assert sorted(received) == [0, len("weights of 0")], "one of them had it from the other"


def _noted(made: list[PeerSource], *args: Any, **options: Any) -> PeerSource:
    made.append(PeerSource(*args, **options))
    return made[-1]


def settings_of(tmp_path: Path, text: str, **environ: str) -> Settings:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    return load_settings(tmp_path / "run.toml", environ)


def test_peers_need_a_secret_and_it_shows_nowhere(tmp_path: Path) -> None:
    with pytest.raises(UserError, match='source = "peers" needs a secret: openssl rand -hex 32'):
        settings_of(tmp_path, '[weights]\nsource = "peers"')
    with pytest.raises(UserError, match="is shorter than 32 characters"):
        settings_of(tmp_path, "", ECHO_WEIGHTS__SECRET="short")
    (tmp_path / "secret").write_text(SECRET + "\n", encoding="utf-8")
    settings = settings_of(tmp_path, f'[weights]\nsource = "peers"\nsecret_file = "{tmp_path}/secret"')
    assert settings.weights.secret.get_secret_value() == SECRET
    assert SECRET not in repr(settings)
    assert SECRET not in str(public_config(settings))


@pytest.mark.parametrize(
    ("text", "from_bytes", "may_pass_on"),
    [
        ("", 1 << 30, False),
        (f'secret = "{SECRET}"', 1 << 30, False),
        (f'secret = "{SECRET}"\nhost = "0.0.0.0"', 1 << 30, True),
        ('source = "log"', float("inf"), False),
        (f'source = "store"\nsecret = "{SECRET}"', 0, False),
        (f'source = "peers"\nsecret = "{SECRET}"', 1 << 30, True),
    ],
)
def test_what_the_source_means(tmp_path: Path, text: str, from_bytes: float, may_pass_on: bool) -> None:
    settings = settings_of(tmp_path, f"[weights]\n{text}")
    assert (store_from_bytes(settings), settings.weights.may_pass_on) == (from_bytes, may_pass_on)


def test_a_cluster_with_tls_wants_certificates_for_peers_too(tmp_path: Path) -> None:
    assert tls_contexts(settings_of(tmp_path, "")) == (None, None)
    assert tls_contexts(settings_of(tmp_path, '[kafka.client]\n"security.protocol" = "SASL_PLAINTEXT"')) == (None, None)
    tls = '[kafka.client]\n"security.protocol" = "SASL_SSL"\n'
    with pytest.raises(UserError, match="need a certificate") as refused:
        tls_contexts(settings_of(tmp_path, tls))
    assert "certificate_file" in (refused.value.hint or "")
    with pytest.raises(UserError, match="cannot be read"):
        tls_contexts(settings_of(tmp_path, f'{tls}[weights]\ncertificate_file = "/nowhere"\nkey_file = "/nowhere"'))


def test_peers_speak_tls_where_the_settings_say_so(tmp_path: Path) -> None:
    authority = Security(tmp_path / "a").authority
    file = authority.parent / "broker.pem"
    text = f"""
        [kafka.client]
        "security.protocol" = "SSL"
        "ssl.ca.location" = "{authority}"
        "ssl.certificate.location" = "{file}"
        "ssl.key.location" = "{file}"
    """
    contexts = tls_contexts(settings_of(tmp_path, text))
    other = Security(tmp_path / "b").authority.parent / "broker.pem"
    strangers = tls_contexts(settings_of(tmp_path, text.replace(str(file), str(other))))
    data = data_of(12)
    with rig(tmp_path, MemoryTruth(data)) as workers:
        workers.add("a", tls=contexts)
        workers.add("b", tls=contexts)
        assert set(workers.fetch_all(manifest_of(data)).values()) == {data}
        assert workers.metric("b", "peer_bytes", way="received") == len(data)
    with rig(tmp_path / "strangers", MemoryTruth(data)) as workers:
        workers.add("a", tls=strangers)
        workers.add("b", tls=contexts)
        assert set(workers.fetch_all(manifest_of(data)).values()) == {data}
        assert workers.metric("b", "peers_left_out", why="unreachable") == 1, "whom nobody that we trust has signed"


def test_neighbours_are_the_living_that_say_where_and_can_be_reached(make_swarm: MakeSwarm) -> None:
    swarm, clock = make_swarm(), ManualClock()
    status = replace(
        first_status(run_id=RUN, worker_id="x", engine="scripted", price_per_hour=0.0), state=WorkerState.READY, time_ms=clock.time_ms()
    )

    def say(worker_id: str, peer_address: str, **changes: Any) -> None:
        said = replace(status, worker_id=worker_id, peer_address=peer_address, **changes)
        swarm.publisher.publish(WORKERS, said).wait(30)

    with closing(swarm.bus.view(WORKERS, WorkerStatus)) as workers:
        neighbours = follow_neighbours(workers, clock, worker_id="me", host=status.host, heartbeat_s=1.0)
        say("me", "10.0.0.1:1")
        say("other", "10.0.0.2:1", host="far")
        say("same machine", "127.0.0.1:1")
        say("loopback elsewhere", "127.0.0.1:1", host="far")
        say("and by name", "localhost:1", host="far")
        say("silent", "")
        say("gone", "10.0.0.3:1", state=WorkerState.GONE)
        say("last", "[::1]:5")
        wait_until(lambda: "last" in neighbours(), "all of them to be heard")
        assert neighbours() == {"other": "10.0.0.2:1", "same machine": "127.0.0.1:1", "last": "[::1]:5"}
        clock.advance(100)
        assert neighbours() == {}


def test_a_line_lets_no_more_pass_than_it_may() -> None:
    line = Line(1000.0)
    line.reserve(100)
    assert 0.05 < line.reserve(50) <= 0.15
    assert line.reserve(1000) > 1.0
    assert Line().reserve(1 << 40) == 0


def test_an_address_is_a_host_and_a_port() -> None:
    assert split_address("gpu-7:80") == ("gpu-7", 80)
    assert split_address("[::1]:80") == ("::1", 80)
    for wrong in ("", "gpu-7", ":80", "gpu-7:", "gpu-7:99999", "gpu-7:x"):
        with pytest.raises(ValueError, match=r"host:port|invalid literal"):
            split_address(wrong)


def test_a_list_of_chunks_says_what_the_bytes_are_cut_into() -> None:
    data = bytes(range(256)) * (2 * CHUNK_BYTES // 256 + 1)
    listed = list_chunks([data[:1000], data[1000:]])
    chunks = read_chunk_list(listed, len(data))
    assert [chunk.num_bytes for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, len(data) - 2 * CHUNK_BYTES]
    assert read_chunk_list(list_chunks([data[CHUNK_BYTES : 2 * CHUNK_BYTES]]), CHUNK_BYTES)[0].sha256 == chunks[1].sha256
    for damaged in (listed[:-1], b"", bytes(4), listed + b"x"):
        with pytest.raises(BlobCorrupt, match="does not describe a snapshot"):
            read_chunk_list(damaged, len(data))


def test_chunks_of_the_log_and_of_a_store_are_read_by_their_place(make_swarm: MakeSwarm, tmp_path: Path) -> None:
    swarm = make_swarm()
    data = b"".join(bytes([number]) * CHUNK_BYTES for number in range(4))[:-5]
    manifest = swarm.publish_version(1, content=data)
    source = PublishedSource(swarm.bus.blob_reader())
    chunks = source.chunk_refs(manifest)
    assert b"".join(source.chunks(manifest, chunks[1:3], CHUNK_BYTES)) == data[CHUNK_BYTES : 3 * CHUNK_BYTES]
    with pytest.raises(BlobCorrupt, match="do not describe the same bytes"):
        source.chunk_refs(replace(manifest, num_bytes=5))
    place = tmp_path / "snapshots" / RUN / f"v1-{manifest.sha256[:12]}"
    place.mkdir(parents=True)
    (place / manifest.files[0].name).write_bytes(data)
    stored = replace(manifest, blob=None, uri=place.as_uri())
    assert source.chunk_refs(stored) == ()
    listed = swarm.bus.blob_writer(swarm.publisher).write(WEIGHT_CHUNKS, RUN, "v/1/chunks", list_chunks([data]))
    stored = replace(stored, chunk_list=listed)
    chunks = source.chunk_refs(stored)
    assert [len(chunk) for chunk in source.chunks(stored, chunks[2:], 2 * CHUNK_BYTES)] == [CHUNK_BYTES, CHUNK_BYTES - 5]
    assert b"".join(source.chunks(stored, chunks[2:], 2 * CHUNK_BYTES)) == data[2 * CHUNK_BYTES :]
