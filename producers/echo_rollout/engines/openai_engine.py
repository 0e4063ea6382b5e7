"""Any OpenAI-compatible server that takes and returns token ids: vLLM's, started by the user or by the worker. Imports httpx.

    generate ─▶ a place among `requests` ─▶ POST, checked ─▶ generations under the version whose name was asked for
    install  ─▶ adapter: loaded under a fresh name while generations run; full weights: nothing runs, all are reloaded and compared

Threads: everything runs on the asyncio loop; files are copied on threads. Every version has a name of its own at the server, and every
answer names the version that made it: that proves it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from echo_rollout.engines.adapters import Adapter
from echo_rollout.engines.engine import EngineCapabilities, EngineConfig, EngineError, Generation, Snapshot, SnapshotRejected, Switch
from echo_rollout.engines.fitting import base_shapes, check_fit
from echo_rollout.engines.logprob_traits import LogprobTraits
from echo_rollout.engines.openai_answers import SentRequest, UnusableAnswers, check_stops, generations_of, read_choices, request_body
from echo_rollout.engines.openai_client import ServerClient, ServerRefused, ServerUnreachable
from echo_rollout.engines.openai_options import parse_options
from echo_rollout.engines.openai_probe import ServerTraits, look_at_server
from echo_rollout.engines.openai_server import EXECUTOR, IN_ENGINE, ServerProcess, has_token_route
from echo_rollout.engines.serving import LoopEngine
from echo_rollout.engines.vllm_arguments import batch_decoder, engine_arguments, has_gpu
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobSource, Sampling, WeightKind
from echo_tasks.prompts import vocabulary_size

logger = logging.getLogger(__name__)

_READY_EVERY_S = 0.25
_FAREWELL_S = 5.0


class OpenAIEngine(LoopEngine):
    """See `Engine`. `transport`: instead of the network, for tests."""

    def __init__(self, config: EngineConfig, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises UserError for wrong options."""
        super().__init__(config)
        self._options, arguments = parse_options(config.options)
        self._transport = transport
        self._server = None if self._options.url else _own_server(config, arguments)
        self._traits: ServerTraits | None = None
        self._client: ServerClient | None = None
        self._places = asyncio.Semaphore(self._options.requests)
        self._names: dict[int, str] = {}
        self._copies: dict[str, Path] = {}
        self._numbers = itertools.count(1)
        self._prefix = f"echo-{uuid.uuid4().hex[:8]}"
        self._label: str | None = None
        self._unusable = UnusableAnswers()
        self._farewells: set[asyncio.Task[None]] = set()

    @property
    def capabilities(self) -> EngineCapabilities:
        """LoRA as the server has it; log-probabilities and proof as found at the start."""
        told = LogprobTraits(usable=True) if self._traits is None else self._traits.logprobs
        switch = Switch.KEEPS if self._config.kind is WeightKind.LORA else Switch.DRAINS
        return told.capabilities(self._config, "openai", switch, proves_version=not self._options.is_external)

    async def start(self) -> None:
        """Start the server if it is ours, wait until it answers, and find out what it can do."""
        config = self._config
        self._base = base_shapes(config.base)
        self._vocabulary = vocabulary_size(config.base)
        if self._server is not None:
            await asyncio.to_thread(self._server.start)
        self._client = ServerClient(
            self._options.url.rstrip("/") if self._server is None else self._server.url,
            self._options,
            key=self._options.api_key() if self._server is None else self._server.key,
            has_ended=lambda: "" if self._server is None else self._server.ended(),
            transport=self._transport,
        )
        if self._server is not None:
            await self._wait_until_it_answers(self._server)
        self._traits = await look_at_server(self._client, self._options, config, vocabulary=self._vocabulary)
        self._decode = await asyncio.to_thread(batch_decoder, config.base)
        logger.info("The server at %s generates by %s", self._client.url, self._traits.dialect.value)

    async def install(self, snapshot: Snapshot) -> None:
        """An adapter while generations run; full weights when none does; a version that others load is only noted."""
        client, _ = self._opened()
        self._check_kind(snapshot)
        async with self._installing:
            is_lora = snapshot.kind is WeightKind.LORA
            check_fit(snapshot, self._base, max_rank=self._config.lora_rank if is_lora else 0)
            if self._options.is_external:
                self.installed = snapshot.ref
            elif is_lora:
                await self._install_adapter(client, snapshot)
            else:
                async with self._gate.drained():
                    await self._install_weights(client, snapshot)

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Ask the server. Cancelled, the connection closes, and the server drops the request. Raises AnswerUnusable too."""
        _, traits = self._opened()
        check_stops(traits.dialect, sampling)
        self._check_prompt(prompt, sampling)
        return await self._under_way(self._generate(prompt, n, sampling))

    async def close(self) -> None:
        """Unload what this worker loaded, and end the server if it is ours."""
        if not self._end_all():
            return
        if self._client is not None:
            if self._server is None:
                self._unload(list(self._names))
            if self._farewells:
                await asyncio.wait(set(self._farewells), timeout=_FAREWELL_S)
            for farewell in list(self._farewells):
                farewell.cancel()
            await self._client.close()
        if self._server is not None:
            await self._server.close()

    def _opened(self) -> tuple[ServerClient, ServerTraits]:
        self._check_open()
        if self._client is None or self._traits is None:
            raise EngineError("The engine was not started.")
        return self._client, self._traits

    async def _wait_until_it_answers(self, server: ServerProcess) -> None:
        deadline_s = asyncio.get_running_loop().time() + self._options.start_timeout_s
        async with httpx.AsyncClient(trust_env=False) as http:
            while True:
                if ended := server.ended():
                    raise UserError(ended, hint="See [rollout.options] and [policy].")
                try:
                    if (await http.get(f"{server.url}/health")).status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    logger.debug("vLLM's server does not listen yet")
                if asyncio.get_running_loop().time() > deadline_s:
                    raise UserError(
                        f"vLLM's server does not answer after {self._options.start_timeout_s:g} s.",
                        hint="Raise start_timeout_s in [rollout.options], or look into this worker's log.",
                    )
                await asyncio.sleep(_READY_EVERY_S)

    # Generations

    async def _generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        client, traits = self._opened()
        async with self._places, self._gate.admitted():
            # No await between here and the request: the version read is the version used.
            ref, adapter = self.installed, self._adapters.take()
            try:
                if ref is None:
                    raise EngineError("No version is installed yet.")
                asked = SentRequest(
                    prompt=prompt,
                    # At temperature 0 all members of a group are the same, and vLLM takes only n = 1.
                    num_choices=1 if sampling.temperature == 0 else n,
                    sampling=sampling,
                    model=traits.model if adapter is None else adapter.request,
                    label=self._label,
                    logprobs=self.capabilities.source_at(sampling.temperature) is LogprobSource.SAMPLER,
                )
                answer = await client.post(traits.dialect, request_body(traits.dialect, asked))
                choices = self._unusable.counted(lambda: read_choices(traits.dialect, asked, answer))
            finally:
                if adapter is not None:
                    self._unload(self._adapters.give_back(adapter.number))
        found = generations_of(choices, self._decode([choice.tokens for choice in choices]), sampling, ref, traits.logprobs.distribution)
        return found * n if sampling.temperature == 0 else found

    # Versions

    async def _install_adapter(self, client: ServerClient, snapshot: Snapshot) -> None:
        """Load an adapter under a fresh name, also at each retry: a server may serve a known name from its cache."""
        for attempt in range(self._options.retries + 1):
            number = next(self._numbers)
            name = f"{self._prefix}-v{snapshot.ref.version}-{number}"
            path = await self._path_for_server(snapshot, name)
            try:
                await client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, is_repeatable=False)
                await _check_listed(client, name, path)
                break
            except (ServerRefused, SnapshotRejected) as exc:
                self._remove_copy(name)
                raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc.message}") from exc
            except ServerUnreachable as exc:
                self._remove_copy(name)
                if attempt == self._options.retries or (self._server is not None and self._server.ended()):
                    raise
                logger.warning("%s It is loaded again.", exc.message)
        self._names[number] = name
        unused = self._adapters.put(Adapter(snapshot.ref, number, name))
        self.installed = snapshot.ref
        self._unload(unused)

    async def _path_for_server(self, snapshot: Snapshot, name: str) -> str:
        """Where the server finds the snapshot's files; they are copied if it does not see this worker's."""
        if not self._options.adapter_folder:
            return str(snapshot.folder)
        copy = Path(self._options.adapter_folder).expanduser() / name
        await asyncio.to_thread(shutil.copytree, snapshot.folder, copy)
        self._copies[name] = copy
        return f"{self._options.server_folder.rstrip('/')}/{name}" if self._options.server_folder else str(copy)

    async def _install_weights(self, client: ServerClient, snapshot: Snapshot) -> None:
        try:
            await _reload(client, snapshot.folder)
        except (ServerRefused, SnapshotRejected) as exc:
            # The model may be half new.
            await _reload(client, self._folder)
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc.message}") from exc
        self._label = f"{snapshot.ref.version}-{snapshot.ref.sha256[:12]}"
        await client.post("/update_weight_version", {"new_version": self._label})
        self._folder = snapshot.folder
        self.installed = snapshot.ref

    def _unload(self, numbers: list[int]) -> None:
        """Unload adapters that no generation uses, in the background."""
        for number in numbers:
            name = self._names.pop(number, None)
            if name is not None:
                task = asyncio.ensure_future(self._unload_name(name))
                self._farewells.add(task)
                task.add_done_callback(self._farewells.discard)

    async def _unload_name(self, name: str) -> None:
        assert self._client is not None, "the client has loaded it"
        try:
            await self._client.post("/v1/unload_lora_adapter", {"lora_name": name}, is_repeatable=False)
        except (ServerRefused, ServerUnreachable) as exc:
            # It costs the server some memory, and harms no version: no name is used again.
            logger.warning("The adapter %s is not unloaded: %s", name, exc.message)
        finally:
            self._remove_copy(name)

    def _remove_copy(self, name: str) -> None:
        copy = self._copies.pop(name, None)
        if copy is not None:
            shutil.rmtree(copy, ignore_errors=True)


async def _check_listed(client: ServerClient, name: str, path: str) -> None:
    """Raise SnapshotRejected unless the server lists the adapter, loaded from `path`."""
    listed = await client.get("/v1/models")
    card = next((card for card in listed.get("data", []) if card.get("id") == name), None)
    if card is None:
        raise SnapshotRejected(f"the server says that it has loaded {name}, and does not list it.")
    if card.get("root") not in {None, path}:
        raise SnapshotRejected(f"the server lists {name} from {card.get('root')}, and was asked to load {path}.")


async def _reload(client: ServerClient, folder: Path) -> None:
    """All weights, looked at after loading. Raises SnapshotRejected, ServerRefused."""
    answer = await client.post("/collective_rpc", {"method": "echo_reload", "args": [str(folder)]}, is_repeatable=False)
    complaints = {str(result) for result in answer.get("results", ["it says nothing"])} - {""}
    if complaints:
        raise SnapshotRejected(f"After loading, {min(complaints)}.")


def _own_server(config: EngineConfig, arguments: dict[str, Any]) -> ServerProcess:
    """vLLM's server with the arguments of the engine `vllm`, and the user's over them."""
    defaults: dict[str, Any] = {"enable_scale_out": True} if has_token_route() else {}
    if not has_gpu():
        defaults[EXECUTOR] = IN_ENGINE
    return ServerProcess(defaults | engine_arguments(replace(config, options=arguments)), config.kind)
