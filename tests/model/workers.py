"""A hand that plays the workers and the reward processors of a sequential learner: each request is answered once, by rights or by seed."""

from __future__ import annotations

import random
from contextlib import closing

from echo_schemas.records import Coordinates, Purpose, ReplyOutcome, RolloutReply, RolloutRequest, Trajectory, WeightManifest
from echo_schemas.topics import REQUESTS, TRAJECTORIES, WEIGHTS
from tests.model.records import member_of, reward_for
from tests.unit.learner.pipeline import GROUP_SIZE, Pipeline

_LOOK_S = 1.0
_PARTITION = 0


class Workers:
    """Reads requests for ever. With `chance`, some answers are lost, late, doubled or refused."""

    def __init__(self, pipeline: Pipeline, chance: random.Random | None) -> None:
        self._pipeline = pipeline
        self._chance = chance
        self._sha256: dict[int, str] = {}
        self._held: list[RolloutRequest] = []
        self._num_answers = 0

    def run(self) -> None:
        """Until the simulation ends."""
        with closing(self._pipeline.bus.reader([REQUESTS, WEIGHTS])) as reader:
            reader.start()
            while True:
                for message in reader.read(timeout_s=_LOOK_S):
                    record = message.record
                    if isinstance(record, WeightManifest):
                        self._sha256[record.version] = record.sha256
                    elif isinstance(record, RolloutRequest) and record.purpose is Purpose.TRAIN and record.exact:
                        self._held.append(record)
                ready = [request for request in self._held if request.required_version in self._sha256]
                self._held = [request for request in self._held if request.required_version not in self._sha256]
                for request in ready:
                    self._answer(request)

    def _answer(self, request: RolloutRequest) -> None:
        fate = "works" if self._chance is None else self._chance.choice(["works"] * 6 + ["twice", "silent", "failed", "unrewarded", "half"])
        if fate == "silent":
            return
        places = self._publish(request, fate) if fate != "failed" else []
        self._reply(request, places)
        if fate == "twice":
            self._reply(request, self._publish(request, fate))

    def _publish(self, request: RolloutRequest, fate: str) -> list[Coordinates]:
        self._num_answers += 1
        members: list[Trajectory] = [
            member_of(
                request.seq,
                index,
                attempt=f"{request.correlation}-{self._num_answers}",
                version=request.required_version,
                content=self._num_answers,
                weights_sha256=self._sha256[request.required_version],
            )
            for index in range(GROUP_SIZE)
        ]
        if fate == "half":
            return self._pipeline.write(TRAJECTORIES, *members[:1])
        places = self._pipeline.write(TRAJECTORIES, *members)
        for member, where in zip(members, places, strict=True):
            if fate != "unrewarded":
                reward_for(self._pipeline, member, where)
        return places

    def _reply(self, request: RolloutRequest, places: list[Coordinates]) -> None:
        reply = RolloutReply(
            run_id=request.run_id,
            correlation=request.correlation or "",
            group_id=request.group_id,
            attempt="a",
            worker_id="w",
            outcome=ReplyOutcome.DONE if places else ReplyOutcome.FAILED,
            version=request.required_version,
            weights_sha256=self._sha256[request.required_version],
            where=tuple(places),
            time_ms=1,
        )
        self._pipeline.write_reply(reply, _PARTITION)
