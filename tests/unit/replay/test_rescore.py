"""`rescore`: what is scored, written, compared and refused, in memory; hanging functions and kills are tried in tests/integration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

import echo_ops.cli.rescore as rescore_command
from echo_bus.clock import Deadline
from echo_bus.signatures import Signer, TrustedKey, Verifier, key_id_of
from echo_ops.cli.reward import refuse_unscored, run_now
from echo_ops.rewards.watch import ScorerWatch
from echo_replay.rescoring import RESCORE, UNREPEATABLE
from echo_replay.rescoring.inside import Answers, unpack_answers
from echo_replay.rescoring.sinks import topic_rewards
from echo_replay.rescoring.team import Item
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Reward, RewardAttachment, RewardOutcome
from echo_schemas.topics import CONTROL, REWARDS
from echo_streams.intake import Identity
from echo_streams.scoring import Judgement
from echo_tasks.rewards import RewardResult, ScoredSample, reward
from tests.unit.core.records import at, trajectory
from tests.unit.core.records import reward as reward_of
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import STEPS_TRAINED, SoundRun
from tests.unit.replay.inline_team import InlineTeam

HERE = __name__


@reward(name="third", version="3")
def third(sample: ScoredSample) -> RewardResult:
    """The middle token: a member's index."""
    return RewardResult(value=float(sample.token_ids[1]), components={"cost_usd": 0.5})


@reward(name="none")
def none(_: ScoredSample) -> float:
    """Nothing that is a value."""
    return float("nan")


@reward(name="picky")
def picky(sample: ScoredSample) -> Any:
    """A text for every second member."""
    return "good" if sample.token_ids[1] else 1.0


@reward(name="now", repeatable=False)
def of_today(_: ScoredSample) -> float:
    """What depends on the day."""
    return 1.0


@reward(name="batch", batch=True)
def together(samples: list[ScoredSample]) -> list[float]:
    """As many as were given."""
    return [float(len(samples))] * len(samples)


Run = Callable[..., None]


