"""Schedules follow from their seed, leave nothing out, and are told as they went."""

from __future__ import annotations

import random

from tests.chaos.faults import ROLES, Fault, Kind, draw
from tests.chaos.schedule import Outcome, table
from tests.chaos.swarm import Exit

ROUND = len(Kind) + 2 * (len(ROLES) - 1) + 2


def test_the_seed_decides() -> None:
    def drawn(seed: int) -> list[Fault]:
        return draw(random.Random(seed), 40, longest_s=60.0, without={})

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_a_round_has_every_kind_and_every_role_killed_and_frozen() -> None:
    faults = draw(random.Random(3), ROUND, longest_s=5.0, without={})
    assert {fault.kind for fault in faults} == set(Kind)
    for kind in (Kind.KILL, Kind.FREEZE):
        assert {fault.target for fault in faults if fault.kind is kind} == set(ROLES)
    assert all(1.0 <= fault.seconds <= 5.0 for fault in faults if fault.kind is Kind.FREEZE)


def test_what_the_machine_does_not_allow_is_not_drawn() -> None:
    faults = draw(random.Random(3), 3 * ROUND, longest_s=5.0, without={"network": "no root", "disk": "no root"})
    assert not {fault.kind for fault in faults} & {Kind.PARTITION, Kind.DISK_FULL}
    assert Kind.SILENCE in {fault.kind for fault in faults}


def test_the_table_has_a_row_for_each_fault_brokers_being_alike() -> None:
    died = Exit("learner", 1, ("no space",))
    lines = table(
        [
            Outcome(fault=Fault(Kind.BROKER_KILL, "0", 2.0), stall_s=2.0, recovery_s=0.5, exits=()),
            Outcome(fault=Fault(Kind.BROKER_KILL, "2", 2.0), stall_s=3.0, recovery_s=1.5, exits=(died,)),
            Outcome(fault=Fault(Kind.KILL, "feeder"), stall_s=1.0, recovery_s=0.1, exits=()),
        ]
    )
    assert lines[2:] == [
        "| broker: kill -9, started again | 2 | 1.0 | 1.5 | 3.0 | 1 |",
        "| kill -9: feeder | 1 | 0.1 | 0.1 | 1.0 | 0 |",
    ]
