"""The codec: round trips, and a named reason for everything that is not one of our records."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.codec import Codec, lock_file_codec
from echo_schemas.columns import all_finite, pack_logprobs, pack_tokens
from echo_schemas.errors import InvalidReason, InvalidRecord, RegistryError
from echo_schemas.records import (
    RECORDS,
    Coordinates,
    DropReason,
    FinishReason,
    LogprobSource,
    Progress,
    Purpose,
    Record,
    Reward,
    RewardOutcome,
    RolloutReply,
    RolloutRequest,
    Sampling,
    Span,
    Trajectory,
    VersionSpan,
)
from echo_schemas.registry import LockFileRegistry
from echo_schemas.schemas import newest
from echo_schemas.topics import PROGRESS, REPLIES, REQUESTS, STEPS, TOPICS, TRAJECTORIES, WEIGHTS, WORKERS
from tests.examples import load_examples

# JSON as text is "{}" by default in code but has no default in Avro: Apicurio 3.3 refuses a schema with the default "{}".
JSON_TEXT = {"entry", "config"}


def trajectory(**changes: Any) -> Trajectory:
    example = load_examples(TRAJECTORIES)["single_turn.json"]
    assert isinstance(example, Trajectory)
    return dataclasses.replace(example, **changes)


ALL_EXAMPLES = [record for topic in TOPICS for record in load_examples(topic).values()]


def refused(record: Record) -> InvalidReason:
    with pytest.raises(InvalidRecord) as caught:
        lock_file_codec().encode(record)
    return caught.value.reason


def unreadable(payload: bytes | None) -> InvalidReason:
    with pytest.raises(InvalidRecord) as caught:
        lock_file_codec().decode(payload)
    return caught.value.reason


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_every_example_round_trips(topic: Any) -> None:
    codec = lock_file_codec()
    examples = load_examples(topic)
    for record in examples.values():
        assert codec.decode(codec.encode(record)) == record
    assert {type(record) for record in examples.values()} == set(topic.records)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_the_dataclass_mirrors_its_schema(record: type[Record]) -> None:
    schema = newest(record.SCHEMA)
    assert schema.full_name == f"echoswarm.{record.__name__}"
    assert [field["name"] for field in schema.raw["fields"]] == [field.name for field in dataclasses.fields(record)]  # type: ignore[arg-type]
    for field, declared in zip(dataclasses.fields(record), schema.raw["fields"], strict=True):  # type: ignore[arg-type]
        assert declared["doc"].endswith("."), f"{field.name} has no doc sentence"
        if field.name in JSON_TEXT:
            assert "default" not in declared
            continue
        has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        assert has_default == ("default" in declared), f"{field.name}: a default must stand in both places"


def test_enum_symbols_are_the_same_in_code_and_schema() -> None:
    def enums(node: Any) -> dict[str, list[str]]:
        if isinstance(node, dict):
            found = {node["name"]: node["symbols"]} if node.get("type") == "enum" else {}
            for value in node.values():
                found |= enums(value)
            return found
        if isinstance(node, list):
            return {name: symbols for item in node for name, symbols in enums(item).items()}
        return {}

    declared = {name: symbols for record in RECORDS for name, symbols in enums(newest(record.SCHEMA).raw).items()}
    for enum in (Purpose, FinishReason, RewardOutcome, DropReason):
        assert declared[enum.__name__] == [member.value for member in enum]


def test_the_prefix_is_confluents() -> None:
    codec = lock_file_codec()
    payload = codec.encode(trajectory())
    magic, schema_id = struct.unpack(">bI", payload[:5])
    assert magic == 0
    assert schema_id == LockFileRegistry().id_of(newest("trajectory")) >= 1_000_000_000


def test_the_views_are_read_only_and_do_not_copy() -> None:
    record = lock_file_codec().decode(lock_file_codec().encode(trajectory()))
    assert isinstance(record, Trajectory)
    assert record.tokens.tolist() == [1, 2, 3, 4, 9, 8, 7, 6]
    assert record.logprob_values.dtype == np.float32
    assert not record.tokens.flags.writeable
    assert np.shares_memory(record.tokens, np.frombuffer(record.token_ids, np.uint8))


def test_a_decoded_record_is_frozen_like_a_built_one() -> None:
    record: Any = lock_file_codec().decode(lock_file_codec().encode(trajectory()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.run_id = "other"


@given(st.integers(min_value=1, max_value=50), st.integers(min_value=0, max_value=9), st.text(max_size=20), st.data())
def test_any_valid_trajectory_round_trips(num_generated: int, version: int, text: str, data: st.DataObject) -> None:
    logprobs = data.draw(st.lists(st.floats(-50, 0, width=32), min_size=num_generated, max_size=num_generated))
    end = 4 + num_generated
    record = trajectory(
        prompt=text,
        token_ids=pack_tokens(list(range(end))),
        generated=(Span(start=4, end=end),),
        logprobs=pack_logprobs(logprobs),
        version_spans=(VersionSpan(start=4, end=end, version=version),),
        min_version=version,
        max_version=version,
    )
    assert lock_file_codec().decode(lock_file_codec().encode(record)) == record


@given(st.data())
def test_no_prefix_of_a_record_is_a_record(data: st.DataObject) -> None:
    payload = lock_file_codec().encode(trajectory())
    cut = data.draw(st.integers(min_value=0, max_value=len(payload) - 1))
    assert unreadable(payload[:cut]) == InvalidReason.TRUNCATED


@given(st.data())
def test_bytes_that_were_altered_are_read_or_refused_by_name(data: st.DataObject) -> None:
    payload = bytearray(lock_file_codec().encode(data.draw(st.sampled_from(ALL_EXAMPLES))))
    for _ in range(data.draw(st.integers(min_value=1, max_value=4))):
        payload[data.draw(st.integers(min_value=5, max_value=len(payload) - 1))] = data.draw(st.integers(min_value=0, max_value=255))
    with contextlib.suppress(InvalidRecord):
        record = lock_file_codec().decode(bytes(payload))
        record.validate()


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_by_name(body: bytes) -> None:
    prefix = lock_file_codec().encode(trajectory())[:5]
    with contextlib.suppress(InvalidRecord):
        assert isinstance(lock_file_codec().decode(prefix + body), Trajectory)


def test_bytes_that_are_not_ours() -> None:
    payload = lock_file_codec().encode(trajectory())
    assert unreadable(None) == InvalidReason.NULL_VALUE
    assert unreadable(b"") == InvalidReason.TRUNCATED
    assert unreadable(b"\x01" + payload[1:]) == InvalidReason.BAD_MAGIC
    assert unreadable(b'{"json": true}') == InvalidReason.BAD_MAGIC
    assert unreadable(b"\x00\x00\x00\x00\x07" + payload[5:]) == InvalidReason.UNKNOWN_SCHEMA
    assert unreadable(payload + b"\x00") == InvalidReason.LENGTH_MISMATCH
    # The first field, run_id, one byte long and not UTF-8.
    assert unreadable(payload[:5] + b"\x02\xff" + payload[5:]) == InvalidReason.MALFORMED


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"min_version": -1}, InvalidReason.NEGATIVE_NUMBER),
        ({"seq": -1, "group_id": "demo/-1"}, InvalidReason.NEGATIVE_NUMBER),
        ({"index": 16}, InvalidReason.INCONSISTENT),
        ({"group_id": "demo/1"}, InvalidReason.INCONSISTENT),
        ({"run_id": "other"}, InvalidReason.INCONSISTENT),
        ({"attempt": ""}, InvalidReason.INCONSISTENT),
        ({"min_version": 11}, InvalidReason.INCONSISTENT),
        ({"token_ids": b"abc"}, InvalidReason.LENGTH_MISMATCH),
        ({"logprobs": pack_logprobs([-1.0])}, InvalidReason.LENGTH_MISMATCH),
        ({"generated": ()}, InvalidReason.LENGTH_MISMATCH),
        ({"generated": (Span(start=6, end=10),)}, InvalidReason.LENGTH_MISMATCH),
        ({"generated": (Span(start=6, end=8), Span(start=4, end=6))}, InvalidReason.LENGTH_MISMATCH),
        ({"version_spans": ()}, InvalidReason.LENGTH_MISMATCH),
        ({"version_spans": (VersionSpan(start=4, end=6, version=12),)}, InvalidReason.LENGTH_MISMATCH),
        ({"version_spans": (VersionSpan(start=0, end=4, version=12),)}, InvalidReason.LENGTH_MISMATCH),
        ({"version_spans": (VersionSpan(start=4, end=9, version=12),)}, InvalidReason.LENGTH_MISMATCH),
        (
            {"version_spans": (VersionSpan(start=4, end=8, version=12), VersionSpan(start=8, end=8, version=12))},
            InvalidReason.LENGTH_MISMATCH,
        ),
        ({"max_version": 13}, InvalidReason.INCONSISTENT),
        ({"turn_rewards": (0.5, math.nan)}, InvalidReason.NOT_FINITE),
        ({"logprobs": pack_logprobs([-1.0, 3e38, -1.0, -1.0])}, InvalidReason.NOT_FINITE),
        ({"logprobs": pack_logprobs([-1.0, math.nan, -1.0, -1.0])}, InvalidReason.NOT_FINITE),
        ({"logprobs": pack_logprobs([-1.0, -math.inf, -1.0, -1.0])}, InvalidReason.NOT_FINITE),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_refused(changes: dict[str, Any], reason: InvalidReason) -> None:
    assert refused(trajectory(**changes)) == reason


@pytest.mark.parametrize("cuts", [(), (5,), (5, 6, 7)])
def test_versions_may_change_inside_a_turn_and_between_turns(cuts: tuple[int, ...]) -> None:
    edges = [4, *cuts, 8]
    tags = tuple(VersionSpan(start=a, end=b, version=12 + i) for i, (a, b) in enumerate(itertools.pairwise(edges)))
    record = trajectory(
        version_spans=(*tags, VersionSpan(start=9, end=10, version=11)),
        generated=(Span(start=4, end=8), Span(start=9, end=10)),
        token_ids=pack_tokens(list(range(10))),
        logprobs=pack_logprobs([-1.0] * 5),
        min_version=11,
        max_version=12 + len(cuts),
    )
    assert lock_file_codec().decode(lock_file_codec().encode(record)) == record


def test_numbers_of_any_usual_size_are_finite() -> None:
    assert all_finite(b"")
    assert all_finite(pack_logprobs([0.0, -0.0, -1e-30, -1e30, 1e38, -88.0]))
    assert not all_finite(pack_logprobs([0.0, math.nan]))
    assert not all_finite(pack_logprobs([math.inf, 0.0]))
    assert not all_finite(pack_logprobs([-math.inf]))


def test_an_offline_trajectory_claims_no_sampler() -> None:
    offline = load_examples(TRAJECTORIES)["offline.json"]
    assert isinstance(offline, Trajectory)
    assert offline.is_exempt
    assert refused(dataclasses.replace(offline, logprob_source=LogprobSource.SAMPLER)) == InvalidReason.INCONSISTENT


def test_a_contradiction_on_the_wire_is_refused_too() -> None:
    payload = bytearray(lock_file_codec().encode(trajectory()))
    nan = struct.pack("<f", math.nan)
    position = bytes(payload).index(pack_logprobs([-0.25, -0.5]))
    payload[position : position + 4] = nan
    assert unreadable(bytes(payload)) == InvalidReason.NOT_FINITE


def example(topic: Any, name: str) -> Any:
    return load_examples(topic)[name]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (lambda: dataclasses.replace(example(REQUESTS, "asynchronous.json"), messages=()), InvalidReason.INCONSISTENT),
        (lambda: dataclasses.replace(example(REQUESTS, "asynchronous.json"), group_size=0), InvalidReason.INCONSISTENT),
        (lambda: dataclasses.replace(example(REQUESTS, "sequential.json"), prompt_token_ids=b"abc"), InvalidReason.LENGTH_MISMATCH),
        (lambda: dataclasses.replace(example(REQUESTS, "asynchronous.json"), required_version=-1), InvalidReason.NEGATIVE_NUMBER),
        (
            lambda: dataclasses.replace(example(REQUESTS, "asynchronous.json"), sampling=Sampling(max_new_tokens=0)),
            InvalidReason.INCONSISTENT,
        ),
        (lambda: dataclasses.replace(example(REPLIES, "done.json"), where=()), InvalidReason.INCONSISTENT),
        (lambda: dataclasses.replace(example(REPLIES, "done.json"), correlation=""), InvalidReason.INCONSISTENT),
        (lambda: dataclasses.replace(example(PROGRESS, "progress.json"), published=99), InvalidReason.INCONSISTENT),
        *(
            (lambda wrong=wrong: dataclasses.replace(example(WORKERS, "ready.json"), **wrong), reason)
            for wrong, reason in (
                ({"rollouts_per_s": math.inf}, InvalidReason.NOT_FINITE),
                ({"tokens_per_s": math.nan}, InvalidReason.NOT_FINITE),
                ({"busy_s": math.nan}, InvalidReason.NOT_FINITE),
                ({"price_per_hour": math.inf}, InvalidReason.NOT_FINITE),
                ({"rollouts_per_s": -1.0}, InvalidReason.NEGATIVE_NUMBER),
                ({"partitions": (3, -7)}, InvalidReason.NEGATIVE_NUMBER),
                ({"worker_id": ""}, InvalidReason.INCONSISTENT),
                ({"worker_id": "w" * 300}, InvalidReason.INCONSISTENT),
            )
        ),
        (lambda: dataclasses.replace(example(STEPS, "step.json"), batch=None), InvalidReason.INCONSISTENT),
        (lambda: dataclasses.replace(example(WEIGHTS, "adapter.json"), num_bytes=3), InvalidReason.LENGTH_MISMATCH),
        (lambda: dataclasses.replace(example(WEIGHTS, "adapter.json"), uri="s3://both"), InvalidReason.INCONSISTENT),
        (lambda: dataclasses.replace(example(WEIGHTS, "adapter.json"), sha256="short"), InvalidReason.INCONSISTENT),
    ],
)
def test_other_records_that_contradict_themselves_are_refused(record: Any, reason: InvalidReason) -> None:
    assert refused(record()) == reason


def test_a_snapshot_never_names_a_file_outside_its_folder() -> None:
    manifest = example(WEIGHTS, "full_in_store_forked.json")
    for name in ("/etc/passwd", "../up", "a/../../b", "", "a\\b", "./x"):
        files = (dataclasses.replace(manifest.files[0], name=name),)
        assert refused(dataclasses.replace(manifest, files=files)) == InvalidReason.INCONSISTENT


def test_a_step_report_whose_columns_disagree_is_refused() -> None:
    report = example(STEPS, "step.json")
    for column in ("partitions", "offsets", "seqs", "indices", "advantages", "order", "group_sizes"):
        batch = dataclasses.replace(report.batch, **{column: getattr(report.batch, column)[:-1]})
        assert refused(dataclasses.replace(report, batch=batch)) == InvalidReason.LENGTH_MISMATCH


def test_rewards_carry_a_value_exactly_when_scored() -> None:
    reward = Reward(
        run_id="demo", group_id="demo/1", seq=1, attempt="a", index=0, of=Coordinates(partition=0, offset=0), name="exact",
        code_version="1", outcome=RewardOutcome.SCORED, value=1.0, time_ms=1,
    )  # fmt: skip
    assert refused(dataclasses.replace(reward, value=None)) == InvalidReason.INCONSISTENT
    assert refused(dataclasses.replace(reward, outcome=RewardOutcome.FAILED)) == InvalidReason.INCONSISTENT
    assert refused(dataclasses.replace(reward, value=math.nan)) == InvalidReason.NOT_FINITE
    assert refused(dataclasses.replace(reward, components={"speed": math.inf})) == InvalidReason.NOT_FINITE
    assert refused(dataclasses.replace(reward, of=Coordinates(partition=0, offset=-1))) == InvalidReason.NEGATIVE_NUMBER


def test_a_value_of_the_wrong_type_is_refused_with_a_reason() -> None:
    assert refused(trajectory(prompt=5)) == InvalidReason.MALFORMED
    assert refused(trajectory(seq="4711")) == InvalidReason.MALFORMED
    assert refused(trajectory(sampling=None)) == InvalidReason.MALFORMED
    assert refused(trajectory(finish_reason="bored")) == InvalidReason.MALFORMED
    assert refused(trajectory(seq=2**63, group_id=f"demo/{2**63}")) == InvalidReason.MALFORMED


def test_a_schema_without_an_id_cannot_be_written() -> None:
    codec = Codec(LockFileRegistry(ids={}, schemas=()))
    with pytest.raises(RegistryError, match=r"progress\.v3"):
        codec.encode(example(PROGRESS, "progress.json"))


def test_requests_and_replies_decode_into_their_own_types() -> None:
    codec = lock_file_codec()
    assert isinstance(codec.decode(codec.encode(example(REQUESTS, "sequential.json"))), RolloutRequest)
    assert isinstance(codec.decode(codec.encode(example(REPLIES, "not_ready.json"))), RolloutReply)
    assert isinstance(codec.decode(codec.encode(example(PROGRESS, "progress.json"))), Progress)


def test_entries_are_json_in_every_example() -> None:
    for name, record in load_examples(TRAJECTORIES).items():
        assert isinstance(record, Trajectory)
        assert isinstance(json.loads(record.entry), dict), name
