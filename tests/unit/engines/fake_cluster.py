"""A Parallax cluster in memory, written from what its HTTP interface does: router, schedulers, nodes that fetch blocks of weights.

A node's "computation" depends on the blocks that it holds: it draws token 2 + (sum of prompt + checksum of its weights + seed) % 10.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from echo_rollout.engines.parallax_answers import ChatDialect

MODEL = "Qwen/Tiny"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123"
"""Of the tokens 2 to 31."""
Change = Callable[[dict[str, Any]], object]


class Blocks:
    """What nodes can fetch."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.is_closed = False

    def put(self, block: bytes) -> str:
        # CID version 1, raw bytes, SHA-256 of 32 bytes (multiformats.io).
        digest = bytes([0x01, 0x55, 0x12, 0x20]) + hashlib.sha256(block).digest()
        cid = "b" + base64.b32encode(digest).decode("ascii").lower().rstrip("=")
        self.held[cid] = block
        return cid

    def remove(self, cid: str) -> None:
        del self.held[cid]

    def peer_id(self) -> str:
        return "peer"

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Node:
    """`stamp`: of its last refit. `is_stuck`: it gets no block."""

    name: str
    stamp: float = 0.0
    version: int = 0
    weights: dict[str, bytes] = field(default_factory=dict)
    is_ready: bool = True
    is_stuck: bool = False

    def heartbeat(self, refit: dict[str, Any], blocks: Blocks) -> None:
        """Do a refit that is newer than the last one."""
        if self.is_stuck or not refit or self.stamp >= float(refit["time_stamp"]):
            return
        self.weights = {name: blocks.held[cid] for name, cid in refit["index_map"].items()}
        self.version, self.stamp = int(refit["version"]), float(refit["time_stamp"])

    def checksum(self) -> int:
        """Of the weights that it holds."""
        return int(hashlib.sha256(b"".join(self.weights[name] for name in sorted(self.weights))).hexdigest()[:6], 16)


