"""The viewer's HTTP server: GET only, on loopback only, for its own pages only.

One daemon thread accepts, one more runs per request. A page of another site in a browser on this machine must neither read a run nor start
work in the viewer, so each request's Host, Origin and Sec-Fetch-Site are checked first. Texts of trajectories are sent only as JSON, and
the pages put them into text nodes; only the files beside this module run as scripts (Content-Security-Policy).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from echo_bus.errors import TransportError
from echo_ops.viewer.routes import BadQuery, NoSuchPage, answer
from echo_ops.viewer.searches import TooMany
from echo_ops.viewer.source import Source
from echo_runtime.server import HttpHandler, HttpServer
from echo_schemas.errors import EchoError, UserError

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_MOST_ADDRESS = 4_000
_MOST_VALUES = 40
# A silent connection is closed after this time.
_SILENT_S = 30
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# The first class that fits an error gives its status.
_STATUSES: tuple[tuple[type[EchoError], HTTPStatus], ...] = (
    (NoSuchPage, HTTPStatus.NOT_FOUND),
    (BadQuery, HTTPStatus.BAD_REQUEST),
    (UserError, HTTPStatus.NOT_FOUND),
    (TooMany, HTTPStatus.SERVICE_UNAVAILABLE),
    (TransportError, HTTPStatus.SERVICE_UNAVAILABLE),
)


class ViewerServer(HttpServer):
    def __init__(self, source: Source, port: int = 0) -> None:
        """`port` 0 takes a free one. Raises UserError if the port is taken."""
        super().__init__(_handler_of(source, _static_files()), _HOST, port, what="viewer's", hint="--port 0 takes a free one.")

    @property
    def url(self) -> str:
        """The address of the first page."""
        return f"{super().url}/"


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Body and content type by path."""
    folder = resources.files("echo_ops.viewer").joinpath("static")
    files = {f"/{file.name}": (file.read_bytes(), _TYPES[f".{file.name.rpartition('.')[2]}"]) for file in folder.iterdir()}
    return {**files, "/": files["/index.html"]}


def _handler_of(source: Source, static: Mapping[str, tuple[bytes, str]]) -> type[HttpHandler]:
    class Handler(HttpHandler):
        protocol_version = "HTTP/1.1"
        timeout = _SILENT_S
        extra_headers = _HEADERS

        def do_GET(self) -> None:  # noqa: N802  the name of http.server
            if (refusal := self._refusal()) is not None:
                self._say(HTTPStatus.FORBIDDEN, refusal)
                return
            if len(self.path) > _MOST_ADDRESS:
                self._say(HTTPStatus.REQUEST_URI_TOO_LONG, f"An address has at most {_MOST_ADDRESS} characters.")
                return
            try:
                parts = urlsplit(self.path)
                values = parse_qs(parts.query, max_num_fields=_MOST_VALUES)
            except ValueError:
                self._say(HTTPStatus.BAD_REQUEST, f"The address cannot be read; a query has at most {_MOST_VALUES} values.")
                return
            if parts.path in static:
                self.send(HTTPStatus.OK, *static[parts.path])
            else:
                self._show(parts.path, values)

        def _show(self, path: str, values: Mapping[str, list[str]]) -> None:
            try:
                body = json.dumps(answer(source, path, values), ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
            except EchoError as exc:
                status = next((status for kind, status in _STATUSES if isinstance(exc, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
                self._say(status, exc.message, exc.hint)
                return
            except Exception:  # the edge of the thread: log the traceback, and answer with an error
                logger.exception("No answer to %s", path)
                self._say(HTTPStatus.INTERNAL_SERVER_ERROR, "The viewer has an error; its own output shows it.")
                return
            self.send(HTTPStatus.OK, body, "application/json")

        def _refusal(self) -> str | None:
            own = {f"{name}:{self.server.server_address[1]}" for name in (_HOST, "localhost")}  # type: ignore[index]  # of an IPv4 socket
            if self.headers.get("Host") not in own:
                return "The viewer answers only to 127.0.0.1 and localhost, with its own port."
            origin = self.headers.get("Origin")
            if origin is not None and origin not in {f"http://{name}" for name in own}:
                return "The viewer answers only pages that it served itself."
            if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
                # A link on another site may open the viewer; a script of that site may not send requests.
                if self.headers.get("Sec-Fetch-Mode") == "navigate" and not self.path.startswith("/api/"):
                    return None
                return "The viewer answers only pages that it served itself."
            return None

        def _say(self, status: HTTPStatus, message: str, hint: str = "") -> None:
            self.send(status, json.dumps({"error": message, "hint": hint}).encode(), "application/json")

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """Answer in the same form if http.server refuses a request itself, for example another method."""
            del message, explain
            self.close_connection = True
            with contextlib.suppress(ValueError):
                code = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
            text = "The viewer answers GET only." if code == HTTPStatus.METHOD_NOT_ALLOWED else "The request is not valid."
            self._say(HTTPStatus(code), text)

    return Handler
