"""An example file as a run at toy size: feeder, worker and reward application as processes on a real Kafka, the test as their learner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.records import Coordinates, Reward, Trajectory
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_settings import Settings, load_settings
from echo_tasks.catalogue import load_task
from echo_tasks.prompts import PromptCodec
from tests.contract.conftest import create_topics
from tests.integration.tasks.chat_model import VOCABULARY, write_tokenizer
from tests.integration.tasks.oracle import TABLE_VARIABLE
from tests.unit.rollout.swarm import RUN, Swarm

ROOT = Path(__file__).parents[3]
NUM_PARTITIONS = 4
GROUPS_PER_STEP = 2
# A budget of three steps and the one under way, and as many again.
NUM_PROMPTS = 32
# Three processes import what they need, and a scoring process reasoning-gym or math-verify, on whatever the machine has left.
WAIT_S = 400.0


class ExampleRun:
    """One example, whose prompts are answered by `answers`: the completions of a group from seq and entry."""

    def __init__(self, example: str, bootstrap: str, namespace: Namespace, folder: Path, answers: Callable[[int, Any], list[str]]) -> None:
        self._folder = folder
        base = write_tokenizer(folder / "base")
        (base / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}), encoding="utf-8")
        self._config = ROOT / "examples" / f"{example}.toml"
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("ECHO_")} | {
            "ECHO_RUN__NAME": RUN,
            "ECHO_KAFKA__BOOTSTRAP": bootstrap,
            "ECHO_KAFKA__NAMESPACE": namespace.name,
            "ECHO_POLICY__BASE": str(base),
            "ECHO_ROLLOUT__ENGINE": "tests.integration.tasks.oracle:OracleEngine",
            "ECHO_ROLLOUT__PROBE_SIZE": "0",
            "ECHO_LEARNER__GROUPS_PER_STEP": str(GROUPS_PER_STEP),
            "ECHO_SCORING__TIMEOUT_S": "200",
            "XDG_CACHE_HOME": str(folder / "cache"),
            # reasoning-gym imports matplotlib, which would look at every font again for an empty cache.
            "MPLCONFIGDIR": str(Path.home() / ".cache" / "matplotlib"),
            TABLE_VARIABLE: str(folder / "table.json"),
        }
        settings = load_settings(self._config, self._environ)
        self._group_size = self._write_table(settings, base, answers)
        self._environ["ECHO_ROLLOUT__GROUP_SIZE"] = str(self._group_size)
        self.bus: Bus = open_bus(settings, "test")
        create_topics(
            self.bus.cluster, {f"{namespace.name}.{spec.name}": min(spec.partitions, NUM_PARTITIONS) for spec in load_topic_specs()}
        )
        self._learner = Swarm(self.bus, folder)
        self._learner.publish_version(0)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def _write_table(self, settings: Settings, base: Path, answers: Callable[[int, Any], list[str]]) -> int:
        task, codec = load_task(settings.task.name, settings.task.options), PromptCodec(base)
        table = {}
        for seq in range(NUM_PROMPTS):
            prompt = task.prompt(settings.run.seed, seq)
            table[codec.render(prompt.messages) if prompt.messages else prompt.text] = answers(seq, prompt.entry)
        (self._folder / "table.json").write_text(json.dumps(table), encoding="utf-8")
        return len(next(iter(table.values())))

    def start(self) -> None:
        """The three roles, from the folder that a user starts the example in."""
        for role in ("reward", "feeder", "worker"):
            command = [sys.executable, "-m", "echo_ops.cli", "run", role, "--config", str(self._config)]
            with (self._folder / f"{role}.log").open("wb") as log:
                self._processes[role] = subprocess.Popen(command, cwd=ROOT, env=self._environ, stdout=log, stderr=log)

    def scored(self, num_groups: int, names: set[str]) -> dict[str, list[dict[int, Reward]]]:
        """By reward name, the rewards of each whole group by index, once `num_groups` have all of them; seq 0 is the first."""
        deadline = Deadline.after(WAIT_S)
        rewards: dict[Coordinates, dict[str, Reward]] = defaultdict(dict)
        reader = self.bus.reader([REWARDS])
        reader.start()
        try:
            while True:
                # A feeder asks for nothing before it hears a learner that lives.
                self._learner.say()
                for message in reader.read(timeout_s=0.2):
                    if isinstance(message.record, Reward):
                        rewards[message.record.of][message.record.name] = message.record
                groups: dict[int, dict[int, dict[str, Reward]]] = defaultdict(dict)
                for found in rewards.values():
                    if found.keys() >= names:
                        one = next(iter(found.values()))
                        groups[one.seq][one.index] = found
                if all(len(groups[seq]) == self._group_size for seq in range(num_groups)):
                    return {
                        name: [{index: made[name] for index, made in groups[seq].items()} for seq in range(num_groups)] for name in names
                    }
                self._check(
                    deadline, f"{num_groups} groups with {sorted(names)}; there are {[len(groups[seq]) for seq in range(num_groups)]}"
                )
        finally:
            reader.close()

    def trajectories(self) -> list[Trajectory]:
        """What lies on the log now."""
        found: list[Trajectory] = self._learner.records(TRAJECTORIES)
        return found

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait(60)
        self._learner.close()

    def _check(self, deadline: Deadline, what: str) -> None:
        logs = {role: (self._folder / f"{role}.log").read_text(encoding="utf-8")[-3_000:] for role in self._processes}
        for role, process in self._processes.items():
            if process.poll() is not None:
                pytest.fail(f"{role} ended with {process.returncode}:\n{logs[role]}")
        if deadline.expired():
            pytest.fail(f"waited for {what}\n" + "\n".join(f"--- {role}\n{log}" for role, log in logs.items()))


def in_tags(answer: str) -> str:
    """A completion as the prompts ask for it."""
    return f"Let us see. <answer>{answer}</answer>"


def roles_in_words(roles: Mapping[str, str]) -> str:
    """Who is what, in a sentence."""
    return ", ".join(f"{name} is a {role}" for name, role in roles.items())
