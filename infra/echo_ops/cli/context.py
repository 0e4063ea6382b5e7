"""What most commands need first: settings, cluster, bus."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_runtime.opening import open_bus, open_cluster
from echo_settings import Settings, load_settings

_DEFAULT_CONFIG = Path("run.toml")
_REACH_S = 10.0


def config_file(config: Path | None) -> Path | None:
    """The file of `--config`, else run.toml if it is there."""
    return config or (_DEFAULT_CONFIG if _DEFAULT_CONFIG.exists() else None)


def read_settings(config: Path | None) -> Settings:
    """The settings of `config_file(config)`, or the defaults; the environment overrides both."""
    return load_settings(config_file(config), os.environ)


def reach_cluster(settings: Settings, role: str = "operator") -> KafkaCluster:
    """The cluster under the login of `role`, after it has answered. Raises ClusterUnreachable, NotAuthorized or UserError."""
    cluster = open_cluster(settings, role)
    cluster.check(_REACH_S)
    return cluster


def reach_bus(settings: Settings, role: str = "operator", *, all_runs: bool = False) -> Bus:
    """The bus of `role`, after its cluster has answered."""
    reach_cluster(settings, role)
    bus = open_bus(settings, role)
    return replace(bus, run_id=None) if all_runs else bus
