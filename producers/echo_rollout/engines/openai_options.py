"""What [rollout.options] say about a server: where it is, how it is asked, and how adapters reach it. Pure, but for reading the key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from echo_schemas.errors import UserError
from echo_tasks.options import nearest

SERVER = "[rollout.options]"
"""As messages name the section."""
# One answer of a long generation on a busy server takes minutes; a server that takes longer for a first byte has stopped.
_REQUEST_S, _CONNECT_S, _START_S = 600.0, 10.0, 900.0
_MOST_REQUESTS = 64
_RETRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server is used.

    `url`: of a server that runs already, up to and without `/v1`; empty: the worker starts vLLM's own on this machine.
    `model`: the base model's name there; empty: the only one it has. `api_key_file`, `api_key_env`: where the key is, if it wants one.
    `ca_file`: its CA certificate, PEM. `adapter_folder`: a folder that the server sees too, into which adapters are copied; empty: it
    sees the worker's own files. `server_folder`: what the server calls that folder; empty: the same. `weights`: `loaded` by this worker,
    or `external`: by something else, so that no version can be proved. `requests`: at once. `retries`: of a request that got no answer.
    """

    url: str = ""
    model: str = ""
    api_key_file: str = ""
    api_key_env: str = ""
    ca_file: str = ""
    adapter_folder: str = ""
    server_folder: str = ""
    weights: str = "loaded"
    requests: int = _MOST_REQUESTS
    retries: int = _RETRIES
    request_timeout_s: float = _REQUEST_S
    connect_timeout_s: float = _CONNECT_S
    start_timeout_s: float = _START_S

    @property
    def is_external(self) -> bool:
        """Whether something else loads the server's weights."""
        return self.weights == "external"

    def api_key(self) -> str:
        """The key, empty for none. Never part of a message. Raises UserError if it is not where the options say."""
        if self.api_key_file:
            try:
                return Path(self.api_key_file).expanduser().read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as exc:
                raise UserError(f"{SERVER} api_key_file {self.api_key_file} cannot be read.", hint="Name a text file.") from exc
        if self.api_key_env:
            key = os.environ.get(self.api_key_env, "")
            if not key:
                raise UserError(f"{SERVER} api_key_env names {self.api_key_env}, which is not set.", hint="Export it for the worker.")
            return key
        return ""


OWN_OPTIONS: Mapping[str, type] = {field.name: type(field.default) for field in fields(ServerOptions)}
"""The names that are ours, with their types; all others are arguments of the vLLM server that the worker starts."""


def parse_options(options: Mapping[str, Any]) -> tuple[ServerOptions, dict[str, Any]]:
    """Our own options, and the arguments of a server that the worker starts. Raises UserError for wrong options."""
    if "api_key" in options:
        raise UserError(f"{SERVER} api_key would be written into the run's record.", hint="Write api_key_file or api_key_env instead.")
    own = ServerOptions(**{name: typed(name, options[name], OWN_OPTIONS[name]) for name in OWN_OPTIONS if name in options})
    arguments = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
    _check(own)
    if own.url and arguments:
        name = min(arguments)
        raise UserError(
            f"The engine 'openai' has no option {name!r} for a server that runs already.",
            hint=f"{nearest(name, OWN_OPTIONS)} Arguments of vLLM belong on the command line that starts it.",
        )
    only_remote = ("model", "api_key_file", "api_key_env", "ca_file", "adapter_folder", "server_folder", "weights")
    for name in only_remote if not own.url else ():
        if name in options:
            raise UserError(f"{SERVER} {name} is for a server that runs already.", hint="Set url too, or leave it out.")
    return own, arguments


def typed(name: str, value: Any, wanted: type) -> Any:
    """`value`, known to be of the type `wanted`; a whole number may stand for a number. Raises UserError."""
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or isinstance(value, bool):
        raise UserError(f"{SERVER} {name} is {value!r}.", hint=f"Write a value of type {wanted.__name__}.")
    return value


def _check(own: ServerOptions) -> None:
    if own.url:
        parts = urlsplit(own.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UserError(f"{SERVER} url is {own.url!r}.", hint="Write http://host:port, without /v1.")
        if parts.username or parts.password or parts.query:
            raise UserError(f"{SERVER} url may hold no user, password or query.", hint="Write api_key_file or api_key_env instead.")
    if own.weights not in {"loaded", "external"}:
        raise UserError(f"{SERVER} weights is {own.weights!r}.", hint="Write 'loaded' or 'external'.")
    if own.api_key_file and own.api_key_env:
        raise UserError(f"{SERVER} api_key_file and api_key_env are both given.", hint="Leave one of them out.")
    if own.server_folder and not own.adapter_folder:
        raise UserError(f"{SERVER} server_folder names a folder that nothing is copied into.", hint="Set adapter_folder too.")
    for name, least in (("requests", 1), ("retries", 0)):
        if getattr(own, name) < least:
            raise UserError(f"{SERVER} {name} is {getattr(own, name)}.", hint=f"Write {least} or more.")
    for name in ("request_timeout_s", "connect_timeout_s", "start_timeout_s"):
        if not 0 < getattr(own, name) < float("inf"):
            raise UserError(f"{SERVER} {name} is {getattr(own, name)}.", hint="Write seconds above 0.")
