"""The order of a rescore, and the record that it makes of a judgement."""

from __future__ import annotations

from dataclasses import dataclass

from echo_replay.rescoring import RESCORE
from echo_schemas.records import Coordinates, Reward
from echo_streams.intake import Identity
from echo_streams.scoring import Judgement


@dataclass(frozen=True, slots=True, kw_only=True)
class RescoreOrder:
    """Fields of the written records: `name`, `code_version` of the function, `application`. `compared`: the reward to compare with; empty:
    none."""

    run_id: str
    name: str
    code_version: str
    application: str = RESCORE
    compared: str = ""

    def record(self, identity: Identity, where: Coordinates, judgement: Judgement, time_ms: int) -> Reward:
        """The record of a judgement of the trajectory at `where`."""
        return judgement.reward(
            identity, where, time_ms, run_id=self.run_id, name=self.name, code_version=self.code_version, application=self.application
        )
