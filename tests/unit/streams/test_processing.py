"""Batches of raw trajectories to the records that answer them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo_bus.client.profiles import MAX_RECORD_BYTES
from echo_bus.clock import ManualClock
from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.errors import TooManyDeadLetters, TransportError
from echo_bus.metrics import BusMetrics
from echo_bus.reading.decoding import Decoder
from echo_bus.signatures import Signer, TrustedKey, Verifier, key_id_of
from echo_bus.wire import Wire
from echo_memory.message import MemoryMessage
from echo_schemas.errors import UserError
from echo_schemas.headers import run_of
from echo_schemas.partitioning import partition_of
from echo_schemas.records import LogprobSource, Purpose, Reward, RewardOutcome, TrajectorySource
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_streams.intake import Intake
from echo_streams.metrics import StreamsMetrics
from echo_streams.processing import Outgoing, Processor
from echo_tasks.rewards import ScoredSample
from tests.unit.core.records import trajectory
from tests.unit.streams.stage import CODEC, NAMESPACE, attached, message, sample, scorer

REWARDS_TOPIC = NAMESPACE.topic(REWARDS)
LETTERS_TOPIC = NAMESPACE.dead_letters(TRAJECTORIES)


class Stage:
    """A processor over one reward, by default one that gives 1: `seen` are the completions that it was asked about."""

    def __init__(
        self,
        judge: Callable[..., Any] | None = None,
        *,
        learner_version: int | None = None,
        drop_stale: bool = True,
        limits: DeadLetterLimits | None = None,
        signer: Signer | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.seen: list[str] = []
        self.learner_version = learner_version
        self.metrics = StreamsMetrics()
        self.bus_metrics = BusMetrics()
        wire = Wire(
            namespace=NAMESPACE,
            role="r1",
            metrics=self.bus_metrics,
            clock=ManualClock(),
            run_id="demo",
            dead_letter_limits=limits or DeadLetterLimits(),
            signer=signer,
            verifier=verifier,
        )
        self.processor = Processor(
            wire,
            scorer(attached(judge or self._judge), metrics=self.metrics),
            Intake("demo", budget=2, drop_stale=drop_stale),
            group="unit.reward.main",
            learner_version=lambda: self.learner_version,
            metrics=self.metrics,
        )

    def _judge(self, given: ScoredSample) -> float:
        self.seen.append(given.completion)
        return 1.0

    def process(self, *batch: MemoryMessage) -> list[Outgoing]:
        return asyncio.run(self.processor.process(batch))


def rewards(answers: Sequence[Outgoing]) -> list[Reward]:
    found = [CODEC.decode(answer.value or b"") for answer in answers if answer.topic == REWARDS_TOPIC]
    return [record for record in found if isinstance(record, Reward)]


def test_a_reward_lies_on_its_trajectorys_partition_and_names_its_place() -> None:
    (answer,) = Stage().process(message(trajectory(3, 1), 41, partition=2))
    assert (answer.topic, answer.partition, answer.key) == (REWARDS_TOPIC, 2, b"demo/3")
    assert run_of(answer.headers) == "demo"
    assert dict(answer.headers)["ce_source"] == b"unit.r1"
    (found,) = rewards([answer])
    assert (found.of.partition, found.of.offset, found.seq, found.index, found.attempt) == (2, 41, 3, 1, "a")
    assert (found.outcome, found.value) == (RewardOutcome.SCORED, 1.0)


def test_a_redelivered_trajectory_gets_the_same_reward_again() -> None:
    stage = Stage()
    first, second = (stage.process(message(trajectory(3), 41)) for _ in range(2))
    assert [found.of for found in rewards(first)] == [found.of for found in rewards(second)]


def test_the_stale_are_answered_on_their_headers_alone() -> None:
    """Not even their bytes are looked at."""
    stage = Stage(learner_version=8)
    (found,) = rewards(stage.process(message(trajectory(3, 1, version=5), 41, value=b"never decoded")))
    assert (found.outcome, found.value, found.error) == (RewardOutcome.STALE, None, "Version 5 is too old for the learner's 8.")
    assert (found.seq, found.index, found.attempt, found.of.offset) == (3, 1, "a", 41)
    assert stage.seen == []
    assert sample(stage.metrics, "echo_streams_rewards_total", name="r", outcome="stale") == 1


def test_an_offline_trajectory_is_never_stale() -> None:
    stage = Stage(learner_version=80)
    offline = trajectory(3, version=5, source=TrajectorySource.OFFLINE, logprob_source=LogprobSource.RECOMPUTED)
    found = rewards(stage.process(message(offline, 41), message(offline, 42, headers=None)))
    assert [reward.outcome for reward in found] == [RewardOutcome.SCORED] * 2


def test_without_headers_the_body_decides_the_same() -> None:
    stage = Stage(learner_version=8)
    stale, fresh = trajectory(3, version=5), trajectory(4, version=6, completion="fresh")
    found = rewards(stage.process(message(stale, headers=None), message(fresh, 1, headers=None)))
    assert {reward.seq: reward.outcome for reward in found} == {3: RewardOutcome.STALE, 4: RewardOutcome.SCORED}
    assert stage.seen == ["fresh"]


def test_the_learners_version_is_asked_for_each_batch() -> None:
    stage = Stage()
    outcomes = []
    for version in (None, 7, 8):
        stage.learner_version = version
        outcomes += [found.outcome for found in rewards(stage.process(message(trajectory(version=5))))]
    assert outcomes == [RewardOutcome.SCORED, RewardOutcome.SCORED, RewardOutcome.STALE]


def test_a_sample_that_has_grown_too_old_when_its_turn_comes_is_not_scored() -> None:
    seen: list[str] = []

    async def judge(given: ScoredSample) -> float:
        seen.append(given.completion)
        stage.learner_version = 8
        return 1.0

    stage = Stage(judge, learner_version=5)
    batch = [trajectory(seq, version=version, completion=str(seq)) for seq, version in ((1, 5), (2, 5), (3, 6))]
    found = rewards(stage.process(*(message(record, offset) for offset, record in enumerate(batch))))
    assert [reward.outcome for reward in found] == [RewardOutcome.SCORED, RewardOutcome.STALE, RewardOutcome.SCORED]
    assert (seen, found[1].error) == (["1", "3"], "Version 5 is too old for the learner's 8.")


def test_a_learner_that_cannot_be_followed_any_more_is_no_fault_of_the_function() -> None:
    def lost() -> int:
        raise TransportError("the view has ended")

    async def judge(given: ScoredSample) -> float:
        stage.processor._learner_version = lost
        return 1.0

    stage = Stage(judge, learner_version=5)
    found = rewards(stage.process(message(trajectory(1, version=5), 0), message(trajectory(2, version=5), 1)))
    assert [reward.outcome for reward in found] == [RewardOutcome.SCORED, RewardOutcome.SCORED]
    with pytest.raises(TransportError):
        stage.process(message(trajectory(3, version=5), 2))


def test_where_the_learner_downweights_every_age_is_scored() -> None:
    stage = Stage(learner_version=100, drop_stale=False)
    (found,) = rewards(stage.process(message(trajectory(version=5), headers=None)))
    assert found.outcome is RewardOutcome.SCORED


def test_evaluations_are_scored_at_any_age() -> None:
    stage = Stage(learner_version=100)
    (found,) = rewards(stage.process(message(trajectory(version=5, purpose=Purpose.EVAL))))
    assert found.outcome is RewardOutcome.SCORED


@pytest.mark.parametrize("changes", [{}, {"headers": None}])
def test_probes_are_passed_over(changes: dict[str, Any]) -> None:
    stage = Stage()
    assert stage.process(message(trajectory(purpose=Purpose.PROBE), **changes)) == []
    assert stage.seen == []
    assert sample(stage.metrics, "echo_streams_trajectories_passed_total", reason="probe") == 1


@pytest.mark.parametrize("changes", [{}, {"headers": None}, {"headers": None, "key": None}])
def test_other_runs_are_passed_over(changes: dict[str, Any]) -> None:
    stage = Stage()
    assert stage.process(message(trajectory(run_id="other"), **changes)) == []
    assert stage.seen == []
    assert sample(stage.metrics, "echo_streams_trajectories_passed_total", reason="other_run") == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"value": b"\x00\x00\x00"}, "truncated"),
        ({"value": b"not avro at all"}, "bad_magic"),
        ({"value": None}, "null_value"),
        ({"key": b"demo/4"}, "key_mismatch"),
    ],
)
def test_an_unreadable_message_becomes_a_dead_letter_with_its_original_bytes(changes: dict[str, Any], reason: str) -> None:
    stage = Stage()
    bad = message(trajectory(3), 41, partition=2, **changes)
    good = message(trajectory(5), 42, partition=2)
    letter, reward = stage.process(bad, good)
    assert (letter.topic, letter.partition, letter.key, letter.value) == (LETTERS_TOPIC, None, bad.key(), bad.value())
    headers = dict(letter.headers)
    assert headers["echo-reason"].decode() == reason
    assert (headers["kafka_dlt-original-partition"], headers["kafka_dlt-original-offset"]) == (b"2", b"41")
    assert headers["kafka_dlt-original-consumer-group"] == b"unit.reward.main"
    assert dict(bad.headers() or ()).items() <= headers.items()
    assert [found.seq for found in rewards([reward])] == [5]
    labels = {"topic": NAMESPACE.topic(TRAJECTORIES), "reason": reason}
    assert stage.bus_metrics.registry.get_sample_value("echo_bus_dead_letters_total", labels) == 1


def test_a_message_on_the_wrong_partition_is_a_dead_letter() -> None:
    stage = Stage()
    stage.processor.set_num_partitions(4)
    right = partition_of("demo/3", 4)
    letter, reward = stage.process(message(trajectory(3), partition=(right + 1) % 4), message(trajectory(3), partition=right))
    assert dict(letter.headers)["echo-reason"] == b"partition_mismatch"
    assert reward.partition == right


def test_a_partition_that_was_added_ends_the_application_and_makes_no_dead_letters() -> None:
    stage = Stage()
    stage.processor.set_num_partitions(4)
    with pytest.raises(UserError, match="Somebody added partitions: trajectories had 4 when"):
        stage.process(message(trajectory(3), partition=4))


def test_an_oversized_message_is_cut_to_what_a_topic_takes() -> None:
    (letter,) = Stage().process(message(trajectory(), value=b"x" * (MAX_RECORD_BYTES + 1)))
    assert letter.value == b"x" * MAX_RECORD_BYTES
    assert dict(letter.headers)["echo-truncated-from"] == b"%d" % (MAX_RECORD_BYTES + 1)


def test_too_many_unreadable_messages_in_a_row_end_the_application() -> None:
    stage = Stage(limits=DeadLetterLimits(stop_after=2))
    bad = message(trajectory(), value=b"bad")
    assert len(stage.process(bad, bad)) == 2
    with pytest.raises(TooManyDeadLetters, match="3 messages in a row"):
        stage.process(bad)


def test_a_hundred_unreadable_messages_end_nothing() -> None:
    stage = Stage()
    letters = stage.process(*[message(trajectory(), value=b"bad")] * 300)
    assert [letter.topic for letter in letters] == [LETTERS_TOPIC] * 300
    assert len(rewards(stage.process(message(trajectory())))) == 1


HOSTILE_HEADERS = [
    [("echo-version", b"9" * 5_000)],
    [("ce_id", b"demo/" + b"9" * 5_000 + b"/a/0"), ("echo-group", b"demo/" + b"9" * 5_000)],
    [("ce_id", b"demo/1/" + b"a" * 900_000 + b"/0"), ("echo-group", b"demo/1"), ("echo-version", b"0")],
    [("ce_id", "demo/\u0663/a/0".encode()), ("echo-group", "demo/\u0663".encode())],
]


@pytest.mark.parametrize("headers", HOSTILE_HEADERS)
def test_headers_that_lie_leave_it_to_the_body(headers: list[tuple[str, bytes]]) -> None:
    (reward,) = rewards(Stage(learner_version=9).process(message(trajectory(version=9), headers=headers)))
    assert reward.outcome is RewardOutcome.SCORED


@pytest.mark.parametrize("entry", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "[1]", "nonsense"])
def test_an_entry_that_is_no_plain_object_is_a_failed_reward(entry: str) -> None:
    (reward,) = rewards(Stage().process(message(trajectory(entry=entry))))
    assert reward.outcome is RewardOutcome.FAILED


def test_readable_ones_between_them_are_counted_too() -> None:
    stage = Stage(limits=DeadLetterLimits(stop_after=1))
    bad, good = message(trajectory(), value=b"bad"), message(trajectory())
    assert len(stage.process(bad, good, bad, good, bad)) == 5


def test_batches_are_answered_beside_one_another() -> None:
    """One that waits for a slow judge does not hold up the next."""
    may_end = asyncio.Event()

    async def slow(given: ScoredSample) -> float:
        if given.completion == "slow":
            await may_end.wait()
        return 1.0

    stage = Stage(slow)

    async def run() -> list[int]:
        first = asyncio.create_task(stage.processor.process([message(trajectory(1, completion="slow"), 1)]))
        second = await stage.processor.process([message(trajectory(2), 2)])
        assert not first.done()
        may_end.set()
        return [found.of.offset for answers in (second, await first) for found in rewards(answers)]

    assert asyncio.run(run()) == [2, 1]


def test_what_its_worker_has_not_signed_is_a_dead_letter_and_rewards_are_signed() -> None:
    worker, judge = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    keys = {
        key_id_of(private.public_key()): TrustedKey(id="k", public=private.public_key(), role=role, names=("*",))
        for role, private in (("worker", worker), ("reward", judge))
    }
    stage = Stage(signer=Signer(judge), verifier=Verifier(lambda: keys))
    record = trajectory(3, 1)
    signature = Signer(worker).sign(NAMESPACE.topic(TRAJECTORIES), [("demo/3", CODEC.encode(record))])
    signed = message(record, 41, partition=2, headers=signature)
    letter, answer = stage.process(message(record, 40, partition=2), signed)
    assert (letter.topic, dict(letter.headers)["echo-reason"]) == (LETTERS_TOPIC, b"bad_signature")
    assert len(stage.seen) == 1
    found = MemoryMessage(REWARDS_TOPIC, 2, 0, answer.key, answer.value, answer.headers, 1)
    decoded = Decoder(Wire(namespace=NAMESPACE, role="learner", verifier=Verifier(lambda: keys)), [REWARDS]).decode(found)
    assert decoded is not None
    assert decoded.record == rewards([answer])[0]
