"""The engine `parallax` against a scheduler of our own on loopback, whose one node computes with a real vLLM server."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch

from echo_rollout.engines.engine import EngineConfig, Snapshot
from echo_rollout.engines.openai_server import ServerProcess
from echo_rollout.engines.parallax_answers import ChatDialect
from echo_rollout.engines.parallax_engine import ParallaxEngine
from tests.unit.engines.fake_cluster import Blocks, Scheduler


class VllmNode:
    """Loads what the scheduler's node has fetched into the server, and asks it."""

    def __init__(self, scheduler: Scheduler, server: ServerProcess, folder: Path, adapter_config: Path) -> None:
        self._node = scheduler.nodes[0]
        self._folder = folder
        # As on a node of Parallax, it does not come with the weights.
        self._adapter_config = adapter_config
        self._loading = asyncio.Lock()
        self._loaded = ""
        self.http = httpx.AsyncClient(
            base_url=server.url, headers={"Authorization": f"Bearer {server.key}"}, trust_env=False, timeout=120.0
        )

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """The server's answer, from the base until there was a refit."""
        async with self._loading:
            await self._load()
        models = (await self.http.get("/v1/models")).json()["data"]
        answer = await self.http.post("/v1/chat/completions", json={**body, "model": self._loaded or models[0]["id"]})
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    async def _load(self) -> None:
        name = f"node-{self._node.stamp}" if self._node.stamp else ""
        if name == self._loaded:
            return
        folder = self._folder / name
        folder.mkdir(parents=True)
        shutil.copy(self._adapter_config, folder)
        tensors: dict[str, Any] = {}
        for block in set(self._node.weights.values()):
            tensors |= safetensors.torch.load(block)
        assert set(tensors) == set(self._node.weights), "the blocks hold what the index says"
        safetensors.torch.save_file(tensors, str(folder / "adapter_model.safetensors"))
        if self._loaded:
            await self.http.post("/v1/unload_lora_adapter", json={"lora_name": self._loaded})
        (await self.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})).raise_for_status()
        self._loaded = name


@asynccontextmanager
async def on_loopback(scheduler: Scheduler) -> AsyncIterator[str]:
    """The address at which `scheduler` answers; it does so on this loop."""
    loop = asyncio.get_running_loop()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
            response = asyncio.run_coroutine_threadsafe(scheduler.answer(self.command, self.path, body), loop).result(120)
            self.send_response(response.status_code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        await asyncio.to_thread(server.shutdown)
        thread.join()
        server.server_close()


@asynccontextmanager
async def started_cluster_engine(
    server: ServerProcess, config: EngineConfig, first: Snapshot, folder: Path
) -> AsyncIterator[ParallaxEngine]:
    """The engine, started at a scheduler before `server`. `first`: a version, whose adapter_config.json the node has."""
    scheduler = Scheduler(Blocks(), ChatDialect.OPENAI, num_nodes=1)
    node = VllmNode(scheduler, server, folder, first.folder / "adapter_config.json")
    scheduler.generate = node.generate
    async with on_loopback(scheduler) as url, node.http:
        options: dict[str, object] = {"url": url, "peers": ["/ip4/127.0.0.1/tcp/1/p2p/none"]}
        engine = ParallaxEngine(replace(config, options=options), open_store=lambda _: scheduler.blocks)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()
