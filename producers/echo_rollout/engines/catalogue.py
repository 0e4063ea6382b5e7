"""Engines by name: `vllm`, `transformers`, or the user's own by import path. Heavy modules load when one is opened."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import Any

from echo_rollout.engines.engine import Engine, EngineConfig
from echo_schemas.errors import UserError

_ENGINES = {
    "vllm": "echo_rollout.engines.catalogue:open_vllm",
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


def open_vllm(config: EngineConfig) -> Engine:
    """vLLM in processes of its own where there is a GPU, else in this one; `in_process` in [rollout.options] decides instead.

    Raises UserError if vLLM is not installed, or `in_process` is not true or false.
    """
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            "The engine 'vllm' needs vLLM, which is not installed.", hint='Install it, or set [rollout] engine = "transformers".'
        )
    arguments = importlib.import_module("echo_rollout.engines.vllm_arguments")
    in_process = config.options.get(arguments.IN_PROCESS)
    if in_process is None:
        in_process = not arguments.has_gpu()
    if not isinstance(in_process, bool):
        raise UserError(f"[rollout.options] in_process is {in_process!r}.", hint="Write true or false.")
    if in_process:
        engine: Engine = importlib.import_module("echo_rollout.engines.vllm_inprocess").VllmInProcess(config)
    else:
        engine = importlib.import_module("echo_rollout.engines.vllm_async").VllmAsync(config)
    return engine


def prefetch(name: str) -> None:
    """Import what the engine needs, which takes seconds, before it is opened. Unknown names are left to `open_engine`."""
    if name == "vllm":
        importlib.import_module("echo_rollout.engines.vllm_inprocess").prefetch()
    elif name in _ENGINES:
        importlib.import_module(_ENGINES[name].partition(":")[0])
