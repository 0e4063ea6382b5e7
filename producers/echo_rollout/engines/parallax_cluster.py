"""A Parallax cluster over HTTP: its router or scheduler, whether it is ready, and when its weights last changed.

    router      POST /v1/chat/completions, /weight/refit (to all schedulers; 207: not all took it), GET /endpoints
    scheduler   POST the same, GET /cluster/status_json, /weight/refit/timestamp (the oldest among its nodes; 0: never)

A refit is asked for once and arrives at the nodes with their next heartbeats. The time stamp says that every node has fetched it. Nothing
tells whether a node computes with it, or which node computed an answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from echo_rollout.engines.engine import EngineError
from echo_rollout.engines.openai_client import ServerClient, ServerRefused, ServerUnreachable
from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

_STATUS, _STAMP, _REFIT = "/cluster/status_json", "/weight/refit/timestamp", "/weight/refit"
_LOOK_EVERY_S = 1.0
_AVAILABLE = "available"


class Cluster:
    """One router or scheduler, and all schedulers behind it. `close` it. Used on one asyncio loop."""

    def __init__(self, front: ServerClient, open_client: Callable[[str], ServerClient]) -> None:
        """`front`: of the address that was given; `open_client`: of a scheduler that a router names."""
        self.front = front
        self._open_client = open_client
        self._schedulers: list[ServerClient] = []

    async def find(self) -> None:
        """Ask a router for its schedulers. Raises EngineError, and UserError for a router that has none."""
        try:
            answer = await self.front.get("/endpoints")
        except ServerRefused as exc:
            if exc.status not in {404, 405}:
                raise
            answer = None
        listed = answer.get("endpoints") if isinstance(answer, dict) else None
        if not isinstance(listed, list):
            self._schedulers = [self.front]
            return
        urls = [str(each["base_url"]) for each in listed if isinstance(each, dict) and each.get("base_url") and each.get("enabled", True)]
        if not urls:
            raise UserError(f"The router at {self.front.url} has no scheduler.", hint="POST /register {base_url} to it first.")
        self._schedulers = [self._open_client(url.rstrip("/")) for url in urls]

    async def wait_until_available(self, timeout_s: float) -> tuple[str, int]:
        """The model's name, and how many requests the cluster takes at once (0: it does not say). Raises UserError after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            states = [await self._state(scheduler) for scheduler in self._schedulers]
            if all(state.get("status") == _AVAILABLE for state in states):
                return str(states[0].get("model_name") or ""), sum(int(state.get("max_running_request") or 0) for state in states)
            if loop.time() > deadline_s:
                raise UserError(
                    f"The cluster is not ready after {timeout_s:g} s. {await self.told()}",
                    hint="Start nodes (`parallax join`), or raise start_timeout_s in [rollout.options].",
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def stamps(self) -> tuple[float, ...]:
        """When each scheduler's nodes were last refitted, as far as all of them were. Raises EngineError."""
        return tuple(await asyncio.gather(*(self._stamp(scheduler) for scheduler in self._schedulers)))

    async def refit(self, request: Mapping[str, Any], timeout_s: float) -> None:
        """Ask for new weights, and wait until every scheduler says that its nodes have them. Raises EngineError; then it is unknown which
        nodes have them."""
        answer = await self.front.post(_REFIT, request)
        results = answer.get("results", []) if isinstance(answer, dict) else []
        failed = [each for each in results if isinstance(each, dict) and each.get("ok") is not True]
        if failed:
            names = ", ".join(str(each.get("base_url")) for each in failed)
            raise EngineError(
                f"Version {request['version']} reached {len(results) - len(failed)} of {len(results)} schedulers, not {names}."
            )
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while min(stamps := await self.stamps()) < request["time_stamp"]:
            if loop.time() > deadline_s:
                raise EngineError(
                    f"Not all nodes have version {request['version']} after {timeout_s:g} s: the cluster's time stamps are "
                    f"{', '.join(map(str, stamps))}, and {request['time_stamp']} was asked for. {await self.told()}"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def told(self) -> str:
        """A sentence on each scheduler, for a message; never fails."""
        told = []
        for scheduler in self._schedulers:
            try:
                state = await self._state(scheduler)
            except EngineError:
                told.append(f"The scheduler at {scheduler.url} does not say how its nodes are.")
                continue
            nodes = [node for node in state.get("node_list") or [] if isinstance(node, dict)]
            ready = sum(node.get("status") == _AVAILABLE for node in nodes)
            told.append(f"The scheduler at {scheduler.url} is {state.get('status')} with {ready} of {len(nodes)} nodes ready.")
        return " ".join(told)

    async def close(self) -> None:
        """Close all connections."""
        for client in {self.front, *self._schedulers}:
            await client.close()

    async def _state(self, scheduler: ServerClient) -> dict[str, Any]:
        answer = await scheduler.get(_STATUS)
        state = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(state, dict):
            raise ServerUnreachable(f"{scheduler.url}{_STATUS} does not answer as a Parallax scheduler does.")
        return state

    async def _stamp(self, scheduler: ServerClient) -> float:
        answer = await scheduler.get(_STAMP)
        stamp = answer.get("latest_timestamp") if isinstance(answer, dict) else None
        if not isinstance(stamp, int | float):
            raise ServerUnreachable(f"{scheduler.url}{_STAMP} does not say when the weights changed.")
        return float(stamp)
