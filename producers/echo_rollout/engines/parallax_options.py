"""What [rollout.options] say about a Parallax cluster: where it is, how it is asked, and how weights reach it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_rollout.engines.openai_options import SERVER, ServerOptions, parse_options, typed
from echo_rollout.engines.parallax_answers import ChatDialect
from echo_schemas.errors import UserError
from echo_tasks.options import nearest

# A node tries for 20 minutes to get a block; then it says that it has the weights, and goes on with the old ones.
_REFIT_S = 1_100.0
# A cluster that lost a node makes its pipelines anew, which takes longer than a server's pause.
_RETRIES = 8
_OF_SERVER = (
    "url", "api_key_file", "api_key_env", "ca_file", "weights", "requests", "retries", "request_timeout_s", "connect_timeout_s",
    "start_timeout_s",
)  # fmt: skip
_OWN: Mapping[str, type] = {"dialect": str, "peers": list, "listen": str, "refit_timeout_s": float}
NAMES = (*_OF_SERVER, *_OWN)
"""All options of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallaxOptions:
    """How a cluster is used. `server`: as of the engine `openai`, with `url` of its router or scheduler.

    `dialect`: one of ChatDialect; empty: found out. `peers`: Lattica addresses of its nodes, which this worker connects to, so that they
    get blocks of weights from it. `listen`: where it listens for them. `refit_timeout_s`: for all nodes to say that they have a version.
    """

    server: ServerOptions
    dialect: str = ""
    peers: tuple[str, ...] = ()
    listen: str = "/ip4/0.0.0.0/tcp/0"
    refit_timeout_s: float = _REFIT_S


def parse_parallax_options(options: Mapping[str, Any]) -> ParallaxOptions:
    """Raises UserError for wrong options."""
    for name in options:
        if name not in NAMES and name != "api_key":
            raise UserError(f"The engine 'parallax' has no option {name!r}.", hint=nearest(name, NAMES))
    if not options.get("url"):
        raise UserError(f"{SERVER} url is missing.", hint="Write where the cluster's router or scheduler is: http://host:port.")
    own = {name: typed(name, options[name], wanted) for name, wanted in _OWN.items() if name in options}
    server, _ = parse_options({"retries": _RETRIES, **{name: value for name, value in options.items() if name not in _OWN}})
    found = ParallaxOptions(server=server, **(own | {"peers": tuple(map(str, own.get("peers", ())))}))
    if found.dialect and found.dialect not in set(ChatDialect):
        raise UserError(f"{SERVER} dialect is {found.dialect!r}.", hint=f"Write one of {', '.join(ChatDialect)}, or leave it out.")
    if not 0 < found.refit_timeout_s < float("inf"):
        raise UserError(f"{SERVER} refit_timeout_s is {found.refit_timeout_s}.", hint="Write seconds above 0.")
    if not server.is_external and not found.peers:
        raise UserError(
            f"{SERVER} peers is empty, and nodes get weights only from a peer that is connected to them.",
            hint='Write the nodes\' Lattica addresses, "/ip4/…/tcp/…/p2p/…", or weights = "external" if something else refits it.',
        )
    return found