class Scheduler:
    """Answers as a scheduler does. `heartbeats_late`: how often it is asked for its time stamp before nodes hear of a refit;
    `template_tokens`: of its chat template."""

    def __init__(self, blocks: Blocks, dialect: ChatDialect, *, num_nodes: int = 2) -> None:
        self.blocks = blocks
        self.dialect = dialect
        self.nodes = [Node(f"node-{number}") for number in range(num_nodes)]
        self.most_requests = 8
        self.heartbeats_late = 1
        self.template_tokens = 0
        self.refit: dict[str, Any] = {}
        self.refit_failure: httpx.Response | None = None
        self.change: Change = lambda answer: None
        self.failures: list[httpx.Response | Exception] = []
        self.before_answer: Callable[[], object] = lambda: None
        self.generate: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]] = self._draw
        self.asked: list[dict[str, Any]] = []
        self.most_at_once = self._running = self._late = 0

    async def answer(self, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
        """One request."""
        if path == "/cluster/status_json":
            return httpx.Response(200, json={"type": "cluster_status", "data": self._status()})
        if path == "/weight/refit/timestamp":
            return httpx.Response(200, json={"latest_timestamp": self._stamp()})
        if path == "/weight/refit" and method == "POST":
            if self.refit_failure is not None:
                return self.refit_failure
            self.refit, self._late = body, self.heartbeats_late
            return httpx.Response(200, json={"type": "weight_refit", "data": None})
        if path == "/v1/chat/completions" and method == "POST":
            return await self._complete(body)
        return httpx.Response(404, json={"detail": "Not Found"})

    def _status(self) -> dict[str, Any]:
        is_ready = bool(self.nodes) and all(node.is_ready for node in self.nodes)
        nodes = [{"node_id": node.name, "status": "available" if node.is_ready else "waiting"} for node in self.nodes]
        return {
            "status": "available" if is_ready else "waiting",
            "model_name": MODEL,
            "node_list": nodes,
            "max_running_request": self.most_requests,
        }

    def _stamp(self) -> float:
        if self._late:
            self._late -= 1
        else:
            for node in self.nodes:
                node.heartbeat(self.refit, self.blocks)
        return min((node.stamp for node in self.nodes), default=0.0)

    async def _complete(self, body: dict[str, Any]) -> httpx.Response:
        self.asked.append(body)
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            return failure
        if self._status()["status"] != "available":
            return httpx.Response(503, json={"error": {"message": "Server is not ready", "code": "server_not_ready"}})
        self._running += 1
        self.most_at_once = max(self.most_at_once, self._running)
        try:
            await asyncio.sleep(0)
            # The scheduler's own name for the model, whatever was asked for.
            answer = await self.generate({**body, "model": MODEL})
        finally:
            self._running -= 1
        self.before_answer()
        self.change(answer)
        return httpx.Response(200, json=answer)

    async def _draw(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = body["messages"][0]["content"]
        version = self.nodes[0].version
        token = 2 + (len(prompt) + sum(map(ord, prompt)) + self.nodes[0].checksum() + (body.get("seed") or 0)) % 10
        tokens = [token] * min(3, body["max_tokens"])
        is_cut = len(tokens) == body["max_tokens"]
        if not is_cut:
            tokens = [*tokens, 1]
        logprob = -0.5 / (body["temperature"] or 1.0)
        text = "".join(LETTERS[each - 2] for each in tokens if each > 1)
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "length" if is_cut else "stop",
        }
        answer: dict[str, Any] = {
            "model": MODEL,
            "choices": [choice],
            "usage": {"prompt_tokens": len(prompt) + self.template_tokens, "completion_tokens": len(tokens)},
        }
        if self.dialect is ChatDialect.TEXT and body.get("logprobs"):
            # Parallax's adapter ends such a request.
            choice["finish_reason"] = "error"
        if self.dialect is ChatDialect.OPENAI and body.get("return_token_ids"):
            top = [{"token": f"token_id:{number}", "logprob": logprob * (1 + number)} for number in range(body["top_logprobs"])]
            content = [{"token": f"token_id:{each}", "logprob": logprob, "top_logprobs": top} for each in tokens]
            choice |= {"token_ids": tokens, "logprobs": {"content": content}}
        if self.dialect is ChatDialect.LEGACY:
            answer["weight_version"] = version
            if body.get("return_probs"):
                choice |= {"token_ids": tokens, "probs": [{str(each): 2.718281828459045**logprob} for each in tokens]}
        return answer


class FakeCluster:
    """One scheduler (`http://scheduler-0`), or several behind a router (`http://router`)."""

    def __init__(self, dialect: ChatDialect = ChatDialect.OPENAI, *, num_schedulers: int = 1) -> None:
        self.blocks = Blocks()
        self.schedulers = [Scheduler(self.blocks, dialect) for _ in range(num_schedulers)]
        self._turn = 0

    @property
    def scheduler(self) -> Scheduler:
        """The first."""
        return self.schedulers[0]

    @property
    def transport(self) -> httpx.MockTransport:
        """In place of the network."""
        return httpx.MockTransport(self._answer)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}")
        if request.url.host == "router":
            return await self._route(request, body)
        return await self.schedulers[int(request.url.host.rpartition("-")[2])].answer(request.method, request.url.path, body)

    async def _route(self, request: httpx.Request, body: dict[str, Any]) -> httpx.Response:
        names = [f"http://scheduler-{number}" for number in range(len(self.schedulers))]
        if request.url.path == "/endpoints":
            return httpx.Response(200, json={"endpoints": [{"base_url": name, "enabled": True} for name in names]})
        if request.url.path == "/weight/refit":
            answers = [await each.answer("POST", request.url.path, body) for each in self.schedulers]
            results = [{"base_url": name, "ok": answer.status_code == 200} for name, answer in zip(names, answers, strict=True)]
            is_whole = all(result["ok"] for result in results)
            return httpx.Response(200 if is_whole else 207, json={"ok": is_whole, "results": results})
        self._turn += 1
        return await self.schedulers[self._turn % len(self.schedulers)].answer(request.method, request.url.path, body)


def write_chat_base(folder: Path) -> None:
    """A tokenizer beside what `write_base` wrote: each letter a token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    words = {"<pad>": 0, "<eos>": 1, **{letter: number + 2 for number, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": 1}))
