"""A Parallax cluster: many unequal devices that its scheduler has made one model of. Imports httpx.

    generate ─▶ time stamps ─▶ a POST for each answer ─▶ time stamps: the same, or the group is given up
    install  ─▶ nothing runs ─▶ blocks offered ─▶ refit asked for ─▶ every scheduler's time stamp is the new one ─▶ generations go on

Time stamps separate the versions: Parallax names no version with an answer (its older servers do; then it is compared). A time stamp says
that nodes have fetched weights, not that they compute with them, so no version is proved: see docs/engines.md.

Threads: everything runs on the asyncio loop; blocks are offered on threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import httpx

from echo_rollout.engines.chat_text import ChatText
from echo_rollout.engines.engine import AnswerUnusable, EngineCapabilities, EngineConfig, EngineError, Generation, Snapshot, Switch
from echo_rollout.engines.fitting import base_shapes, check_fit
from echo_rollout.engines.logprob_traits import LogprobTraits
from echo_rollout.engines.openai_answers import AnsweredChoice, UnusableAnswers, generations_of
from echo_rollout.engines.openai_client import ServerClient, ServerRefused, ServerUnreachable
from echo_rollout.engines.parallax_answers import ROUTE, ChatDialect, ChatRequest, chat_body, read_chat
from echo_rollout.engines.parallax_cluster import Cluster
from echo_rollout.engines.parallax_options import ParallaxOptions, parse_parallax_options
from echo_rollout.engines.parallax_probe import find_dialect
from echo_rollout.engines.serving import LoopEngine
from echo_rollout.engines.vllm_arguments import batch_decoder
from echo_rollout.engines.weight_blocks import BlockStore, LatticaStore, blocks_of
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobSource, Sampling, WeightKind
from echo_tasks.prompts import vocabulary_size

logger = logging.getLogger(__name__)


class ParallaxEngine(LoopEngine):
    """See `Engine`. `transport`, `open_store`: instead of the network, for tests."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        open_store: Callable[[ParallaxOptions], BlockStore] = LatticaStore,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Raises UserError for wrong options."""
        super().__init__(config)
        self._options = parse_parallax_options(config.options)
        self._transport = transport
        self._open_store = open_store
        self._now_s = now_s
        self._cluster: Cluster | None = None
        self._store: BlockStore | None = None
        self._text: ChatText | None = None
        self._dialect = ChatDialect.TEXT
        self._told = LogprobTraits(usable=True)
        self._model = ""
        self._places = asyncio.Semaphore(self._options.server.requests)
        self._unusable = UnusableAnswers()
        self._stamp = 0.0
        self._offered: set[str] = set()

    @property
    def capabilities(self) -> EngineCapabilities:
        """Weights replace those that run; log-probabilities as the cluster's dialect has them; no version is proved."""
        return self._told.capabilities(self._config, "parallax", Switch.DRAINS, proves_version=False)

    async def start(self) -> None:
        """Wait until the cluster is ready, and find out what it tells."""
        config, options = self._config, self._options
        self._base = base_shapes(config.base)
        self._vocabulary = vocabulary_size(config.base)
        self._text = await asyncio.to_thread(ChatText, config.base)
        self._cluster = cluster = Cluster(self._client(options.server.url.rstrip("/")), self._client)
        logger.info("Asks for the cluster at %s", cluster.front.url)
        try:
            await cluster.find()
            self._model, most = await cluster.wait_until_available(options.server.start_timeout_s)
            self._stamp = max(await cluster.stamps())
            self._dialect, self._told = await find_dialect(
                cluster.front, self._model, self._text, wanted=options.dialect, vocabulary=self._vocabulary
            )
        except UserError:
            raise
        except EngineError as exc:
            raise UserError(
                f"The cluster cannot be used: {exc.message} {await cluster.told()}",
                hint="See [rollout.options] url and the scheduler's log.",
            ) from exc
        if most:
            self._places = asyncio.Semaphore(min(most, options.server.requests))
        self._decode = await asyncio.to_thread(batch_decoder, config.base)
        if not options.server.is_external:
            self._store = await asyncio.to_thread(self._open_store, options)
        logger.info("The cluster at %s speaks %s and takes %d requests at once", cluster.front.url, self._dialect.value, most)

    async def install(self, snapshot: Snapshot) -> None:
        """When everything under way has finished: refit all nodes. A version that others load is only noted.

        Raises EngineError where not all nodes took it: then it is unknown with which weights they compute.
        """
        cluster, _ = self._opened()
        self._check_kind(snapshot)
        async with self._installing:
            check_fit(snapshot, self._base, max_rank=self._config.lora_rank if snapshot.kind is WeightKind.LORA else 0)
            if self._store is not None:
                async with self._gate.drained():
                    await self._refit(cluster, self._store, snapshot)
            self.installed = snapshot.ref

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Ask the cluster, with one request for each answer. Raises AnswerUnusable too, also if the weights change meanwhile."""
        _, text = self._opened()
        if sampling.stop and self._dialect is ChatDialect.TEXT:
            raise EngineError(
                "This cluster returns text alone, cut before a stop text: the tokens of that are lost. Leave [rollout] stop empty."
            )
        self._check_prompt(prompt, sampling)
        content = self._unusable.counted(lambda: text.content_of(prompt))
        return await self._under_way(self._generate(prompt, n, sampling, content))

    async def close(self) -> None:
        """Close the connections; the cluster keeps its weights."""
        if not self._end_all():
            return
        if self._cluster is not None:
            await self._cluster.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)

    def _client(self, url: str) -> ServerClient:
        server = self._options.server
        return ServerClient(url, server, key=server.api_key(), transport=self._transport)

    def _opened(self) -> tuple[Cluster, ChatText]:
        self._check_open()
        if self._cluster is None or self._text is None or not self._model:
            raise EngineError("The engine was not started.")
        return self._cluster, self._text

    async def _generate(self, prompt: Sequence[int], n: int, sampling: Sampling, content: str) -> list[Generation]:
        cluster, text = self._opened()
        async with self._gate.admitted():
            ref = self.installed
            if ref is None:
                raise EngineError("No version is installed yet.")
            asked = ChatRequest(
                prompt=prompt, content=content, sampling=sampling, model=self._model, version=None if self._store is None else ref.version
            )
            before = await cluster.stamps()
            if self._store is not None and set(before) != {self._stamp}:
                raise EngineError(
                    f"Another program has changed the cluster's weights since version {ref.version} was installed: give each worker a "
                    'cluster of its own, or set weights = "external" in [rollout.options].'
                )
            # At temperature 0 all members of a group are the same.
            members = [self._ask(cluster, text, asked, index) for index in range(1 if sampling.temperature == 0 else n)]
            choices = await _all_or_none(members)
            if await cluster.stamps() != before:
                raise AnswerUnusable("The cluster's weights changed while it generated: it is unknown which weights made which token.")
        texts = await asyncio.to_thread(self._decode, [choice.tokens for choice in choices])
        found = generations_of(choices, texts, sampling, ref, self._told.distribution)
        return found * n if sampling.temperature == 0 else found

    async def _ask(self, cluster: Cluster, text: ChatText, asked: ChatRequest, index: int) -> AnsweredChoice:
        """Member `index` of a group, sampled with the group's seed plus `index`."""
        if asked.sampling.seed is not None:
            asked = replace(asked, sampling=replace(asked.sampling, seed=asked.sampling.seed + index))
        async with self._places:
            try:
                answer = await cluster.front.post(ROUTE, chat_body(self._dialect, asked))
            except (ServerRefused, ServerUnreachable) as exc:
                raise EngineError(f"{exc.message} {await cluster.told()}") from exc
        choice = self._unusable.counted(lambda: read_chat(self._dialect, asked, answer, text))
        is_said = self.capabilities.source_at(asked.sampling.temperature) is LogprobSource.SAMPLER
        return choice if is_said else replace(choice, logprobs=[])

    async def _refit(self, cluster: Cluster, store: BlockStore, snapshot: Snapshot) -> None:
        index_map = await asyncio.to_thread(_offer, store, snapshot)
        # A node ignores a refit whose time stamp is not newer than its own.
        stamp = max(self._now_s(), *(stamp + 1.0 for stamp in await cluster.stamps()))
        offered = set(index_map.values())
        request = {
            "time_stamp": stamp,
            "cid": sorted(offered),
            "index_map": index_map,
            "echo_peer_id": store.peer_id(),
            "version": snapshot.ref.version,
        }
        await cluster.refit(request, self._options.refit_timeout_s)
        self._stamp = stamp
        # The blocks of the version in force stay: a node that joins later asks for them.
        old, self._offered = self._offered - offered, offered
        for cid in old:
            await asyncio.to_thread(store.remove, cid)


def _offer(store: BlockStore, snapshot: Snapshot) -> dict[str, str]:
    """Tensor name to CID."""
    found: dict[str, str] = {}
    for names, block in blocks_of(snapshot.folder):
        found |= dict.fromkeys(names, store.put(block))
    return found


async def _all_or_none(members: Sequence[Coroutine[Any, Any, AnsweredChoice]]) -> list[AnsweredChoice]:
    """What all `members` return; one that fails cancels the others."""
    tasks = [asyncio.ensure_future(member) for member in members]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
