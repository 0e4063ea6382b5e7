"""Engines by name: the built-in ones, or the user's own by import path. Heavy modules load when one is opened."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_rollout.engines.engine import Engine, EngineConfig, check_capabilities, unproved
from echo_rollout.engines.vllm_arguments import capabilities_of
from echo_schemas.errors import UserError
from echo_schemas.libraries import LEARNER, require_libraries
from echo_schemas.records import WeightKind
from echo_settings.sections import RolloutSettings
from echo_tasks.catalogue import import_object
from echo_tasks.options import nearest
from echo_tasks.prompts import has_template


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """Where an engine's code is, the libraries it needs, what `pip install` takes for them, and what checks its options without them.
    `only_claims`: it cannot prove which version it serves. `sends_messages`: prompts go through the base's chat template."""

    path: str
    needs: tuple[str, ...]
    install: str
    options: str = ""
    only_claims: bool = False
    sends_messages: bool = False


_ENGINES = {
    "vllm": _BuiltIn(
        "echo_rollout.engines.catalogue:open_vllm",
        ("vllm", "transformers"),
        "'echoswarm[rollout]', or 'echoswarm[rollout-cpu]' where there is no GPU; or set [rollout] engine = \"transformers\".",
    ),
    "transformers": _BuiltIn(
        "echo_rollout.engines.transformers_engine:TransformersEngine",
        ("torch", "transformers", "peft", "safetensors"),
        LEARNER,
        "echo_rollout.engines.transformers_engine:parse_device",
    ),
    "openai": _BuiltIn(
        "echo_rollout.engines.openai_engine:OpenAIEngine",
        ("httpx", "transformers"),
        "httpx transformers; without url in [rollout.options] also 'echoswarm[rollout]' or 'echoswarm[rollout-cpu]'.",
        "echo_rollout.engines.openai_options:parse_options",
    ),
    "parallax": _BuiltIn(
        "echo_rollout.engines.parallax_engine:ParallaxEngine",
        ("httpx", "transformers"),
        "httpx transformers",
        "echo_rollout.engines.parallax_options:parse_parallax_options",
        only_claims=True,
        sends_messages=True,
    ),
}
# What `parallax` also needs if it gives the cluster its weights.
_BLOCKS = _BuiltIn("", ("lattica",), 'lattica; or set weights = "external" if something else refits the cluster.')
# What `openai` also needs if it starts the server.
_OWN_SERVER = _BuiltIn("", ("vllm",), "'echoswarm[rollout]', or set url = \"http://host:port\".")
_MEMBERS = ("capabilities", "installed", "in_use", "start", "install", "generate", "close")


def open_engine(name: str, config: EngineConfig) -> Engine:
    """The engine called `name`, not started yet. Your own is `package.module:Class` or `file.py:Class`, called with an EngineConfig.

    Raises UserError for an unknown name, if a library it needs is not installed, or if the object is no engine.
    """
    check_devices(name, config.devices)
    engine: Engine = check_engine(name, config.options)(config)
    # On the class: a property may not be ready before `start`.
    missing = [member for member in _MEMBERS if not hasattr(type(engine), member) and not hasattr(engine, member)]
    if missing:
        raise UserError(f"{name!r} is no engine: it lacks {', '.join(missing)}.", hint="See docs/engines.md.")
    return engine


def is_elsewhere(options: Mapping[str, Any]) -> bool:
    """Whether an engine with these options asks servers that it does not start itself."""
    return bool(options.get("url"))


def check_promises(name: str, rollout: RolloutSettings, base: Path | None) -> None:
    """Raise UserError for what the engine called `name` refuses when it is started. `base`: the model's folder, if it is there."""
    built_in = _ENGINES.get(name)
    if built_in is not None and built_in.only_claims and rollout.unproved_versions == "refuse":
        raise unproved(name)
    if built_in is not None and built_in.sends_messages and base is not None and not has_template(base):
        raise UserError(
            f"The engine {name!r} sends prompts as chat messages, and {base} has no chat template.",
            hint="Save the template that the cluster uses into this folder (tokenizer.chat_template).",
        )
    if name == "vllm":
        # What its log-probabilities are of hangs on its options alone.
        of_any_model = EngineConfig(
            base=Path(), kind=WeightKind.FULL, dtype="", max_length=1, lora_rank=0, concurrency=1, options=rollout.options
        )
        check_capabilities(capabilities_of(of_any_model), rollout)


def check_engine(name: str, options: Mapping[str, Any]) -> Callable[[EngineConfig], Engine]:
    """The class or function that makes the engine called `name`, without importing its library. Raises UserError as `open_engine`, and for
    wrong options, as far as that shows.
    """
    built_in = _ENGINES.get(name)
    if built_in is None and ":" not in name:
        raise UserError(f"There is no engine {name!r}.", hint=f"{nearest(name, _ENGINES)} Your own is named 'package.module:Class'.")
    if built_in is not None:
        _check_installed(name, built_in)
        if name == "openai" and not is_elsewhere(options):
            _check_installed(name, _OWN_SERVER)
        if name == "parallax" and options.get("weights") != "external":
            _check_installed(name, _BLOCKS)
        if built_in.options:
            import_object(built_in.options)(options)
        # Imported when it is called: that takes seconds.
        return lambda config: _checked(name, import_object(built_in.path))(config)
    return _checked(name, import_object(name))


def check_devices(name: str, devices: Sequence[object]) -> None:
    """Raise UserError if the built-in engine called `name` cannot split a model over `devices` of [rollout]."""
    if devices and name in _ENGINES and name != "vllm":
        raise UserError(
            f"The engine {name!r} does not split a model over [rollout] devices.", hint='Leave devices out, or set engine = "vllm".'
        )


def _checked(name: str, made: Any) -> Callable[[EngineConfig], Engine]:
    if not callable(made):
        raise UserError(f"{name!r} is no engine but {type(made).__name__}.", hint="Name a class that takes an EngineConfig.")
    found: Callable[[EngineConfig], Engine] = made
    return found


def _check_installed(name: str, built_in: _BuiltIn) -> None:
    require_libraries(f"The engine {name!r}", *built_in.needs, install=built_in.install)


def open_vllm(config: EngineConfig) -> Engine:
    """vLLM in processes of its own where there is a GPU, else in this one; `in_process` in [rollout.options] decides instead.

    Raises UserError if `in_process` is not true or false.
    """
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
        importlib.import_module(_ENGINES[name].path.partition(":")[0])
