"""A vLLM server in memory: the routes that the engine uses, and a switch for everything that a server can do wrong.

It draws token 2 + (sum of prompt + version's place + index) % 10, each with a log-probability that follows the temperature.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from echo_rollout.engines.engine import EngineConfig
from echo_rollout.engines.openai_engine import OpenAIEngine
from echo_schemas.records import WeightKind
from tests.unit.engines.weights import BASE, RANK, write_tensors

URL = "http://server.test:8000"
MAX_LENGTH = 64
VOCABULARY = 32
KEY = "s3cret-key"
Change = Callable[[dict[str, Any]], object]


class FakeServer:
    """Answers requests. Set what it is to do wrong; look at what it was asked."""

    def __init__(self) -> None:
        self.has_token_route = True
        self.has_load_route = True
        self.has_rpc_route = True
        self.is_processed = True
        self.is_whole = False
        self.gives_logprobs = True
        self.gives_token_ids = True
        self.key = ""
        self.base = "base"
        self.max_model_len = MAX_LENGTH
        self.adapters: dict[str, str] = {}
        self.unloaded: list[str] = []
        self.reload_complaint = ""
        self.label = "default"
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.change: Change = lambda answer: None
        self.failures: list[httpx.Response | Exception] = []
        self.most_at_once = 0
        self.held: asyncio.Event | None = None
        self.started = asyncio.Event()
        self._running = 0

    @property
    def transport(self) -> httpx.MockTransport:
        """In place of the network."""
        return httpx.MockTransport(self._answer)

    def asked(self, path: str) -> list[dict[str, Any]]:
        """The bodies of the requests of one route."""
        return [body for asked, body in self.requests if asked == path]

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content or b"{}")
        self.requests.append((path, body))
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        generates = path in {"/inference/v1/generate", "/v1/completions"}
        if generates and self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        if not generates:
            return self._administer(path, body)
        if path == "/inference/v1/generate" and not self.has_token_route:
            return httpx.Response(403, json={"error": {"message": "disabled"}})
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        self.started.set()
        try:
            if self.held is not None:
                await self.held.wait()
            else:
                await asyncio.sleep(0)
            return self._generate(path, body)
        finally:
            self._running -= 1

    def _administer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if path == "/v1/models":
            cards: list[dict[str, Any]] = [{"id": self.base, "parent": None, "max_model_len": self.max_model_len}]
            cards += [{"id": name, "parent": self.base, "root": root} for name, root in self.adapters.items()]
            return httpx.Response(200, json={"data": cards})
        if path == "/v1/load_lora_adapter" and self.has_load_route:
            name = body["lora_name"]
            if not name or name in self.adapters:
                return httpx.Response(400, json={"error": {"message": "no fresh name"}})
            if not Path(body["lora_path"]).is_dir():
                return httpx.Response(404, json={"error": {"message": "No adapter found"}})
            self.adapters[name] = body["lora_path"]
            return httpx.Response(200, text="Success")
        if path == "/v1/unload_lora_adapter" and self.has_load_route:
            del self.adapters[body["lora_name"]]
            self.unloaded.append(body["lora_name"])
            return httpx.Response(200, text="Success")
        if path == "/collective_rpc" and self.has_rpc_route:
            return httpx.Response(200, json={"results": ["ok" if body["method"] == "echo_check" else self.reload_complaint]})
        if path == "/update_weight_version":
            self.label = body["new_version"]
            return httpx.Response(200, json={})
        return httpx.Response(404, json={"detail": "Not Found"})

    def _generate(self, path: str, body: dict[str, Any]) -> httpx.Response:
        is_token_route = path == "/inference/v1/generate"
        drawn = body["sampling_params"] if is_token_route else body
        prompt = body["token_ids"] if is_token_route else body["prompt"]
        if body["model"] not in {self.base, *self.adapters}:
            return httpx.Response(404, json={"error": {"message": f"The model `{body['model']}` does not exist."}})
        if drawn["temperature"] == 0 and drawn.get("n", 1) > 1:
            return httpx.Response(400, json={"error": {"message": "n must be 1 when using greedy sampling."}})
        place = [self.base, *self.adapters].index(body["model"])
        choices = [self._choice(is_token_route, prompt, drawn, place, index) for index in range(drawn.get("n", 1))]
        answer = {"model": body["model"], "choices": choices}
        self.change(answer)
        # With NaN where a change put one: some servers write it.
        return httpx.Response(200, headers={"content-type": "application/json"}, content=json.dumps(answer))

    def _choice(self, is_token_route: bool, prompt: list[int], drawn: dict[str, Any], place: int, index: int) -> dict[str, Any]:
        token = 2 + (sum(prompt) + place + index) % 10
        tokens = [token] * min(3, drawn["max_tokens"])
        heat = drawn["temperature"] or 1.0
        # The only token that is left has the probability 1, where the server says what it draws from.
        is_sure = drawn.get("top_k") == 1 and self.is_processed and not self.is_whole
        logprob = 0.0 if is_sure else -0.5 / (heat if self.is_processed else 1.0)
        choice: dict[str, Any] = {"index": index, "finish_reason": "length" if len(tokens) == drawn["max_tokens"] else "stop"}
        if self.gives_token_ids:
            choice["token_ids"] = tokens
        if not self.gives_logprobs or drawn.get("logprobs") is None:
            return choice
        if is_token_route:
            choice["weight_versions"] = [{"version": self.label, "start": 0, "end": len(tokens)}]
            choice["logprobs"] = {"content": [{"token_id": each, "logprob": logprob} for each in tokens]}
        else:
            top = {f"token_id:{number}": logprob * (1 + number) for number in range(drawn["logprobs"])}
            choice["logprobs"] = {
                "tokens": [f"token_id:{each}" for each in tokens],
                "token_logprobs": [logprob] * len(tokens),
                "top_logprobs": [top] * len(tokens),
            }
        return choice


def write_base(folder: Path) -> Path:
    """A base model of headers only."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    write_tensors(folder / "model.safetensors", BASE)
    return folder


def open_engine_at(server: FakeServer, base: Path, *, kind: WeightKind = WeightKind.LORA, **options: object) -> OpenAIEngine:
    """An engine for the server, not started."""
    config = EngineConfig(
        base=base, kind=kind, dtype="float32", max_length=MAX_LENGTH, lora_rank=RANK, concurrency=64,
        options={"url": URL, "retries": 1, **options},
    )  # fmt: skip
    return OpenAIEngine(config, transport=server.transport)
