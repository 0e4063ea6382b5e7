"""A stranger forges trajectories and rewards under honest names. With signatures the honest ones are trained; without they were not."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo_bus.signatures import Signer, TrustedKey, Verifier, key_id_of
from echo_replay.audit import audit_run
from echo_replay.history import History
from echo_replay.selection import Fate
from echo_replay.verdicts import Promise, Verdict
from echo_schemas.columns import pack_tokens
from echo_schemas.records import Coordinates, Trajectory
from echo_schemas.topics import REWARDS, TRAJECTORIES
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, Pipeline, fill

pytestmark = pytest.mark.slow

HONEST, STRANGER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
SEQ = 1
WAIT_S = 60.0


def verifier() -> Verifier:
    public = HONEST.public_key()
    # One key for both writers of the pipeline: which role may write what is tested elsewhere.
    key = TrustedKey(id=key_id_of(public), public=public, role="redrive", names=("w", "exact"))
    known = {key.id: key}
    return Verifier(lambda: known)


def forge(stranger: Pipeline) -> list[Coordinates]:
    """A whole attempt of a group in the worker's name, with rewards, before the honest one comes: the same samples with other tokens."""
    forged = [replace(stranger.sample(SEQ, index), token_ids=pack_tokens([SEQ, 9, 9])) for index in range(GROUP_SIZE)]
    places = stranger.write(TRAJECTORIES, *forged)
    for member, where in zip(forged, places, strict=True):
        stranger.write_reward(member, where, 100.0)
    return places


@pytest.mark.parametrize("signs", [False, True], ids=["unsigned", "by its own key"])
def test_a_forged_duplicate_and_a_forged_score_harm_nobody(tmp_path: Path, signs: bool, caplog: pytest.LogCaptureFixture) -> None:
    swarm = Pipeline(tmp_path, signer=Signer(HONEST), verifier=verifier())
    stranger = Pipeline(tmp_path, cluster=swarm.cluster, signer=Signer(STRANGER) if signs else None)
    forged = forge(stranger)
    with caplog.at_level(logging.WARNING):
        fill(swarm, 2)
        where, first = swarm.placed(TRAJECTORIES, Trajectory)[0]
        # A score of an honest sample, in the judge's name.
        stranger.write_reward(first, where, -100.0)
        swarm.train(NumpyTrainer(), steps=2)
    trained = swarm.accounts().trained
    assert len(trained) == 2 * 2 * GROUP_SIZE
    assert not set(trained) & set(forged)
    assert not swarm.drops()
    assert len(swarm.dead_letters(TRAJECTORIES)) == GROUP_SIZE
    assert len(swarm.dead_letters(REWARDS)) == GROUP_SIZE + 1
    assert "bad_signature" in caplog.text
    assert all(report.metrics["reward_mean"] <= 1.0 for report in swarm.reports())
    with History(swarm.bus, "demo") as history:
        told = {told.where: told for told in history.read()}
    assert {told[where].fate for where in forged} == {Fate.DEAD}
    assert told[where].rewards["exact"] == 0.0, "the history shows a forged score"
    # As a restored run has them between its records.
    swarm.bus.publisher().publish_bytes(swarm.bus.namespace.topic(TRAJECTORIES), None).wait(WAIT_S)
    audit = audit_run(swarm.bus, "demo")
    signed = audit.finding(Promise.SIGNED)
    assert signed.verdict is Verdict.PROVED
    assert [note.partition(" ")[0] for note in signed.notes] == [str(GROUP_SIZE)]
    assert audit.counts["dead-lettered"] == GROUP_SIZE


def test_without_signatures_the_forged_one_is_trained_and_the_audit_tells(tmp_path: Path) -> None:
    swarm = Pipeline(tmp_path, signer=Signer(HONEST))
    forged = forge(Pipeline(tmp_path, cluster=swarm.cluster))
    fill(swarm, 2)
    swarm.train(NumpyTrainer(), steps=2)
    assert set(forged) <= set(swarm.accounts().trained)
    swarm.verifier = verifier()
    finding = audit_run(swarm.bus, "demo").finding(Promise.SIGNED)
    assert finding.verdict is Verdict.BROKEN
    assert {(example.where["partition"], example.where["offset"]) for example in finding.examples} == {
        (where.partition, where.offset) for where in forged
    }


def test_a_forged_score_that_was_trained_is_told_by_the_audit(tmp_path: Path) -> None:
    """The learner did not check; every trajectory is signed, and of one the first score is not."""
    swarm = Pipeline(tmp_path, signer=Signer(HONEST))
    swarm.write_group(0, values=(None, None))
    members = swarm.placed(TRAJECTORIES, Trajectory)
    where, first = members[0]
    Pipeline(tmp_path, cluster=swarm.cluster, signer=Signer(STRANGER)).write_reward(first, where, 100.0)
    for place, member in members:
        swarm.write_reward(member, place, 0.0)
    for seq in range(1, 2 * GROUPS_PER_STEP):
        swarm.write_group(seq)
    swarm.train(NumpyTrainer(), steps=2)
    swarm.verifier = verifier()
    finding = audit_run(swarm.bus, "demo").finding(Promise.SIGNED)
    assert finding.verdict is Verdict.BROKEN
    assert finding.num_broken == 1
    (example,) = finding.examples
    assert "the trained value 100 of the reward 'exact'" in example.says
    assert (example.where["partition"], example.where["offset"], example.where["version"]) == (where.partition, where.offset, 1)
