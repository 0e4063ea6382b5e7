"""`echoswarm view --demo`: three small runs in an in-memory cluster."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_memory import MemoryCluster
from echo_ops.painting import Pieces
from echo_ops.viewer.demo.episodes import Words, kuhn_player, sokoban_player
from echo_ops.viewer.demo.made_run import MadePlan, MadeRun, StoryClock
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import load_topic_specs

DEMO_RUN, _FORK, _POKER = "sokoban", "sokoban-fork", "poker"
DEMO_RUNS = (DEMO_RUN, _FORK, _POKER)
_FORKED_AT = 12
_PARTITIONS = 2
_WAIT_S = 10.0
# The runs follow one another and end shortly before now.
_ENDED_MS, _BETWEEN_MS = 20_000, 30_000


def make_demo() -> tuple[Bus, Pieces]:
    """A bus to the runs `sokoban`, its fork, and `poker` where OpenSpiel is installed; and the texts of their tokens."""
    options, play = sokoban_player()
    plan = MadePlan(options=options)
    fork = MadePlan(options=options, steps=(_FORKED_AT, 24), parent=DEMO_RUN, skill_per_step=0.05)
    runs = [(DEMO_RUN, plan, play), (_FORK, fork, play)]
    try:
        options, play = kuhn_player()
        runs.insert(0, (_POKER, MadePlan(task="kuhn-poker", steps=(0, 8), options=options), play))
        play(0, 1.0, random.Random(0))
    except ModuleNotFoundError:
        runs = [each for each in runs if each[0] != _POKER]
    length_ms = sum(int(1000 * each.step_s) * (each.steps[1] - each.steps[0]) + _BETWEEN_MS for _, each, _ in runs)
    clock = StoryClock(time.time_ns() // 1_000_000 - length_ms - _ENDED_MS)
    bus = bus_in_memory(clock, DEMO_RUN)
    words = Words()
    for name, each, player in runs:
        MadeRun(replace(bus, run_id=name), clock, each, player, words).write()
        assert clock.now_ms is not None, "the story goes on"
        clock.now_ms += _BETWEEN_MS
    clock.now_ms = None
    return bus, words.pieces


def bus_in_memory(clock: Clock, run_id: str) -> Bus:
    """A bus to a new in-memory cluster with all topics."""
    cluster = MemoryCluster(clock)
    topics = [NewTopic(f"demo.{spec.name}", min(spec.partitions, _PARTITIONS), 1) for spec in load_topic_specs()]
    for future in cluster.admin().create_topics(topics).values():
        future.result(_WAIT_S)
    return Bus(
        cluster=cluster,
        namespace=Namespace("demo"),
        clock=clock,
        role="operator",
        run_id=run_id,
    )
