"""What strangers and people hand to a process beside records: manifests, headers, HTTP, peers, a registry's answers, settings.

Each is taken, or refused by an error of ours; nothing else escapes. The viewer's pages: tests/unit/replay/test_viewer_server.py.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import random
from collections.abc import Callable
from contextlib import closing, suppress
from http import HTTPStatus
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import NewTopic
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from echo_bus.blobs import cursor, transfer
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.errors import TransportError
from echo_bus.message import LazyHeaders
from echo_bus.signatures import Signer, TrustedKey, Verifier, key_id_of
from echo_memory import MemoryCluster
from echo_memory.message import MemoryMessage
from echo_ops.redrive.letters import letter_of
from echo_rollout.weights.peers import wire
from echo_rollout.weights.sources import PublishedSource
from echo_runtime.server import _handler_of
from echo_schemas import headers as names
from echo_schemas.converters import converter_of
from echo_schemas.errors import EchoError, InvalidRecord, RegistryError, UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import RECORDS, WeightFile, WeightKind, WeightManifest
from echo_schemas.registry import HttpRegistry, subjects_of
from echo_schemas.schemas import newest
from echo_schemas.topics import TRAJECTORIES, WEIGHT_CHUNKS
from echo_settings import Settings, load_settings
from echo_settings.public import public_config
from tests.fuzz.mutations import _other, _places
from tests.thorough import examples

RUN = "demo"
DATA = {"adapter_model.safetensors": bytes(range(250)), "adapter_config.json": b"{}"}
TRIES = settings(max_examples=examples(200))

# Manifests


def make_snapshot(files: dict[str, bytes], *, arrives: bytes | None = None) -> tuple[Bus, WeightManifest]:
    """A snapshot in chunks of a hundred bytes, in memory, and its manifest. `arrives`: other bytes than the promised ones."""
    cluster, namespace = MemoryCluster(), Namespace("fuzz")
    physical = namespace.topic(WEIGHT_CHUNKS)
    cluster.admin().create_topics([NewTopic(physical, 2, 1)])[physical].result()
    bus = Bus(cluster=cluster, namespace=namespace, role="worker")
    whole = b"".join(files.values())
    sha256 = hashlib.sha256(whole).hexdigest()
    with pytest.MonkeyPatch.context() as patch, closing(bus.publisher(profiles.PRODUCER_BLOBS)) as publisher:
        patch.setattr(transfer, "CHUNK_BYTES", 100)
        blob = bus.blob_writer(publisher).write(WEIGHT_CHUNKS, RUN, "v/1/abc", whole if arrives is None else arrives, sha256=sha256)
    named = [WeightFile(name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in files.items()]
    manifest = WeightManifest(
        run_id=RUN, version=1, kind=WeightKind.LORA, files=tuple(named), num_bytes=len(whole), sha256=sha256, blob=blob, session="s",
        checkpoint="c", next_seq=0, created_ms=0,
    )  # fmt: skip
    return bus, manifest


@pytest.fixture(scope="module")
def snapshot() -> tuple[Bus, WeightManifest]:
    return make_snapshot(DATA)


@TRIES
@given(seed=st.integers(0, 2**32))
def test_a_manifest_gives_its_files_or_nothing_at_all(snapshot: tuple[Bus, WeightManifest], seed: int) -> None:
    bus, honest = snapshot
    rng, converter = random.Random(seed), converter_of(WeightManifest)
    plain = copy.deepcopy(converter.to_plain(honest))
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(plain))
        holder, at = rng.choice(places)
        holder[at] = _other(holder[at], rng, places)
    try:
        manifest = converter.from_plain(plain)
        bus.codec.decode(bus.codec.encode(manifest))
    except Exception:  # what no codec lets through reaches nobody; the codec itself has its own fuzzing
        return
    with TemporaryDirectory() as home, pytest.MonkeyPatch.context() as patch, closing(bus.blob_reader()) as reader:
        # In memory nothing comes later.
        patch.setattr(cursor, "_MISSING_S", 0.0)
        target = Path(home) / "below" / "v1"
        source = PublishedSource(reader, f"{home}/store")
        with suppress(TransportError, OSError):
            source.chunk_refs(manifest)
        try:
            source.fetch(manifest, target)
        except (EchoError, OSError):
            assert not target.exists()
        else:
            found = b"".join((target / file.name).read_bytes() for file in manifest.files)
            assert found == b"".join(DATA.values())
        assert {path.name for path in Path(home).iterdir()} <= {"below", "store"}


# Headers

_KNOWN_NAMES = (names.RUN, names.VERSION, names.GROUP, names.SOURCE, names.SIGNATURE, "echo-retries", "kafka_dlt-original-offset", "ce_id")
_HEADERS = st.lists(st.tuples(st.sampled_from(_KNOWN_NAMES) | st.text(max_size=9), st.none() | st.binary(max_size=99) | st.just(b"9" * 40)))


def _verifier() -> tuple[Signer, Verifier]:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519", reason="install the extra 'signatures'")
    private = ed25519.Ed25519PrivateKey.generate()
    key = TrustedKey(id=key_id_of(private.public_key()), public=private.public_key(), role="worker", names=("w",))
    return Signer(private), Verifier(lambda: {key.id: key})


_SIGNER, _VERIFIER = _verifier()


@TRIES
@given(pairs=_HEADERS, value=st.binary(max_size=20) | st.none())
def test_headers_of_strangers_are_read_or_passed_over(pairs: list[Any], value: bytes | None) -> None:
    raw = MemoryMessage("fuzz.trajectories.dlq", 0, 1, b"k", value, pairs, 5)
    assert isinstance(dict(LazyHeaders(raw)), dict)
    assert (names.oldest_version(pairs) or 0) >= 0
    names.run_of(pairs)
    letter = letter_of(raw, TRAJECTORIES)
    assert letter.num_redriven >= 0
    with pytest.raises(InvalidRecord):
        _VERIFIER.signer_of(raw)


@TRIES
@given(at=st.integers(0, 200), other=st.binary(max_size=3))
def test_a_signature_that_was_touched_is_no_signature(at: int, other: bytes) -> None:
    (header,) = _SIGNER.sign("fuzz.trajectories", [(b"k", b"v")])
    touched = header[1][:at] + other + header[1][at + len(other) :]
    raw = MemoryMessage("fuzz.trajectories", 0, 1, b"k", b"v", [(names.SIGNATURE, touched)], 5)
    if touched == header[1]:
        assert _VERIFIER.signer_of(raw).names == ("w",)
    else:
        # Base64 has several ways to write the last bits; whatever is taken says the same.
        with suppress(InvalidRecord):
            assert _VERIFIER.signer_of(raw).names == ("w",)


# Metrics and health


class _Connection:
    """A socket that has heard everything that it will hear."""

    def __init__(self, heard: bytes) -> None:
        self._heard, self.said = heard, b""

    def makefile(self, *_: Any) -> BytesIO:
        return BytesIO(self._heard)

    def sendall(self, data: bytes) -> None:
        self.said += data


_LINES = st.lists(
    st.sampled_from(
        (b"GET ", b"HEAD ", b"POST ", b"/metrics", b"/healthz", b"/readyz?", b"/../", b"%00", b" HTTP/1.1\r\n", b" HTTP/9.9\r\n", b"\r\n")
    )
    | st.sampled_from((b"Accept: application/openmetrics-text;version=1.0.0;q=0.5\r\n", b"Accept: ;;q=x,\r\n", b"Host: x\r\n", b"\xff"))
    | st.binary(max_size=30),
    max_size=12,
)


@TRIES
@given(lines=_LINES)
@example(lines=[b"GET /metrics HTTP/1.1\r\n", b"Accept: application/openmetrics-text; version=1.0.0\r\n", b"\r\n"])
@example(lines=[b"GET /healthz HTTP/1.1\r\n\r\n"])
def test_whatever_asks_for_metrics_gets_an_answer_that_is_http(lines: list[bytes]) -> None:
    routes: Any = {"/healthz": {"a": lambda: None}, "/readyz": {"b": lambda: "No."}}
    handler: Any = _handler_of(CollectorRegistry(), routes, dict, lambda: None)
    connection = _Connection(b"".join(lines))
    handler(connection, ("127.0.0.1", 1), None)
    said = connection.said
    if said.startswith(b"HTTP/"):
        assert int(said.split(b" ", 2)[1]) in {status.value for status in HTTPStatus}


# Peers

_SECRET = b"the secret of the run, 32 bytes."


class _Writer:
    """What a peer says, kept."""

    def __init__(self) -> None:
        self.said = b""

    def write(self, data: bytes) -> None:
        self.said += data

    async def drain(self) -> None: ...


def _told(data: bytes, does: Callable[[asyncio.StreamReader, Any], Any]) -> tuple[Any, bytes]:
    """What `does` makes of a connection on which `data` comes and then the end."""

    async def run() -> tuple[Any, bytes]:
        reader, writer = asyncio.StreamReader(), _Writer()
        reader.feed_data(data)
        reader.feed_eof()
        try:
            return await does(reader, writer), writer.said
        except (wire.PeerFault, asyncio.IncompleteReadError) as exc:
            return exc, writer.said

    return asyncio.run(run())


@TRIES
@given(data=st.binary(max_size=200) | st.builds(lambda body: len(body).to_bytes(4, "big") + body + bytes(64), st.binary(max_size=100)))
def test_a_stranger_hears_nothing_from_a_peer(data: bytes) -> None:
    found, said = _told(data, lambda reader, writer: wire.hear(reader, writer, _SECRET))
    assert isinstance(found, Exception)
    assert len(said) == len(wire._MAGIC) + wire._NONCE_BYTES, "the challenge, and no more"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@TRIES
@given(body=_JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
@example(body=b"[" * 60_000)
@example(body=b'["run", "sha", [[0, Infinity]]]')
def test_who_knows_the_secret_may_still_ask_for_nothing_that_there_is(body: bytes) -> None:
    with suppress(wire.PeerFault):
        request = wire._parsed(body)
        assert all(range(first, end) is not None for first, end in request.ranges)


@TRIES
@given(data=st.binary(max_size=60) | st.binary(max_size=60).map(lambda rest: wire._MAGIC + rest), frame=st.binary(max_size=20))
def test_a_peer_that_is_none_is_a_fault(data: bytes, frame: bytes) -> None:
    request = wire.Request(RUN, "ab", ((0, 3),))
    found, _ = _told(data, lambda reader, writer: wire.ask(reader, writer, request, _SECRET))
    assert isinstance(found, Exception)
    kind, _ = _told(frame, lambda reader, _: wire.receive(reader))
    assert isinstance(kind, Exception | tuple)


# The registry's answers


class _Asked:
    """A client of a registry that answers whatever it is told to. One for all cases: making one takes longer than asking."""

    def __init__(self) -> None:
        self.answer = (200, "")
        self.registry = HttpRegistry("http://registry", subjects_of(Namespace("fuzz").topic), {"max.retries": 0})
        rest: Any = self.registry._client._rest_client
        rest.session.close()
        rest.session = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(self.answer[0], text=self.answer[1])))


@pytest.fixture(scope="module")
def asked() -> _Asked:
    return _Asked()


@TRIES
@given(
    status=st.sampled_from((200, 204, 301, 400, 401, 404, 409, 422, 429, 500, 503)) | st.integers(200, 599),
    body=_JSON.map(json.dumps)
    | st.builds(lambda value: json.dumps({"schema": value, "id": value, "subject": value, "version": value}), _JSON)
    | st.builds(
        lambda text, kind: json.dumps({"schema": text, "schemaType": kind, "id": 1}), st.text(), st.sampled_from(("AVRO", "JSON", "?"))
    )
    | st.text(),
)
def test_whatever_a_registry_answers_is_a_schema_or_an_error_of_ours(asked: _Asked, status: int, body: str) -> None:
    registry, asked.answer = asked.registry, (status, body)
    schema = newest(RECORDS[0].SCHEMA)
    questions: tuple[Callable[[], object], ...] = (
        lambda: registry.schema_of(1),
        lambda: registry.id_of(schema),
        lambda: registry.register(schema, "FULL"),
        lambda: registry.missing(schema),
    )
    for ask in questions:
        for kept in (registry._schemas, registry._ids):
            kept.clear()
        registry._client.clear_caches()
        with suppress(RegistryError, InvalidRecord):
            ask()


# The settings file

_SECTIONS = {name: field.annotation for name, field in Settings.model_fields.items()}
_KEYS = {name: tuple(getattr(section, "model_fields", {"x": 0})) for name, section in _SECTIONS.items()}
_VALUES = st.one_of(
    st.integers(), st.floats(), st.booleans(), st.text(max_size=8), st.lists(st.integers() | st.text(max_size=4), max_size=3),
    st.just({"a": 1}), st.just([{"name": "x"}]), st.sampled_from(("/dev/null", "http://u:p@h", "lora", "full", "-1", "nan", "x.py:f")),
)  # fmt: skip


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool | float) else json.dumps(value)


@st.composite
def _files(draw: st.DrawFn) -> str:
    lines = []
    for section in draw(st.lists(st.sampled_from(sorted(_KEYS)), max_size=4, unique=True)):
        lines.append(f"[{section}]" if draw(st.integers(0, 9)) else f"[[{section}]]")
        for key in draw(st.lists(st.sampled_from((*_KEYS[section], "secret_file", "nobody")), max_size=3, unique=True)):
            lines.append(f"{key} = {_toml(draw(_VALUES))}")
    return "\n".join(lines)


@TRIES
@given(content=_files().map(str.encode) | st.binary(max_size=60), value=st.text(max_size=9))
@example(content=b"a = " + b"[" * 5_000, value="")
@example(content=b"", value="[" * 100_000)
def test_a_settings_file_is_settings_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes, value: str) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(content)
    with suppress(UserError):
        json.dumps(public_config(load_settings(path, {"ECHO_LEARNER__RANKS": value} if value else {})))
