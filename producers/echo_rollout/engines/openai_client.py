"""HTTP to one server: bounded, timed, and repeated only where repeating is safe. Imports httpx.

A request that got no whole answer (no connection, a connection that broke, 429, 5xx) is sent again after a growing pause, as far as its
caller allows; one that was refused is not. A generation may be asked for twice: it changes nothing at the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections.abc import Callable
from typing import Any

import httpx

from echo_rollout.engines.engine import EngineError
from echo_rollout.engines.openai_options import ServerOptions
from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

_AGAIN = frozenset({429, 500, 502, 503, 504})
_BACKOFF_S, _MOST_BACKOFF_S = 0.25, 15.0
_MOST_SAID = 300
# A server says at once how it is; a generation may take minutes.
_LOOK_S = 30.0


class ServerUnreachable(EngineError):
    """No whole answer came, after all retries."""


class ServerRefused(EngineError):
    """The server refused the request. `status`: of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerClient:
    """One server. `close` it. `has_ended()`: a sentence once a server of our own is gone, so that it is not asked again; else empty."""

    def __init__(
        self,
        url: str,
        options: ServerOptions,
        *,
        key: str,
        has_ended: Callable[[], str] = lambda: "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport`: instead of the network. Raises UserError for a `ca_file` that cannot be read."""
        self.url = url
        self._retries = options.retries
        self._has_ended = has_ended
        connect_s, request_s = options.connect_timeout_s, options.request_timeout_s
        self._timeouts = {
            "GET": httpx.Timeout(min(_LOOK_S, request_s), connect=connect_s),
            "POST": httpx.Timeout(request_s, connect=connect_s),
        }
        # One more than generate at once, so that a version can be loaded while all of them run.
        limits = httpx.Limits(max_connections=options.requests + 2, max_keepalive_connections=options.requests + 2)
        self._http = httpx.AsyncClient(
            base_url=url,
            limits=limits,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=_verification(options.ca_file),
            # Proxies from the environment are not for a server of our own.
            trust_env=bool(options.url),
            transport=transport,
        )

    async def get(self, path: str) -> Any:
        """The JSON of a GET. Raises ServerRefused, ServerUnreachable."""
        return await self._ask("GET", path, None, self._retries)

    async def post(self, path: str, body: Any, *, is_repeatable: bool = True) -> Any:
        """The JSON (or text) of a POST. Raises ServerRefused, ServerUnreachable."""
        return await self._ask("POST", path, body, self._retries if is_repeatable else 0)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def _ask(self, method: str, path: str, body: Any, retries: int) -> Any:
        for attempt in range(retries + 1):
            try:
                response = await self._http.request(method, path, json=body, timeout=self._timeouts[method])
                if response.status_code < 300:
                    return _content(response)
                failure: EngineError = ServerRefused(
                    f"{self.url}{path} answers {response.status_code}: {_said(response)}", response.status_code
                )
                if response.status_code not in _AGAIN:
                    raise failure
            except (httpx.TransportError, httpx.DecodingError, json.JSONDecodeError) as exc:
                failure = ServerUnreachable(f"{self.url}{path} gave no whole answer: {type(exc).__name__} {exc}".rstrip() + ".")
                if isinstance(exc, httpx.ReadTimeout) and method == "POST":
                    # The server worked on it until the time-out, and would again.
                    raise failure from exc
            if ended := self._has_ended():
                raise ServerUnreachable(ended)
            if attempt == retries:
                raise failure
            pause_s = min(_MOST_BACKOFF_S, _BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
            logger.warning("%s It is asked again in %.1f s.", failure.message, pause_s)
            await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


def _content(response: httpx.Response) -> Any:
    """JSON, by its content type, or else text: some admin routes answer with a sentence."""
    return json.loads(response.content) if "json" in response.headers.get("content-type", "") else response.text


def _said(response: httpx.Response) -> str:
    """The server's own sentence, cut to a readable length."""
    try:
        content = json.loads(response.content)
    except ValueError:
        content = None
    error = content.get("error", content) if isinstance(content, dict) else None
    message = error.get("message") or error.get("detail") if isinstance(error, dict) else None
    return str(message or response.text or response.reason_phrase)[:_MOST_SAID]


def _verification(ca_file: str) -> ssl.SSLContext | bool:
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise UserError(f"[rollout.options] ca_file {ca_file} cannot be used: {exc}.", hint="Name a PEM file.") from exc
