"""One group: `group_size` samples of one prompt, in one turn or as episodes of the task's environment.

A single turn is one call of the engine for the whole group. With an environment every sample is an episode of its own: the policy acts, the
environment answers, and the answer's tokens are appended and never trained, until the environment is done or the tokens are used up.
Earlier turns are never tokenised again: in a chat an observation is the user's next message, between the template's own markers, and only
that part is encoded.

Runs on the worker's asyncio loop; environments, which may be slow, run on threads of the sampler.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from echo_rollout.engines.engine import Engine, Generation
from echo_schemas.errors import EchoError
from echo_schemas.records import ChatMessage, FinishReason, LogprobDistribution, LogprobSource, Sampling, Span, VersionSpan
from echo_tasks.prompts import ChatCodec, TokenIds, continued
from echo_tasks.task import Environment, Task, Turn

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_NO_TOKENS = np.empty(0, np.int32)
# Environments mostly wait (a sandbox, a service, a compiler), so more of them than processors may be at work.
_ENVIRONMENT_THREADS = 32


class EmptyGeneration(EchoError):
    """The engine returned a completion without a token, twice."""


class UnfitGeneration(EchoError):
    """The engine returned too few or too many completions, or one with a token that the model does not have."""


class EnvironmentFailed(EchoError):
    """The task's environment raised an error: the engine is not at fault, and the group cannot be finished."""


# Not frozen: freezing triples the time that it takes to make one, and one is made per sample beside the engine.
@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """One finished sample: the whole episode's tokens int32 [T], log-probabilities float32 [G] of the generated ones."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    generated: tuple[Span, ...]
    version_spans: tuple[VersionSpan, ...]
    weights_sha256: str
    finish_reason: FinishReason
    completion: str
    turn_rewards: tuple[float, ...] = ()
    logprob_source: LogprobSource = LogprobSource.SAMPLER
    logprob_distribution: LogprobDistribution = LogprobDistribution.DRAWN
    experts: npt.NDArray[np.unsignedinteger[Any]] | None = None
    """[T - 1, layers, per token], where the engine notes them."""
    prompt: str | None = None
    """The prompt as text where the environment's first observation became part of it; None: it is the request's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPrompt:
    """What a group starts from: token ids, the task's entry, how to sample, and how many tokens an episode may have.

    `messages`: the conversation that `token_ids` are, if they are one; later turns are then worded by the chat template.
    """

    token_ids: TokenIds
    entry: dict[str, Any]
    sampling: Sampling
    group_size: int
    max_length: int
    messages: tuple[ChatMessage, ...] = ()


