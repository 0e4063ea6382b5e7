"""Engines by name: `vllm`, `transformers`, or the user's own by import path. Heavy modules load when one is opened."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from echo_rollout.engines.engine import Engine, EngineConfig
from echo_schemas.errors import UserError

_ENGINES = {
    "vllm": "echo_rollout.engines.vllm_inprocess:VllmInProcess",
    "transformers": "echo_rollout.engines.transformers_engine:TransformersEngine",
}


def engine_names() -> tuple[str, ...]:
    """The built-in engines."""
    return tuple(_ENGINES)


def open_engine(name: str, config: EngineConfig) -> Engine:
    """The engine called `name`, not started yet. Your own is `package.module:Class`, called with an EngineConfig.

    Raises UserError for an unknown name, or if a library it needs is not installed.
    """
    path = _ENGINES.get(name, name)
    module, _, attribute = path.partition(":")
    if not attribute:
        near = difflib.get_close_matches(name, _ENGINES, n=1, cutoff=0.0)[0]
        raise UserError(f"There is no engine {name!r}.", hint=f"Did you mean {near!r}? Your own is named 'package.module:Class'.")
    try:
        made: Any = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as exc:
        raise UserError(
            f"The engine {name!r} needs the module {exc.name!r}, which is not installed.", hint="See the extras in pyproject.toml."
        ) from exc
    except AttributeError:
        raise UserError(f"The module {module} has no {attribute!r}.") from None
    engine: Engine = made(config)
    return engine


def prefetch(name: str) -> None:
    """Import what the engine needs, which takes seconds, before it is opened. Unknown names are left to `open_engine`."""
    if name == "vllm":
        importlib.import_module("echo_rollout.engines.vllm_inprocess").prefetch()
    elif name in _ENGINES:
        importlib.import_module(_ENGINES[name].partition(":")[0])
