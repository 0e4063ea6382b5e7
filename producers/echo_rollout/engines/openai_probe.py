"""What a server can do, found out by a few requests before the first real one."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial

from echo_rollout.engines.engine import AnswerUnusable, EngineConfig, EngineError
from echo_rollout.engines.logprob_traits import TOP, LogprobTraits, look_at_logprobs
from echo_rollout.engines.openai_answers import Dialect, SentRequest, read_choices, request_body
from echo_rollout.engines.openai_client import ServerClient, ServerRefused
from echo_rollout.engines.openai_options import ServerOptions
from echo_schemas.errors import UserError
from echo_schemas.records import Sampling, WeightKind

logger = logging.getLogger(__name__)

_ABSENT = frozenset({403, 404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTraits:
    """`model`: the base model's name there; `dialect`: the route that generates; `logprobs`: what its log-probabilities are."""

    model: str
    dialect: Dialect
    logprobs: LogprobTraits


async def look_at_server(client: ServerClient, options: ServerOptions, config: EngineConfig, *, vocabulary: int) -> ServerTraits:
    """Ask for the model, for two tokens by either route, for temperature, and for the routes that load weights.

    Raises UserError for a server that cannot be used at all: no such model, too short, no token ids, no way to load weights.
    """
    try:
        model = await _model(client, options, config)
        prompt = [0, min(1, vocabulary - 1)]
        dialect, logprobs = await _dialect(client, model, prompt)
        told = LogprobTraits(usable=False)
        if logprobs:
            told = await look_at_logprobs(partial(_likeliest, client, model, prompt), url=client.url)
        if not options.is_external:
            await _check_loading(client, config.kind)
    except UserError:
        raise
    except EngineError as exc:
        raise UserError(f"The server cannot be used: {exc.message}", hint="See [rollout.options] url and the server's log.") from exc
    return ServerTraits(model=model, dialect=dialect, logprobs=told)


async def _model(client: ServerClient, options: ServerOptions, config: EngineConfig) -> str:
    listed = await client.get("/v1/models")
    given = listed.get("data") if isinstance(listed, dict) else None
    cards = [card for card in given or [] if isinstance(card, dict)]
    chosen = [card for card in cards if (card.get("id") == options.model if options.model else not card.get("parent"))]
    if len(chosen) != 1:
        names = ", ".join(sorted(str(card.get("id")) for card in cards)) or "none"
        wanted = f"no model {options.model!r}" if options.model else f"{len(chosen)} base models"
        raise UserError(f"The server at {client.url} has {wanted}.", hint=f"Set model in [rollout.options] to one of: {names}.")
    longest = chosen[0].get("max_model_len")
    if isinstance(longest, int) and longest < config.max_length:
        raise UserError(
            f"The server takes {longest} tokens of prompt and answer, and [policy] max_length is {config.max_length}.",
            hint=f"Start it with --max-model-len {config.max_length}, or lower [policy] max_length.",
        )
    return str(chosen[0]["id"])


async def _dialect(client: ServerClient, model: str, prompt: list[int]) -> tuple[Dialect, bool]:
    """The first route that returns token ids, and whether it gives log-probabilities with them."""
    for dialect in Dialect:
        for logprobs in (True, False):
            asked = SentRequest(
                prompt=prompt, num_choices=2, sampling=Sampling(max_new_tokens=2), model=model, label=None, logprobs=logprobs
            )
            try:
                answer = await client.post(dialect, request_body(dialect, asked))
                read_choices(dialect, asked, answer)
            except ServerRefused as exc:
                if exc.status in _ABSENT and dialect is Dialect.GENERATE:
                    break
                if not logprobs:
                    raise
                complaint = exc.message
            except AnswerUnusable as exc:
                complaint = exc.message
            else:
                return dialect, logprobs
            logger.warning("%s (%s with%s log-probabilities)", complaint, dialect.value, "" if logprobs else "out")
    raise UserError(
        f"The server at {client.url} does not return the token ids that it generates: {complaint}",
        hint="The learner has to train exactly the sampled tokens. Use a vLLM server, or another engine.",
    )


async def _likeliest(client: ServerClient, model: str, prompt: list[int], *, temperature: float = 1.0, top_k: int = 0) -> dict[str, float]:
    """Log-probabilities of the likeliest first tokens, by what the server calls them."""
    body = {
        "model": model, "prompt": prompt, "max_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": top_k, "logprobs": TOP,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip
    try:
        answer = await client.post(Dialect.COMPLETIONS, body)
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return {str(token): float(value) for token, value in top.items() if math.isfinite(value)}
    except (ServerRefused, KeyError, IndexError, TypeError, ValueError, AttributeError):
        return {}


async def _check_loading(client: ServerClient, kind: WeightKind) -> None:
    """Raise UserError if the server has no way to get weights of this kind from us."""
    if kind is WeightKind.LORA:
        path, body = "/v1/load_lora_adapter", {"lora_name": "", "lora_path": ""}
        missing, hint = "load adapters", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora"
    else:
        path, body = "/collective_rpc", {"method": "echo_check"}
        missing = "load full weights"
        hint = "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls echo_rollout.engines.vllm_worker.WorkerExtension"
    try:
        await client.post(path, body, is_repeatable=False)
    except ServerRefused as exc:
        # An adapter without a name is refused by a server that can load one with a name.
        if kind is WeightKind.LORA and exc.status not in _ABSENT:
            return
        raise UserError(
            f"The server at {client.url} cannot {missing} ({exc.status}).",
            hint=f"Start it with {hint}; or, if something else loads its weights, set weights = 'external' in [rollout.options].",
        ) from exc