class GroupSampler:
    """Samples groups from one engine for one task. `close` it."""

    def __init__(
        self,
        engine: Engine,
        task: Task,
        codec: ChatCodec,
        *,
        vocabulary: int,
        on_empty: Callable[[], object],
        max_turn_tokens: int | None = None,
    ) -> None:
        """`vocabulary`: token ids are below it. `on_empty()` is called for each completion without a token. `max_turn_tokens`: of one
        answer; None: as many as the prompt's sampling allows."""
        self._engine = engine
        self._task = task
        self._codec = codec
        self._vocabulary = vocabulary
        self._on_empty = on_empty
        self._max_turn_tokens = max_turn_tokens
        self._threads = ThreadPoolExecutor(_ENVIRONMENT_THREADS, "environment")
        # A pool of its own, so that the sampler's end cancels no closing: an environment may hold things that outlive this process.
        self._closing = ThreadPoolExecutor(_ENVIRONMENT_THREADS, "environment closing")

    def close(self) -> None:
        """Stop without waiting for environments that still compute; these are closed afterwards."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._closing.shutdown(wait=False)

    async def sample(self, prompt: GroupPrompt) -> list[Sample]:
        """`group_size` samples. Raises EngineError, EmptyGeneration, UnfitGeneration, EnvironmentFailed."""
        first = _guarded(lambda: self._task.environment(prompt.entry))
        if first is None:
            start = prompt.token_ids
            generations = await self._generate(start.tolist(), prompt.group_size, prompt.sampling)
            return _single_turns(start, generations)
        others = [_guarded(lambda: self._task.environment(prompt.entry)) for _ in range(prompt.group_size - 1)]
        environments = [first, *(environment for environment in others if environment is not None)]
        episodes = [asyncio.create_task(self._episode(prompt, environment)) for environment in environments]
        try:
            return list(await asyncio.gather(*episodes))
        finally:
            # Once one episode has failed the group is lost, and the engine need not finish the others.
            for episode in episodes:
                episode.cancel()

    async def _generate(self, prompt: list[int], n: int, sampling: Sampling) -> list[Generation]:
        """`n` completions of at least one token. Empty ones are tried once more. Raises EmptyGeneration, UnfitGeneration."""
        generations = await self._asked(prompt, n, sampling)
        empty = [index for index, generation in enumerate(generations) if not len(generation.token_ids)]
        if empty:
            for _ in empty:
                self._on_empty()
            again = await self._asked(prompt, len(empty), sampling)
            if not all(len(generation.token_ids) for generation in again):
                raise EmptyGeneration("The engine returned a completion without a token, twice.")
            for index, generation in zip(empty, again, strict=True):
                generations[index] = generation
        self._check(generations)
        return generations

    async def _asked(self, prompt: list[int], n: int, sampling: Sampling) -> list[Generation]:
        """`n` generations of the engine. Raises UnfitGeneration for another number: a group that lacks one is never complete."""
        if self._max_turn_tokens is not None and self._max_turn_tokens < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=self._max_turn_tokens)
        generations = await self._engine.generate(prompt, n, sampling)
        if len(generations) != n:
            raise UnfitGeneration(f"The engine returned {len(generations)} completions, and {n} were asked for.")
        return generations

    def _check(self, generations: Sequence[Generation]) -> None:
        """Check all tokens in one call of numpy: the call costs more than comparing a thousand tokens."""
        tokens = np.concatenate([generation.token_ids for generation in generations])
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < 0 or highest >= self._vocabulary:
            wrong = lowest if lowest < 0 else highest
            raise UnfitGeneration(f"The engine returned the token {wrong}, outside the vocabulary of {self._vocabulary}.")

    async def _episode(self, prompt: GroupPrompt, environment: Environment) -> Sample:
        """One episode, within `max_new_tokens` generated tokens and `max_length` tokens in all."""
        with closing(_Stage(environment, self._threads, self._closing)) as stage:
            return await self._played(prompt, stage)

    async def _played(self, prompt: GroupPrompt, stage: _Stage) -> Sample:
        episode = _Episode(prompt, self._codec)
        await stage.call(lambda environment: episode.begin(environment.reset().text))
        while True:
            left = min(prompt.sampling.max_new_tokens - episode.num_generated, prompt.max_length - episode.num_tokens)
            if left < 1:
                return episode.ended(FinishReason.LENGTH)
            sampling = replace(prompt.sampling, max_new_tokens=left)
            (generation,) = await self._generate(episode.tokens().tolist(), 1, sampling)
            episode.act(generation)
            turn = await stage.call(partial(_acted, generation.text, episode))
            episode.turn_rewards.append(float(turn.reward))
            if turn.done:
                return episode.ended(FinishReason.ENVIRONMENT)


def _acted(action: str, episode: _Episode, environment: Environment) -> Turn:
    """Act in the environment, and append its next observation to the episode."""
    turn = environment.step(action)
    if not turn.done:
        episode.observe(turn.observation)
    return turn


class _Stage:
    """One environment on the sampler's threads, one call at a time. `close` it: that waits, on a thread, for a call that still runs."""

    def __init__(self, environment: Environment, threads: ThreadPoolExecutor, closing: ThreadPoolExecutor) -> None:
        self._environment = environment
        self._threads = threads
        self._closing = closing
        self._lock = threading.Lock()

    async def call(self, use: Callable[[Environment], _T]) -> _T:
        """What `use` makes of the environment. Raises EnvironmentFailed."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._locked, use)

    def close(self) -> None:
        """Close an environment that can be closed, however the episode ended. Waits for nothing."""
        if callable(getattr(self._environment, "close", None)):
            # A closed sampler accepts nothing more: its process ends.
            with suppress(RuntimeError):
                self._closing.submit(self._locked_close)

    def _locked(self, use: Callable[[Environment], _T]) -> _T:
        with self._lock:
            return _guarded(lambda: use(self._environment))

    def _locked_close(self) -> None:
        try:
            self._locked(lambda environment: environment.close())  # type: ignore[attr-defined]
        except EnvironmentFailed as exc:
            logger.warning("An environment could not be closed: %s", exc)


class _Episode:
    """The prompt and all turns so far."""

    def __init__(self, prompt: GroupPrompt, codec: ChatCodec) -> None:
        self.num_tokens = len(prompt.token_ids)
        self.num_generated = 0
        self.turn_rewards: list[float] = []
        self._messages = prompt.messages
        self._codec = codec
        self._prompt: str | None = None
        self._parts: list[TokenIds] = [prompt.token_ids]
        self._logprobs: list[npt.NDArray[np.float32]] = []
        self._generated: list[Span] = []
        self._versions: list[VersionSpan] = []
        self._texts: list[str] = []
        self._sha256 = ""
        self._logprob_source = LogprobSource.SAMPLER
        self._distribution = LogprobDistribution.DRAWN
        self._experts: list[npt.NDArray[np.unsignedinteger[Any]]] = []
        self._num_noted = 0

    def tokens(self) -> TokenIds:
        """Everything, int32 [T]."""
        return np.concatenate(self._parts)

    def begin(self, text: str) -> None:
        """Append the first observation: after a prompt of text, or at the end of a conversation's last message."""
        if not text:
            return
        if not self._messages:
            self._append(self._codec.encode(text), text)
            return
        self._prompt = self._codec.render(continued(self._messages, text))
        self._parts = [self._codec.encode(self._prompt)]
        self.num_tokens = len(self._parts[0])

    def observe(self, text: str) -> None:
        """Append the environment's observation after a turn; in a conversation with the template's markers around it."""
        if not self._messages:
            self._append(self._codec.encode(text) if text else _NO_TOKENS, text)
            return
        reply = self._codec.render_reply(text)
        added = self._codec.encode(reply)
        # The policy may have ended its turn itself, with the same marker as the template's.
        if len(added) and added[0] == self._parts[-1][-1]:
            added = added[1:]
        self._append(added, reply)

    def _append(self, added: TokenIds, text: str) -> None:
        if len(added):
            self._parts.append(added)
            self._texts.append(text)
            self.num_tokens += len(added)

    def act(self, generation: Generation) -> None:
        """Append a generation of the policy."""
        start, count = self.num_tokens, len(generation.token_ids)
        self._parts.append(generation.token_ids)
        self._logprobs.append(generation.logprobs)
        self._generated.append(Span(start=start, end=start + count))
        self._versions.extend(_shifted(generation.version_spans, start))
        self._texts.append(generation.text)
        self._sha256 = generation.weights_sha256
        if generation.logprob_source is LogprobSource.RECOMPUTED:
            # If one turn lacks them the learner computes those of the whole episode.
            self._logprob_source = generation.logprob_source
        # One engine, and one sampling: the same in every turn.
        self._distribution = generation.logprob_distribution
        if generation.experts is not None:
            # Earlier tokens keep the experts that they were sampled with.
            self._experts.append(generation.experts[self._num_noted :])
            self._num_noted = len(generation.experts)
        self.num_tokens += count
        self.num_generated += count

    def ended(self, reason: FinishReason) -> Sample:
        """The episode as a sample. An observation too long to be answered is left out: nothing follows it. Raises EmptyGeneration."""
        if not self._generated:
            raise EmptyGeneration("The environment's first observation leaves no room for an answer.")
        end = self._generated[-1].end
        return Sample(
            token_ids=self.tokens()[:end],
            logprobs=np.concatenate(self._logprobs),
            generated=tuple(self._generated),
            version_spans=tuple(self._versions),
            weights_sha256=self._sha256,
            finish_reason=reason,
            completion="".join(self._texts),
            turn_rewards=tuple(self.turn_rewards),
            logprob_source=self._logprob_source,
            logprob_distribution=self._distribution,
            experts=np.concatenate(self._experts) if self._experts else None,
            prompt=self._prompt,
        )


