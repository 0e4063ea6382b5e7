"""The learner's reading side: two topics into the assembler, while training goes on.

    trajectories, rewards, dead requests ─ reader thread ─▶ GroupAssembler ─ learner's thread ─▶ batches, drops, checkpointed state

The seq of a dead-lettered request is closed, unless another copy of the request was answered.
Threads: the reader thread fetches, decodes and assembles. The learner's thread calls everything else; `next_batch` blocks until enough
groups are ready, and the reader thread wakes it. One lock guards the assembler. If reading fails, every later call raises the cause.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from echo_bus.clock import Clock
from echo_bus.dead_letters import said_of
from echo_bus.message import Message
from echo_bus.reading.reader import LogReader
from echo_bus.reading.reader import Place as ReaderPlace
from echo_core.assembly import GroupAssembler
from echo_core.batch_choice import Choice, ChosenGroup, choose_batch
from echo_core.bottleneck import Place, Use
from echo_core.groups import AssemblyState, DropDecision, SeqState
from echo_core.policy import StalenessPolicy
from echo_learner.admission import AdmissionLimits
from echo_learner.back_pressure import BackPressure
from echo_learner.drops_since import DropsSinceBatch
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.metrics import LearnerMetrics
from echo_learner.trust import WorkerTrust
from echo_runtime.notices import STANDSTILL_S
from echo_runtime.places import PlaceTimes
from echo_schemas.partitioning import partition_of
from echo_schemas.records import Coordinates, DropReason, Purpose, Reward, RewardTerm, RolloutRequest, Trajectory
from echo_schemas.topics import REWARDS, TRAJECTORIES

logger = logging.getLogger(__name__)

_READ_S, _TICK_S = 0.2, 1.0
# How often the end of each partition is asked anew: the feeder, which looks for lost requests, learns up to when the log is read.
_LOOK_EVERYWHERE_S = 5.0
READ_AT_ONCE = 256


class Intake:
    """Owns the reader and the assembler. `start` it once, `close` it at the end."""

    def __init__(
        self,
        reader: LogReader,
        assembler: GroupAssembler,
        *,
        policy: StalenessPolicy,
        limits: AdmissionLimits,
        trust: WorkerTrust,
        evaluations: Evaluations,
        places: PlaceTimes,
        metrics: LearnerMetrics,
        clock: Clock,
        max_bytes: int,
        keeps_texts: bool,
    ) -> None:
        """`evaluations` gets the trajectories and rewards of evaluations. `keeps_texts`: the task's signals read the samples' texts."""
        self._reader, self._assembler = reader, assembler
        self._policy, self._limits = policy, limits
        self._trust, self._evaluations = trust, evaluations
        self._places, self._metrics, self._clock = places, metrics, clock
        self._back_pressure = BackPressure(reader, assembler, policy, max_bytes)
        self._keeps_texts = keeps_texts
        self._changed = threading.Condition()
        self._goal: dict[ReaderPlace, int] = {}
        self.is_caught_up = self._rewards_caught_up = False
        """Whether everything was read that the log held at the start."""
        # When each partition was read to its end the last time.
        self._at_end_s: dict[ReaderPlace, float] = {}
        self._looked_everywhere_s = -math.inf
        self._ticked_s = clock.monotonic_s()
        self._error: BaseException | None = None
        self._woken = False
        self._on_reward: Callable[[Reward], object] = lambda reward: None
        self._counts: Callable[[Reward], bool] = lambda reward: True
        # Of dead-lettered requests, by seq: the partition of an answer, when the letter was read, what it says, and the group.
        self._dead: dict[int, tuple[ReaderPlace, float, str, str]] = {}
        self._delivered: Counter[str] = Counter()
        self._dropped = DropsSinceBatch()
        self._to_close: tuple[tuple[int, DropReason, str], ...] = ()
        self._expected_sha256: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="intake", daemon=True)

    def start(self, state: AssemblyState | None) -> None:
        """Read from the state's lows, or from the beginning. No batch is formed before the end offsets seen now are reached.

        Raises OffsetLost if the log no longer holds them.
        """
        positions: dict[ReaderPlace, int] = {}
        if state is not None:
            positions = {(TRAJECTORIES.name, partition): low for partition, low in state.trajectory_lows.items()}
            positions |= {(REWARDS.name, partition): low for partition, low in state.reward_lows.items()}
        self._goal = self._reader.start(positions)
        self._thread.start()

    def next_batch(self, version: int, terms: tuple[RewardTerm, ...], timeout_s: float) -> tuple[ChosenGroup, ...] | None:
        """The groups of the next batch, taken out and closed; None if there are not enough within `timeout_s`, or after a `wake`.

        Groups that can never be trained any more are dropped here.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._woken or self._may_choose(), timeout_s)
            self._woken = False
            self._raise_error()
            if self._may_choose():
                return self._choose(version, terms)
            if self.is_caught_up and self._assembler.num_ready:
                # Drop a group that can never be trained without waiting for a batch: it holds the place of another one.
                self._refuse(choose_batch(self._assembler.ready, version, self._policy, terms))
            return None

    def set_terms(self, terms: tuple[RewardTerm, ...]) -> None:
        """Another reward specification for the batches from now on."""
        with self._changed:
            self._assembler.set_terms(terms)

    def missing_rewards(self) -> dict[str, list[Coordinates]]:
        """Records of whole groups that have waited `STANDSTILL_S` for a reward, by the reward's name."""
        with self._changed:
            return self._assembler.missing_rewards(STANDSTILL_S)

    def describe_wait(self) -> str:
        """Why there is no batch, judged by the records read so far, and which log to look at."""
        with self._changed:
            num_ready, num_open, missing = self._assembler.num_ready, self._assembler.num_open, self._assembler.missing_rewards()
            caught_up, dropped = self.is_caught_up, self._dropped.sentence()
        said = f"{num_ready} of the {self._policy.groups_per_step} groups of a batch are ready, {num_open - num_ready} more are open."
        if not caught_up:
            return f"{said} The log is still read from where the checkpoint left it."
        if dropped:
            said = f"{said} {dropped}"
        if missing:
            waits = ", ".join(f"{len(places)} for the reward {name!r}" for name, places in missing.items())
            return f"{said} Samples wait: {waits}. Look at the log of the reward processes."
        if num_ready >= self._policy.groups_per_step:
            return f"{said} What their workers claim is being compared, or they are dropped."
        if num_open > num_ready:
            return f"{said} No attempt of the open groups is whole. Look at the logs of the workers."
        return said if dropped else f"{said} Nothing else has come. Look at the logs of the workers and of the feeder."

    def call_on_reward(self, call: Callable[[Reward], object], counts: Callable[[Reward], bool]) -> None:
        """`call(reward)` on the reader thread for each training reward that counts. `counts(reward)`: whether it comes from the application
        that the file names; a reward that does not is ignored. Before `start`."""
        self._on_reward = call
        self._counts = counts

    def wake(self) -> None:
        """End the learner's wait for a batch, so that it looks at something else. From any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def expect_weights(self, sha256: str) -> None:
        """Train from now on only samples of exactly this snapshot."""
        with self._changed:
            self._expected_sha256 = sha256

    def states(self, seqs: Iterable[int]) -> dict[int, SeqState]:
        """The state of each of `seqs`, as far as the log was read."""
        with self._changed:
            return {seq: self._state_of(seq) for seq in seqs}

    def drop(self, seq: int, why: DropReason, detail: str = "") -> None:
        """Close a seq without training it; a closed one stays as it is."""
        with self._changed:
            self._assembler.drop_group(seq, why, detail)

    def drop_once_read(self, seqs: Iterable[int], why: DropReason, detail: str) -> None:
        """Close `seqs` when the log is read to where it ends now, so that each of their records gets its own drop. Before `start`."""
        self._to_close += tuple((seq, why, detail) for seq in seqs)

    def settle(self) -> tuple[AssemblyState, list[DropDecision]]:
        """The state for a checkpoint, and the drops that must be saved with it."""
        with self._changed:
            self._raise_error()
            drops = self._assembler.drain_drops()
            self._dropped.add(drops)
            return self._assembler.state(), drops

    @property
    def has_drops(self) -> bool:
        """Whether there are drops that no checkpoint holds yet."""
        with self._changed:
            return self._assembler.has_drops

    def take_delivered(self) -> dict[str, int]:
        """Number of trajectories read since the last call, by worker."""
        with self._changed:
            found, self._delivered = self._delivered, Counter()
        return found

    def read_on(self) -> None:
        """Read on without back-pressure: after the last step, evaluations still wait for their records."""
        self._back_pressure.end()

    @property
    def num_ready(self) -> int:
        with self._changed:
            return self._assembler.num_ready

    @property
    def floor(self) -> int:
        """Every seq below is closed."""
        with self._changed:
            return self._assembler.floor

    def closed_from(self, base: int) -> bytes:
        """The seqs from `base` on that are trained, dropped or in the batch under way, as Progress.closed has them."""
        with self._changed:
            return self._assembler.closed_from(base)

    def read_from(self, base: int) -> dict[str, Any]:
        """As fields of Progress: the seqs from `base` on that were seen, and up to when the log is read. From any thread."""
        with self._changed:
            seen = self._assembler.seen_from(base)
            # A request is answered by trajectories or a dead letter, so `rewards`, which may be paused, does not count.
            places = {place for place in self._goal if place[0] != REWARDS.name}
            read_s = min(self._at_end_s[place] for place in places) if places and places <= self._at_end_s.keys() else None
        return {"seen": seen, "read_s": read_s}

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._reader.close()

    # The learner's thread, lock held

    def _may_choose(self) -> bool:
        if self._error is not None:
            return True
        if self._assembler.num_ready < self._policy.groups_per_step:
            return False
        return self.is_caught_up or (self._back_pressure.is_full and (self._rewards_caught_up or not self._back_pressure.lacks_rewards))

    def _choose(self, version: int, terms: tuple[RewardTerm, ...]) -> tuple[ChosenGroup, ...] | None:
        choice = choose_batch(self._assembler.ready, version, self._policy, terms)
        self._refuse(choice)
        if choice.batch is None:
            return None
        if malformed := self._malformed(choice.batch):
            for seq, (why, detail) in malformed.items():
                self._assembler.drop_group(seq, why, detail)
            return None
        # A list, and no generator: `is_pending` offers each claim for comparison, and all of them are to be compared at once.
        pending = [self._trust.is_pending(sample.member.trajectory) for group in choice.batch for sample in group.samples]
        if any(pending):
            return None
        for group in choice.batch:
            self._assembler.take(group.seq, group.dropped.items())
        self._dropped.clear()
        return choice.batch

    def _refuse(self, choice: Choice) -> None:
        for seq, why in choice.refused.items():
            self._assembler.drop_group(seq, why)

    def _malformed(self, groups: tuple[ChosenGroup, ...]) -> dict[int, tuple[DropReason, str]]:
        """Groups with a sample that the model cannot take, or of a worker whose claim was refuted."""
        found: dict[int, tuple[DropReason, str]] = {}
        for group in groups:
            for sample in group.samples:
                trajectory = sample.member.trajectory
                if fault := self._limits.fault_of(trajectory) or self._trust.fault_of(trajectory) or self._other_weights(trajectory):
                    found[group.seq] = fault
        return found

    def _other_weights(self, trajectory: Trajectory) -> tuple[DropReason, str] | None:
        expected, found = self._expected_sha256, trajectory.weights_sha256
        if expected is None or found == expected:
            return None
        return DropReason.WRONG_VERSION, f"A sample comes from the weights {found[:12]}; {expected[:12]} were asked for."

    def _state_of(self, seq: int) -> SeqState:
        if self._assembler.is_closed(seq):
            return SeqState.CLOSED
        return SeqState.WHOLE if self._assembler.is_whole(seq) else SeqState.MISSING

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # The reader thread

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                self._read_once()
        except BaseException as exc:  # the edge of the thread: the learner's thread gets it
            logger.exception("Reading has failed")
            with self._changed:
                self._error = exc
                self._changed.notify_all()

    def _read_once(self) -> None:
        started_s, worked_s = self._clock.monotonic_s(), time.thread_time()
        messages = self._reader.read(READ_AT_ONCE, timeout_s=_READ_S)
        with self._changed:
            self._apply(messages)
            self._note_positions(self._reader.positions)
            self._tick()
            if self._woken or self._may_choose():
                self._changed.notify_all()
            num_ready, num_open, num_bytes = self._assembler.num_ready, self._assembler.num_open, self._assembler.open_bytes
            again = self._back_pressure.to_read_again()
            to_pause = self._back_pressure.to_pause()
        self._back_pressure.pause(to_pause)
        self._back_pressure.go_back(again)
        self._metrics.groups_ready.set(num_ready)
        self._metrics.groups_open.set(num_open)
        self._metrics.open_bytes.set(num_bytes)
        elapsed_s, busy_s = self._clock.monotonic_s() - started_s, time.thread_time() - worked_s
        self._places.add(Place.ASSEMBLY, Use.BUSY, busy_s)
        # Paused without a batch: what is read waits for its rewards, and not for the learner.
        is_blocked = bool(to_pause) and num_ready >= self._policy.groups_per_step
        self._places.add(Place.ASSEMBLY, Use.BLOCKED if is_blocked else Use.EMPTY, elapsed_s - busy_s)
        use = Use.BLOCKED if is_blocked else Use.BUSY if num_ready else Use.EMPTY
        self._places.add(Place.QUEUE, use, elapsed_s)

    def _apply(self, messages: list[Message]) -> None:
        for message in messages:
            record = message.record
            if isinstance(record, Trajectory):
                self._delivered[record.worker_id] += 1
                if record.purpose is Purpose.EVAL:
                    self._evaluations.add_trajectory(message.coordinates, record)
                    continue
                if not self._keeps_texts:
                    record.forget_texts()
                if record.purpose is Purpose.PROBE:
                    self._offer_probe(record)
                elif self._trust.wants(record) and self._limits.fault_of(record) is None:
                    self._trust.offer(record)
                    # The learner compares the claim while it waits, and not when its batch is ready.
                    self._woken = True
                self._assembler.add_trajectory(message.coordinates, record)
            elif isinstance(record, Reward) and self._counts(record):
                if self._evaluations.is_judging(record):
                    self._evaluations.add_reward(message.coordinates, record)
                    continue
                if not self._back_pressure.is_again(message.coordinates):
                    self._on_reward(record)
                self._assembler.add_reward(message.coordinates, record)
            elif isinstance(record, RolloutRequest) and record.purpose is Purpose.TRAIN:
                partition = partition_of(record.group_id, sum(name == TRAJECTORIES.name for name, _ in self._reader.places))
                self._dead[record.seq] = (
                    (TRAJECTORIES.name, partition),
                    self._clock.monotonic_s(),
                    said_of(message.headers),
                    record.group_id,
                )

    def _close_dead(self, ends: Collection[ReaderPlace], since_s: float) -> None:
        """Close the seqs of dead-lettered requests, unless another copy was answered, once the partition is read to its end after that.
        `ends` were reached since `since_s`."""
        read = [seq for seq, (place, read_s, *_) in self._dead.items() if place in ends and read_s <= since_s]
        for seq in read if self.is_caught_up else ():
            _, _, said, group_id = self._dead.pop(seq)
            if self._state_of(seq) is SeqState.MISSING:
                logger.warning("Seq %d is given up: its request is a dead letter (%s)", seq, said, extra={"group": group_id})
                self._assembler.drop_group(seq, DropReason.FAILED, f"Its request is a dead letter: {said}")
                # A sequential learner asks for another group.
                self._woken = True

    def _note_positions(self, positions: Mapping[ReaderPlace, int]) -> None:
        """Note also the records that `read` does not return (invalid ones, other runs', transaction markers) as read."""
        for (topic, partition), position in positions.items():
            if topic == TRAJECTORIES.name:
                self._assembler.skip_to(partition, position)
            elif topic == REWARDS.name:
                self._assembler.skip_rewards_to(partition, position)
        if self.is_caught_up:
            return
        goal = {place: end for place, end in self._goal.items() if not self._back_pressure.is_ahead(place)}
        self._rewards_caught_up = self._reader.has_reached({place: end for place, end in goal.items() if place[0] == REWARDS.name})
        if self._reader.has_reached(goal):
            self.is_caught_up = True
            for seq, why, detail in self._to_close:
                self._assembler.drop_group(seq, why, detail)
            logger.info("The log is read to where it ended at the start; %d groups are open", self._assembler.num_open)
            self._changed.notify_all()

    def _offer_probe(self, trajectory: Trajectory) -> None:
        if fault := self._limits.fault_of(trajectory):
            logger.warning("A probe of version %d cannot be compared: %s", trajectory.min_version, fault[1])
            self._metrics.probes_refused.inc()
        else:
            self._trust.offer_probe(trajectory)

    def _tick(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._ticked_s < _TICK_S:
            return
        since_s, self._ticked_s = self._ticked_s, now_s
        looked_for = {place for place, *_ in self._dead.values()}
        looked_for |= {(topic.name, partition) for partition in self._assembler.waiting_in for topic in (TRAJECTORIES, REWARDS)}
        if now_s - self._looked_everywhere_s >= _LOOK_EVERYWHERE_S:
            self._looked_everywhere_s = now_s
            looked_for |= self._goal.keys()
        ends = self._reader.take_ends(looked_for)
        self._at_end_s |= dict.fromkeys(ends, now_s)
        at_end, rewards_at_end = ({partition for name, partition in ends if name == topic.name} for topic in (TRAJECTORIES, REWARDS))
        self._assembler.tick(now_s, at_end, rewards_at_end)
        self._close_dead(ends, since_s)
