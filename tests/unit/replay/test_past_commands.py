"""show, lineage, search and replay: what is printed and written, and one sentence with a hint for each mistake."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from avro.datafile import DataFileReader
from avro.io import DatumReader

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from confluent_kafka.admin import NewTopic

import echo_ops.cli.lineage as lineage_command
import echo_ops.cli.replay as replay_command
import echo_ops.cli.search as search_command
import echo_ops.cli.show as show_command
from echo_replay.history import History
from echo_replay.selection import Selection, Steps, Versions
from echo_replay.sinks import REPLAYED_FROM
from echo_schemas.errors import UserError
from echo_schemas.records import Coordinates
from echo_schemas.topics import TRAJECTORIES
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, WAIT_S, Pipeline
from tests.unit.replay.forged import SoundRun

MODULES: tuple[ModuleType, ...] = (show_command, lineage_command, search_command, replay_command)
Use = Callable[[Pipeline], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """`use(pipeline)`: the commands read its log."""

    def begin(pipeline: Pipeline) -> None:
        for module in MODULES:
            monkeypatch.setattr(module, "read_settings", lambda _config: pipeline.settings())
        for place in ("echo_ops.cli.past", "echo_ops.cli.replay"):
            monkeypatch.setattr(f"{place}.reach_bus", lambda _settings: replace(pipeline.bus, role="operator"))

    return begin


@pytest.fixture
def used(use: Use, sound: SoundRun) -> Pipeline:
    use(sound.pipeline)
    return sound.pipeline


def show(target: str, *, run: str = "", as_json: bool = False) -> None:
    show_command.show(target, run=run, as_json=as_json)


def search(pattern: str | None = None, *, tokens: str = "", limit: int = 0, as_json: bool = True, **options: Any) -> None:
    search_command.search(pattern=pattern, tokens=tokens, limit=limit, as_json=as_json, **options)


def replay(into: str, *, rate: float | None = None, pace: replay_command.Pace = "full", follow: bool = False, **options: Any) -> None:
    replay_command.replay(into=into, rate=rate, pace=pace, follow=follow, **options)


def lines(printed: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed.splitlines()]


def place_of(history: History) -> Coordinates:
    return next(iter(history.read(Selection(range=Steps(1, 1))))).where


def test_a_group_is_shown_with_fate_step_rewards_and_versions(used: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    show("demo/1")
    printed = capsys.readouterr().out
    assert printed.startswith("demo/1: 4 samples of 2 attempts")
    assert printed.count("trained in v1, advantage") == 2
    assert "dropped: other_attempt" in printed or "dropped: duplicate" in printed
    assert "exact 1" in printed
    assert "v0 [1, 3)" in printed


def test_a_record_an_attempt_and_a_step_are_shown(used: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    with History(used.bus, "demo") as history:
        where = place_of(history)
    show(f"{where.partition}:{where.offset}", as_json=True)
    (record,) = lines(capsys.readouterr().out)
    assert record["at"] == [where.partition, where.offset]
    assert record["fate"] == "trained"
    show("demo/1/again/0", as_json=True)
    (record,) = lines(capsys.readouterr().out)
    assert record["trajectory"]["name"] == "demo/1/again/0"
    show("1/1", as_json=True)
    assert {record["trajectory"]["name"] for record in lines(capsys.readouterr().out)} == {"demo/1/a/1", "demo/1/again/1"}
    show("v3")
    printed = capsys.readouterr().out
    assert f"{GROUPS_PER_STEP} groups, {GROUPS_PER_STEP * GROUP_SIZE} samples" in printed
    assert printed.count("  group ") == GROUPS_PER_STEP


def test_escape_codes_of_a_trajectory_do_nothing(use: Use, sound: SoundRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = sound.forge(tmp_path)
    use(copy)
    evil = "\x1b]52;c;aGk=\x07\x1b[2J\x9b1m\u202eabc\r"
    copy.write(TRAJECTORIES, copy.sample(40, 0, completion=evil, prompt=evil))
    show("40")
    search("abc", as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("␛]52;c;aGk=␇␛[2J\\u009b1m\\u202eabc␍") == 2, printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b", "\u202e", "\r"}


def test_lineage_says_what_made_a_version_and_what_became_of_its_samples(used: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    lineage_command.lineage("v2", as_json=True)
    (found,) = lines(capsys.readouterr().out)
    assert found["parent"].startswith("v1-")
    assert found["checkpoint"].startswith("v2-")
    assert found["workers"] == {"w": GROUPS_PER_STEP * GROUP_SIZE}
    assert found["sampled_by"] == {"0": GROUPS_PER_STEP * GROUP_SIZE}
    assert found["rewards"]["exact"]["mean"] == 0.5
    with History(used.bus, "demo") as history:
        samples = list(history.read(Selection(range=Versions(2, 2))))
    assert found["became"] == {f"trained in v{step}": count for step, count in sorted(Counter(each.step for each in samples).items())}
    lineage_command.lineage("0")
    assert "what the run began with; no step made it" in capsys.readouterr().out


def test_search_by_text_and_by_tokens(used: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    search("^c$", step="1..2")
    assert len(lines(capsys.readouterr().out)) == 2 * GROUPS_PER_STEP * GROUP_SIZE
    search(tokens="3,1", step="1..2")
    found = lines(capsys.readouterr().out)
    assert [(each["trajectory"]["seq"], each["trajectory"]["index"]) for each in found] == [(3, 1)]
    assert found[0]["found"] == {"in": "tokens", "start": 0, "end": 2}
    search("c", limit=3, as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_search_for_all_that_finds_nothing_was_not_stopped(used: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    search("nowhere", limit=0)
    assert capsys.readouterr().err.strip().endswith("trajectories of demo")


def test_a_search_where_nothing_lies_says_so(used: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    search("c", until="1970-01-01T00:00:00")
    assert "none is in this range" in capsys.readouterr().err


def test_an_expression_that_never_ends_is_ended(
    use: Use, sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    copy = sound.forge(tmp_path)
    use(copy)
    copy.write(TRAJECTORIES, copy.sample(40, 0, completion="a" * 60 + "b"))
    monkeypatch.setattr("echo_replay.searching._MOST_S", 0.05)
    with pytest.raises(UserError, match=r"took longer than 0\.05 s on one text"):
        search("(a|aa)+$", within="answer")


def test_a_replayed_file_holds_the_bytes_as_they_are(used: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    replay(str(file), step="2..3")
    kept = {(partition, offset): value for partition, offset, value in used.cluster.committed(used.namespace.topic(TRAJECTORIES))}
    written = lines(file.read_text(encoding="utf-8"))
    assert len(written) == 2 * GROUPS_PER_STEP * GROUP_SIZE
    for line in written:
        assert base64.b64decode(line["raw"]["value"]) == kept[line["from"]["partition"], line["from"]["offset"]]
    assert [path.name for path in tmp_path.iterdir()] == ["some.jsonl"]


def test_a_replayed_folder_names_what_it_holds(used: Pipeline, tmp_path: Path) -> None:
    replay(f"{tmp_path}/cut", version="2..4", fate="trained")
    manifest = json.loads((tmp_path / "cut" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["run"] == "demo"
    assert manifest["asked"] == {"version": "2..4", "fate": "trained"}
    for name, about in manifest["files"].items():
        assert len((tmp_path / "cut" / name).read_text(encoding="utf-8").splitlines()) == about["records"]


def test_a_topic_gets_the_bytes_and_where_they_come_from(use: Use, sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    use(copy)
    for future in copy.cluster.admin().create_topics([NewTopic("mine", 1, 1)]).values():
        future.result(WAIT_S)
    replay("mine", step="1..2", pace="original")
    consumer = copy.cluster.consumer({"group.id": "look", "enable.partition.eof": True})
    consumer.assign([TopicPartition("mine", 0, OFFSET_BEGINNING)])
    kept = {(partition, offset): value for partition, offset, value in copy.cluster.committed(copy.namespace.topic(TRAJECTORIES))}
    count = 0
    while (raw := consumer.poll(WAIT_S)) is not None and raw.error() is None:
        headers = dict(raw.headers() or [])
        topic, partition, offset = headers[REPLAYED_FROM].decode().split("/")
        assert topic == copy.namespace.topic(TRAJECTORIES)
        assert raw.value() == kept[int(partition), int(offset)]
        assert headers["echo-run"] == b"demo"
        count += 1
    consumer.close()
    assert count == 2 * GROUPS_PER_STEP * GROUP_SIZE


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("v900", "no version 900 of demo"),
        ("demo/900", "no group demo/900"),
        ("3:abc", "no group, no coordinates and no version"),
        ("a/b/17", "no group, no coordinates and no version"),
        ("9:0", "no partition 9"),
        ("0:99999", "no offset 99999"),
        ("0:0/1", "'0:0' is no name of a run"),
        ("nobodys/3", "knows no run 'nobodys'"),
    ],
)
def test_what_cannot_be_shown(used: Pipeline, target: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        show(target)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"version": "9..3"}, "--version '9..3' names no range"),
        ({"version": "90"}, "Version 90 was never published"),
        ({"offsets": ["3"]}, "--offsets '3' is no range"),
        ({"since": "yesterday"}, "--since 'yesterday' is no time"),
        ({"since": "1h", "until": "2h"}, "lies before --since"),
        ({"step": "1", "version": "1"}, "are two ranges"),
        ({"groups": ["x"]}, "'x' is no group"),
        ({"worker": "nobody"}, "Nothing in the log is what was asked for"),
    ],
)
def test_a_mistake_in_a_range_leaves_no_file(used: Pipeline, tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        replay(str(tmp_path / "some.jsonl"), **options)
    assert refused.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("into", "says"),
    [
        ("echo.test.trajectories", "one of the pipeline's own topics"),
        ("rewards.dlq", "one of the pipeline's own topics"),
        ("nobodys", "There is no topic nobodys"),
        ("a topic", "is no name of a topic"),
        ("/nowhere/some.jsonl", "There is no folder /nowhere"),
    ],
)
def test_a_target_that_cannot_be_written_to(used: Pipeline, into: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        replay(into, step="1")
    assert refused.value.hint


def test_a_replay_that_fails_leaves_no_file(used: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_told: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("echo_replay.sinks.line_of", fail)
    for target in (f"{tmp_path}/some.jsonl", f"{tmp_path}/cut"):
        with pytest.raises(UserError, match="cannot be written: No space"):
            replay(target, step="1")
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_a_search(used: Pipeline) -> None:
    with pytest.raises(UserError, match="is broken at character 2"):
        search("(")
    with pytest.raises(UserError, match="is broken at character"):
        search("a{99999999999}")
    with pytest.raises(UserError, match="nested too deeply"):
        search("(" * 2000 + ")" * 2000)
    with pytest.raises(UserError, match="no list of token ids"):
        search(tokens="1,x")
    with pytest.raises(UserError, match="for a text or for tokens"):
        search()


def test_an_avro_file_holds_what_is_known_of_each_record(used: Pipeline, tmp_path: Path) -> None:
    file = tmp_path / "out.avro"
    replay(str(file))
    # Read by another library than the one that wrote it.
    with DataFileReader(file.open("rb"), DatumReader()) as reader:
        about = json.loads(reader.get_meta("echoswarm.about") or b"{}")
        records: list[Any] = list(reader)
        found = {(each["partition"], each["offset"]): each for each in records}
    assert about["run"] == "demo"
    with History(used.bus, "demo") as history:
        told = list(history.read())
    assert set(found) == {(each.where.partition, each.where.offset) for each in told}
    for each in told:
        written = found[each.where.partition, each.where.offset]
        assert (written["fate"], written["step"], written["rewards"]) == (each.fate.value, each.step, dict(each.rewards))
        if each.trajectory is None:
            assert (written["trajectory"], written["unreadable"]) == (None, each.raw.value())
        else:
            assert written["trajectory"]["token_ids"] == each.trajectory.token_ids
            assert written["unreadable"] is None
    with pytest.raises(UserError, match="is there already"):
        replay(str(file))
    assert [path.name for path in tmp_path.iterdir()] == ["out.avro"]