def _guarded(call: Callable[[], _T]) -> _T:
    """Run the task's own code. Raises EnvironmentFailed."""
    try:
        return call()
    except Exception as exc:  # a task is the user's code and may raise anything
        raise EnvironmentFailed(f"The task's environment raised {type(exc).__name__}: {exc}") from exc


def _single_turns(prompt: TokenIds, generations: Sequence[Generation]) -> list[Sample]:
    """The samples of a group. Equal spans are made once: this code holds the interpreter lock, which the engine needs."""
    start = len(prompt)
    made: dict[tuple[int, tuple[VersionSpan, ...]], tuple[tuple[Span, ...], tuple[VersionSpan, ...]]] = {}
    samples = []
    for generation in generations:
        key = (len(generation.token_ids), generation.version_spans)
        spans = made.get(key)
        if spans is None:
            end = start + len(generation.token_ids)
            spans = made[key] = ((Span(start=start, end=end),), _shifted(generation.version_spans, start))
        samples.append(
            Sample(
                token_ids=np.concatenate((prompt, generation.token_ids)),
                logprobs=generation.logprobs,
                generated=spans[0],
                version_spans=spans[1],
                weights_sha256=generation.weights_sha256,
                finish_reason=generation.finish_reason,
                completion=generation.text,
                logprob_source=generation.logprob_source,
                logprob_distribution=generation.logprob_distribution,
                experts=generation.experts,
            )
        )
    return samples


def _shifted(spans: Sequence[VersionSpan], by: int) -> tuple[VersionSpan, ...]:
    """Spans relative to a generation as spans of the whole episode."""
    return tuple(VersionSpan(start=span.start + by, end=span.end + by, version=span.version) for span in spans)
