"""Records for the model: every record has its own content, every reward its own value, so that what is mixed up shows."""

from __future__ import annotations

import random
from typing import Any

from echo_schemas.columns import pack_tokens
from echo_schemas.records import Coordinates, Trajectory
from echo_schemas.topics import REWARDS, TRAJECTORIES
from tests.model.trainer import VOCABULARY, ModelTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, Pipeline, sample

FIRST_WEIGHTS = ModelTrainer("anybody").snapshot_sha256(0)


def member_of(seq: int, index: int, *, content: int = 0, **changes: Any) -> Trajectory:
    """Member `index` of group `seq`; `content` tells it from others of the same name."""
    token_ids = pack_tokens([seq % VOCABULARY, index, content % VOCABULARY])
    return sample(seq, index, **{"token_ids": token_ids, "weights_sha256": FIRST_WEIGHTS, **changes})


def value_of(where: Coordinates, repeated: int = 0) -> float:
    """Of the reward of one record; a repeated one says something else."""
    return float((where.partition * 31 + where.offset * 7) % 53 + 100 * repeated)


def reward_for(pipeline: Pipeline, member: Trajectory, where: Coordinates, *, repeated: int = 0) -> None:
    """The reward of one record."""
    pipeline.write_reward(member, where, value_of(where, repeated))


def write_clean(pipeline: Pipeline, seqs: range, *, version: int = 0, sha256: str = FIRST_WEIGHTS) -> None:
    """Whole groups with their rewards; every second one is judged twice, and not alike."""
    for seq in seqs:
        for index in range(GROUP_SIZE):
            member = member_of(seq, index, version=version, weights_sha256=sha256)
            (where,) = pipeline.write(TRAJECTORIES, member)
            for repeated in range(1 + seq % 2):
                reward_for(pipeline, member, where, repeated=repeated)


def write_ends(pipeline: Pipeline, seq: int) -> None:
    """Records that meet every other end: a token outside the vocabulary, what nobody can read, a version that is not yet."""
    members = [member_of(seq, index, token_ids=pack_tokens([seq % VOCABULARY, 1, VOCABULARY])) for index in range(GROUP_SIZE)]
    members += [member_of(seq + 1, index, version=7) for index in range(GROUP_SIZE)]
    for member in members:
        (where,) = pipeline.write(TRAJECTORIES, member)
        reward_for(pipeline, member, where)
    pipeline.write_bytes(TRAJECTORIES, b"not a record")
    pipeline.write_bytes(REWARDS, b"nor this")
    pipeline.write(TRAJECTORIES, member_of(0, 0, run_id="other"))


def write_doubles(pipeline: Pipeline, seq: int) -> None:
    """For group `seq`: the same names with other content, another attempt, the reward again with another value."""
    for member in (member_of(seq, 0, content=1), member_of(seq, 1, content=2, attempt="b")):
        (where,) = pipeline.write(TRAJECTORIES, member)
        reward_for(pipeline, member, where)
        reward_for(pipeline, member, where, repeated=1)


def write_noisy(pipeline: Pipeline, seqs: range, chance: random.Random, *, version: int = 0, sha256: str = FIRST_WEIGHTS) -> None:
    """Groups in any order: members and rewards between one another, doubled, failed at first, or lost."""
    waiting: list[tuple[Trajectory, Coordinates | None, int]] = []
    for seq in seqs:
        for index in range(GROUP_SIZE):
            for content in range(1 + (chance.random() < 0.3)):
                attempt = chance.choice("ab") if content else "a"
                if chance.random() > 0.05:
                    changes = {"attempt": attempt, "version": version, "weights_sha256": sha256}
                    waiting.append((member_of(seq, index, content=content, **changes), None, 0))
    while waiting:
        member, where, repeated = waiting.pop(chance.randrange(min(len(waiting), 8)))
        if where is None:
            (where,) = pipeline.write(TRAJECTORIES, member)
            if chance.random() < 0.15:
                pipeline.write_reward(member, where, None)
            waiting += [(member, where, number) for number in range(chance.choice([0, 1, 1, 1, 1, 1, 2]))]
        else:
            reward_for(pipeline, member, where, repeated=repeated)