@pytest.fixture
def copy(sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """A copy of the sound run that the command reads and writes."""
    pipeline = sound.forge(tmp_path)
    monkeypatch.setattr(rescore_command, "read_settings", lambda _config: pipeline.settings())
    monkeypatch.setattr(rescore_command, "reach_bus", lambda _settings, role: replace(pipeline.bus, role=role))
    monkeypatch.setattr(rescore_command, "Team", InlineTeam)
    return pipeline


def rescore(function: str = "third", **wish: Any) -> None:
    rescore_command.rescore(path=f"{HERE}:{function}", **wish)


def written(pipeline: Pipeline, *applications: str) -> list[Reward]:
    """What rescores have written."""
    with closing(replace(pipeline.bus, run_id="demo").look([REWARDS])) as reader:
        reader.start({place: low for place, (low, _) in reader.bounds().items()})
        found = [message for messages in reader.read_to_end(Deadline.after(30.0)) for message in messages]
    for message in found:
        if isinstance(message.record, Reward) and message.record.application in (applications or (RESCORE,)):
            assert message.coordinates.partition == message.record.of.partition
    return [each.record for each in found if isinstance(each.record, Reward) and each.record.application in (applications or (RESCORE,))]


def test_a_range_is_scored_once_under_a_name_of_its_own_and_compared(copy: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    rescore(step="1..3", against="exact")
    first = written(copy)
    assert {(each.name, each.code_version, each.outcome) for each in first} == {(f"{HERE}:third", "3", RewardOutcome.SCORED)}
    assert all(each.value == each.index for each in first)
    assert Counter(each.of for each in first).most_common(1)[0][1] == 1
    said = capsys.readouterr().out
    assert f"{len(first):,} scored" in said
    assert f"${len(first) / 2:g}" in said
    assert f"{len(first)} samples have both" in said
    rescore(step="1..3")
    assert written(copy) == first
    assert "nothing new in" in capsys.readouterr().out
    rescore()
    everything = written(copy)
    assert everything[: len(first)] == first or len(everything) > len(first)
    assert Counter(each.of for each in everything).most_common(1)[0][1] == 1
    assert "cannot be read" in capsys.readouterr().out
    assert not [each for each in everything if each.group_id.startswith("demo/probe-")]


def test_a_wider_range_goes_on_where_the_last_one_was(copy: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    rescore(step="1")
    some = len(written(copy))
    rescore(step="1..2")
    assert len(written(copy)) == 2 * some
    assert f"{some} had a record already" in capsys.readouterr().out


def test_what_has_no_value_has_a_reason_and_is_not_called_again(copy: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    rescore("picky", step="1..3")
    found = written(copy)
    failed = [each for each in found if each.outcome is RewardOutcome.FAILED]
    assert len(failed) * 2 == len(found)
    assert {each.error for each in failed} == {"The value must be a number; it is a str."}
    assert f"{len(failed)} without a value: The value must be a number" in capsys.readouterr().out
    rescore("picky", step="1..3")
    assert written(copy) == found


def test_a_reward_that_gives_no_value_writes_nothing(copy: Pipeline) -> None:
    with pytest.raises(UserError, match=r"gives no value: The value is nan.* samples tried"):
        rescore("none")
    assert written(copy) == []


def test_batches(copy: Pipeline) -> None:
    rescore("together", step="1")
    assert {each.value for each in written(copy)} == {float(len(written(copy)))}


def test_nothing_is_written_by_a_dry_run(copy: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    rescore(step="1..3", dry_run=True)
    said = capsys.readouterr().out
    assert "trajectories, about 1 s and $" in said
    assert "Nothing was written." in said
    assert written(copy) == []


def test_a_name_that_somebody_gives_is_refused(copy: Pipeline) -> None:
    with pytest.raises(UserError, match="'exact' is taken: the application 'main'") as refused:
        rescore(name="exact")
    assert "--name exact-3" in refused.value.hint
    attachment = RewardAttachment(application="beside", is_attached=True, rewards=("mine",), share=1.0)
    copy.write(CONTROL, Control(run_id="demo", epoch=1, attachment=attachment, issued_by="t", time_ms=1))
    with pytest.raises(UserError, match="'mine' is taken: the application 'beside'"):
        rescore(name="mine")
    assert written(copy) == []


def test_scores_of_another_version_are_not_mixed(copy: Pipeline) -> None:
    rescore(step="1", name="mixed")
    with pytest.raises(UserError, match="'mixed' holds scores of version '3'; this is version '1'"):
        rescore("picky", step="2", name="mixed")


def test_what_cannot_be_repeated_is_refused_or_marked(copy: Pipeline) -> None:
    with pytest.raises(UserError, match="cannot be repeated"):
        rescore("of_today", step="1")
    rescore("of_today", step="1", force=True)
    assert written(copy) == []
    assert written(copy, UNREPEATABLE)


def test_a_range_of_nothing_is_said(copy: Pipeline) -> None:
    with pytest.raises(UserError, match="Nothing in the log"):
        rescore(groups=["999"])
    with pytest.raises(UserError, match="never published"):
        rescore(version="77")


def test_a_second_rescore_under_the_name_ends_the_first(copy: Pipeline) -> None:
    bus = replace(copy.bus, role="rescore")
    with topic_rewards(bus, "demo", "n") as first:
        first.write([_record()])
        with topic_rewards(bus, "demo", "n"), pytest.raises(UserError, match="Another rescore under the name 'n' has begun"):
            first.write([_record()])
    assert len(written(copy, "t")) == 1


def test_what_it_writes_is_signed(copy: Pipeline) -> None:
    private = Ed25519PrivateKey.generate()
    public = private.public_key()
    key = TrustedKey(id=key_id_of(public), public=public, role="rescore", names=("n",))
    with topic_rewards(replace(copy.bus, role="rescore", signer=Signer(private)), "demo", "n") as sink:
        sink.write([_record(), _record()])
    copy.verifier = Verifier(lambda: {key.id: key})
    assert len(copy.read(REWARDS, Reward)) == 2


def test_into_a_folder_and_on_from_there(copy: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="install the extra 'analysis'")
    from echo_replay.export.exporter import export_run
    from echo_replay.export.layout import Table
    from echo_replay.export.manifest import open_export
    from echo_replay.export.verifying import verify_export

    folder = tmp_path / "scores"
    rescore(step="1..2", into=str(folder), against="exact")
    assert "samples have both" in capsys.readouterr().out
    rescore(step="1..3", into=str(folder))
    assert "had a record already" in capsys.readouterr().out
    home, manifest = open_export(folder)
    verified = verify_export(home, manifest)
    assert verified.problems == []
    assert manifest.rescored == (f"{HERE}:third", "3")
    rescore(step="1..3")
    assert verified.rows[Table.REWARDS] == len(written(copy))
    with pytest.raises(UserError, match="holds the scores of"):
        export_run(copy.bus, "demo", folder)
    with pytest.raises(UserError, match=r"holds scores of .*third.*, not of 'other'"):
        rescore(step="1", into=str(folder), name="other")
    export_run(copy.bus, "demo", tmp_path / "export")
    with pytest.raises(UserError, match="holds an export of the run"):
        rescore(step="1", into=str(tmp_path / "export"))


def test_a_rescored_name_is_nobodys_who_could_be_waited_for(copy: Pipeline) -> None:
    rescore(step="1")
    with closing(ScorerWatch(replace(copy.bus, run_id="demo"))) as watch:
        watch.listen()
        assert f"{HERE}:third" not in {name for _, name in watch.heard}
        with pytest.raises(UserError, match="No application gives"):
            refuse_unscored(f"{HERE}:third", watch.heard)


def test_answers_come_whole_or_later() -> None:
    data = bytearray()

    def write(part: bytes) -> int:
        data.extend(part)
        return len(part)

    out = Answers(write)
    out.judged(0, Judgement(outcome=RewardOutcome.SCORED, value=2.5, components={"cost_usd": 1.0, "cached": 1.0}, seconds=0.25), b"one")
    out.judged(1, Judgement(outcome=RewardOutcome.FAILED, error="ValueError: é"), b"two")
    whole = bytes(data)
    for cut in range(len(whole)):
        part = bytearray(whole[:cut])
        before = unpack_answers(part)
        part += whole[cut:]
        answers = [answer for _, answer in before + unpack_answers(part)]
        assert [(each.index, each.value, each.error, each.cost_usd, each.is_cached, each.record) for each in answers] == [
            (0, 2.5, None, 1.0, True, b"one"),
            (1, None, "ValueError: é", 0.0, False, b"two"),
        ]


def _record() -> tuple[Item, bytes]:
    item = Item(where=at(1), identity=Identity.of(trajectory(1)), value=b"", compared=0.0)
    return item, lock_file_codec().encode(reward_of(at(1), name="n", application="t"))


def test_a_run_that_was_never_accepted_gets_no_order(copy: Pipeline) -> None:
    settings = copy.settings()
    assert run_now(settings, copy.bus).version == STEPS_TRAINED
    other = settings.model_copy(update={"run": settings.run.model_copy(update={"name": "nobodys"})})
    with pytest.raises(UserError, match="knows no run 'nobodys'"):
        run_now(other, replace(copy.bus, run_id="nobodys"))
