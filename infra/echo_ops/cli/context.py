"""What most commands need first: settings, cluster, namespace."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_runtime.opening import open_bus, open_cluster
from echo_settings import Settings, load_settings

DEFAULT_CONFIG = Path("run.toml")
_REACH_S = 10.0


def read_settings(config: Path | None) -> Settings:
    """The settings of `--config`, of run.toml if it is there, or the defaults; the environment on top."""
    return load_settings(config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None), os.environ)


def reach_cluster(settings: Settings, role: str = "operator") -> KafkaCluster:
    """The cluster under the login of `role`, known to answer. Raises ClusterUnreachable, NotAuthorized or UserError."""
    cluster = open_cluster(settings, role)
    cluster.check(_REACH_S)
    return cluster


def reach_bus(settings: Settings, role: str = "operator", *, all_runs: bool = False) -> Bus:
    """The bus of `role`, its cluster known to answer."""
    reach_cluster(settings, role)
    bus = open_bus(settings, role)
    return replace(bus, run_id=None) if all_runs else bus
