"""The model finds what it is for: the protocol with one rule broken shows, each in the way that is named here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_core.assembly import GroupAssembler
from echo_core.groups import AssemblyState, DropDecision
from echo_learner.commit import session as sessions
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.learner_state import LearnerState
from echo_learner.commit.publication import Publication, PublicationThread
from echo_learner.commit.snapshot import read_snapshot
from echo_learner.intake import Intake
from echo_memory.producer import MemoryProducer
from echo_schemas.records import Coordinates, Reward, StepReport
from echo_schemas.topics import STEPS
from tests.model.conftest import MakeScenario
from tests.model.disk import Disk, Loss, _Folder
from tests.model.records import write_clean
from tests.model.runs import Fate, Fault, ModelRun
from tests.model.scenarios import Play, Scenario, die, sleep

Patch = Callable[[pytest.MonkeyPatch], None]


def no_file_is_forced(patch: pytest.MonkeyPatch) -> None:
    real = Disk.synced
    patch.setattr(Disk, "synced", lambda self, place: real(self, place) if isinstance(self._node(place), _Folder) else None)


def no_folder_is_forced(patch: pytest.MonkeyPatch) -> None:
    real = Disk.synced
    patch.setattr(Disk, "synced", lambda self, place: None if isinstance(self._node(place), _Folder) else real(self, place))


def the_rename_is_not_forced(patch: pytest.MonkeyPatch) -> None:
    real = Disk.synced
    patch.setattr(Disk, "synced", lambda self, place: None if place.endswith("checkpoints") else real(self, place))


def what_is_found_is_not_forced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointStore, "anchor", lambda self: None)


def published_before_it_is_saved(patch: pytest.MonkeyPatch) -> None:
    save, submit = CheckpointStore.save, PublicationThread.submit
    owed: list[Callable[[], object]] = []
    patch.setattr(CheckpointStore, "save", lambda *args: owed.append(lambda: save(*args)))

    def publish_then_save(self: PublicationThread, publication: Publication) -> None:
        submit(self, publication)
        self.wait()
        while owed:
            owed.pop()()

    patch.setattr(PublicationThread, "submit", publish_then_save)


def the_newest_checkpoint_is_taken(patch: pytest.MonkeyPatch) -> None:
    def everything(self: CheckpointStore, root: str | None, run_id: str) -> list[LearnerState]:
        return sorted(self.states(run_id).values(), key=lambda state: (state.version, state.created_ms))

    patch.setattr(CheckpointStore, "descendants", everything)


def _with_assembly(patch: pytest.MonkeyPatch, change: Callable[[AssemblyState], AssemblyState]) -> None:
    real = CheckpointStore.load

    def load(self: CheckpointStore, name: str) -> LearnerState:
        state = real(self, name)
        return replace(state, assembly=change(state.assembly))

    patch.setattr(CheckpointStore, "load", load)


def closed_seqs_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    _with_assembly(patch, lambda assembly: replace(assembly, floor=0, closed=frozenset()))


def open_records_are_left_behind(patch: pytest.MonkeyPatch) -> None:
    real = GroupAssembler.state
    patch.setattr(GroupAssembler, "state", lambda self: replace(real(self), trajectory_lows=real(self).trajectory_read_to))


def drops_come_one_checkpoint_late(patch: pytest.MonkeyPatch) -> None:
    real = Intake.settle
    late: dict[Intake, list[DropDecision]] = {}

    def settle(self: Intake) -> tuple[AssemblyState, list[DropDecision]]:
        assembly, drops = real(self)
        before = late.get(self, [])
        late[self] = drops
        return assembly, before

    patch.setattr(Intake, "settle", settle)


def reports_go_before_the_transaction(patch: pytest.MonkeyPatch) -> None:
    real = PublicationThread._publish

    def publish(self: PublicationThread, publication: Publication) -> None:
        reports = tuple(each for each in publication.outbox if isinstance(each[1], StepReport))
        with self._writer.transaction() as transaction:
            for topic, record in reports:
                transaction.publish(topic, record, partition=0 if topic is STEPS else None)
        real(self, replace(publication, outbox=tuple(each for each in publication.outbox if each not in reports)))

    patch.setattr(PublicationThread, "_publish", publish)


def what_is_owed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CheckpointStore, "load_outbox", lambda *_: ())


def nobody_is_fenced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryProducer, "_require_not_fenced", lambda self: None)


def the_last_reward_counts(patch: pytest.MonkeyPatch) -> None:
    real = GroupAssembler._join

    def join(self: GroupAssembler, seq: int, sample: Any, at: Coordinates, reward: Reward) -> None:
        known = sample.rewards.pop(reward.name, None)
        if known is None or at.offset > known[0]:
            real(self, seq, sample, at, reward)
        else:
            sample.rewards[reward.name] = known

    patch.setattr(GroupAssembler, "_join", join)


def snapshots_are_made_again(patch: pytest.MonkeyPatch) -> None:
    real = CheckpointStore.load_snapshot

    def load(self: CheckpointStore, *args: Any) -> Any:
        kept = real(self, *args)
        folder = kept.folder.with_name("again")
        folder.mkdir(exist_ok=True)
        for file in kept.files:
            (folder / file.name).write_bytes(kept.path(file).read_bytes() + b" again")
        return read_snapshot(folder, kept.version, kept.kind, [file.name for file in kept.files])

    patch.setattr(CheckpointStore, "load_snapshot", load)


def drops_are_named_by_nobody(patch: pytest.MonkeyPatch) -> None:
    real = sessions._scan
    patch.setattr(sessions, "_scan", lambda *args: replace(real(*args), drops_checkpoint=None))


def dies_twice(run: ModelRun, fault: Fault) -> None:
    """One is killed without the power; the next one, with it, some calls after it has gone on."""
    run.train(Fault(Fate.KILL, fault.number))
    run.train(Fault(Fate.POWER, fault.seed, fault.loss))
    run.finish()


def sleeps_over_the_end(run: ModelRun, fault: Fault) -> None:
    """One sleeps, the next one finishes, the first wakes up; then the run goes on."""
    sleep(run, fault)
    write_clean(run.pipeline, range(2 * run.steps, 2 * run.steps + 2))
    run.steps += 1
    run.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A broken rule, where it shows, and a word of what is said then."""

    breaks: Patch
    says: str
    fate: Fate = Fate.KILL
    play: Play = die
    loss: Loss = Loss.EVERYTHING
    kappa: int = 1
    late: bool = False
    before: str = ""
    seeds: tuple[int, ...] = (0,)


