"""vLLM's own server as a child of the worker, on loopback, with a key that only the two know. Ended by its pid, and with the worker.

Its processes are a process group: a guard outside the worker kills the group if the worker is killed before it could end it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from echo_embedded.guard import Guard
from echo_embedded.ports import free_ports
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
EXECUTOR, IN_ENGINE = "distributed_executor_backend", "uni"
"""The argument by which the model runs in the engine's own process: one import of vLLM less, which on a CPU is a third of the start."""
# The console script asks for a distribution named `vllm`, which the one for CPUs is not.
_MODULE = "vllm.entrypoints.openai.api_server"
_END_S = 15.0


class ServerProcess:
    """The child. `start` it once, `close` it always. One thread uses it."""

    def __init__(self, arguments: Mapping[str, Any], kind: WeightKind) -> None:
        """`arguments`: of vLLM's EngineArgs and of its server, by their names. `kind`: which weights are loaded while it runs."""
        self._arguments = dict(arguments)
        self._kind = kind
        self.key = secrets.token_urlsafe(24)
        """The API key that the server demands."""
        self._port = 0
        self._popen: subprocess.Popen[bytes] | None = None
        self._guard: Guard | None = None

    @property
    def url(self) -> str:
        """Where it listens, once it is started."""
        return f"http://{HOST}:{self._port}"

    def start(self) -> None:
        """Start it; it listens some seconds to minutes later."""
        (self._port,) = free_ports(1)
        self._guard = Guard()
        command = [sys.executable, "-W", "ignore::DeprecationWarning", "-m", _MODULE, *command_line(self._arguments, port=self._port)]
        self._popen = subprocess.Popen(command, env=server_environment(self._arguments, self._kind, self.key), process_group=0)
        # Its group, which vLLM's own processes belong to.
        self._guard.protect(-self._popen.pid)
        logger.info("vLLM's server starts as process %d on %s", self._popen.pid, self.url)

    def ended(self) -> str:
        """A sentence if the process has ended; else empty."""
        code = None if self._popen is None else self._popen.poll()
        return "" if code is None else f"vLLM's server has ended with exit code {code}; its last words are in this worker's log."

    async def close(self) -> None:
        """Terminate it, after some seconds kill it, and kill everything that it started. Idempotent."""
        popen, guard = self._popen, self._guard
        if popen is None or guard is None:
            return
        self._guard = None
        if popen.poll() is None:
            popen.terminate()
            try:
                await asyncio.to_thread(popen.wait, _END_S)
            except subprocess.TimeoutExpired:
                logger.warning("vLLM's server (process %d) does not end and is killed", popen.pid)
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        await asyncio.to_thread(popen.wait)
        guard.release(-popen.pid)
        await asyncio.to_thread(guard.close)


def command_line(arguments: Mapping[str, Any], *, port: int) -> list[str]:
    """`--max-num-seqs 64 --enforce-eager --no-enable-prefix-caching …`. Raises UserError for a value that no flag can carry."""
    line = ["--host", HOST, "--port", str(port)]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif value is False:
            line.append(flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            line += [flag, json.dumps(value)]
        elif isinstance(value, list | tuple):
            line += [flag, *map(str, value)]
        elif isinstance(value, str | int | float):
            line += [flag, str(value)]
        else:
            raise UserError(f"[rollout.options] {name} is {value!r}, which no flag of vLLM can carry.")
    return line


def server_environment(arguments: Mapping[str, Any], kind: WeightKind, key: str) -> dict[str, str]:
    """This process's environment with what vLLM's server reads from it."""
    # On a CPU vLLM needs this variable beside the argument to run its worker in the engine's process.
    is_in_engine = arguments.get(EXECUTOR) == IN_ENGINE
    environment = {**os.environ, "VLLM_API_KEY": key, "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if is_in_engine else "1"}
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Switches on the routes that load weights, and no others.
    environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING" if kind is WeightKind.LORA else "VLLM_SERVER_DEV_MODE"] = "1"
    return environment


def has_token_route() -> bool:
    """Whether the vLLM that is installed has /inference/v1/generate and its flag. Reads the file system: importing vLLM takes seconds."""
    spec = importlib.util.find_spec("vllm")
    places = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    return any((Path(place) / "entrypoints" / "scale_out").is_dir() for place in places)