MUTATIONS = [
    Mutation(breaks=no_file_is_forced, says="not", fate=Fate.POWER, loss=Loss.CONTENTS, before="produce"),
    Mutation(breaks=no_folder_is_forced, says="There is no checkpoint", fate=Fate.POWER, before="produce"),
    Mutation(breaks=the_rename_is_not_forced, says="There is no checkpoint", fate=Fate.POWER, before="produce"),
    Mutation(
        breaks=what_is_found_is_not_forced, says="There is no checkpoint", play=dies_twice, before="disk fsync", seeds=(130, 140, 150)
    ),
    Mutation(breaks=published_before_it_is_saved, says="No such file or directory", before="disk w"),
    Mutation(breaks=the_newest_checkpoint_is_taken, says="one_chain", fate=Fate.PAUSE, play=sleeps_over_the_end, before="produce"),
    Mutation(breaks=closed_seqs_are_forgotten, says="is open in the checkpoint", before="produce"),
    Mutation(breaks=open_records_are_left_behind, says="never be read again", before="produce"),
    Mutation(breaks=drops_come_one_checkpoint_late, says="has no end", before="produce"),
    Mutation(breaks=reports_go_before_the_transaction, says="not public", before="produce"),
    Mutation(breaks=what_is_owed_is_forgotten, says="one_chain", kappa=2, before="disk mkdir"),
    Mutation(breaks=nobody_is_fenced, says="one_chain", fate=Fate.PAUSE, play=sleep, before="produce"),
    Mutation(breaks=the_last_reward_counts, says="judged it was", before="produce"),
    Mutation(breaks=snapshots_are_made_again, says="snapshot that is not public", before="produce"),
    Mutation(breaks=drops_are_named_by_nobody, says="has 2 ends", late=True, before="produce"),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.breaks.__name__)
def test_a_broken_rule_shows(scenario: MakeScenario, monkeypatch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    model = scenario(kappa=mutation.kappa, late=mutation.late)
    mutation.breaks(monkeypatch)
    said = next(_complaints(model, mutation), None)
    assert said is not None, "nothing was noticed"
    assert mutation.says in said


def _complaints(model: Scenario, mutation: Mutation) -> Iterator[str]:
    # From the end: there the log already points at something.
    for number, call in reversed(list(enumerate(model.calls, 1))):
        for seed in mutation.seeds if call.startswith(mutation.before) else ():
            fault = Fault(mutation.fate, number, mutation.loss, seed)
            try:
                with model.run(fault=fault) as run:
                    mutation.play(run, fault)
            except Exception as exc:  # whatever a broken rule leads to is what is looked for
                yield f"{type(exc).__name__}: {exc}"
