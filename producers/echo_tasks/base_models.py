"""The model that a run starts from: a folder, or one of the demos' tiny models, made when it is first needed and kept.

A model is made in a process of its own, so that the caller's random numbers and threads stay as they are; a lock admits one maker, and one
rename publishes the result.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo_schemas.errors import UserError
from echo_tasks.options import nearest

logger = logging.getLogger(__name__)

DEMO_PREFIX = "demo:"
DEMO_MODELS = {
    "demo:tiny-qwen3": "reverse",
    "demo:tiny-qwen3-sort": "sort",
    "demo:tiny-qwen3-sokoban": "sokoban",
    "demo:tiny-qwen3-knights-knaves": "knights-knaves",
}
"""Name to what its warm start practised."""
# Another recipe makes another model: raise it with every change of `tiny_qwen3` and of what a `practice` shows.
RECIPE = 4
_CACHE_VARIABLE = "ECHO_CACHE_FOLDER"
_MODEL_CONFIG = "config.json"


def resolve_base(name: str, cache: Path | None = None) -> Path:
    """The folder of the base model `name`. `cache` overrides the user's cache folder.

    Raises UserError if there is no such demo model, no such folder, no model in it, or if the demo's model cannot be made or kept.
    """
    if name.startswith(DEMO_PREFIX):
        return _demo_model(name, cache or _cache_folder())
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"There is no base model folder {name}.", hint="Set [policy] base to a folder with config.json and the weights.")
    if not (folder / _MODEL_CONFIG).is_file():
        raise UserError(f"{name} is no model folder: it has no {_MODEL_CONFIG}.", hint="Set [policy] base to one.")
    return folder


def is_made(name: str) -> bool:
    """Whether `resolve_base` finds the model without making it."""
    return name not in DEMO_MODELS or (_folder_of(name, _cache_folder()) / _MODEL_CONFIG).is_file()


def _folder_of(name: str, cache: Path) -> Path:
    return cache / "models" / f"{name.removeprefix(DEMO_PREFIX)}-{RECIPE}"


def _demo_model(name: str, cache: Path) -> Path:
    practice = DEMO_MODELS.get(name)
    if practice is None:
        raise UserError(f"There is no demo model {name!r}.", hint=nearest(name, DEMO_MODELS))
    folder = _folder_of(name, cache)
    if (folder / _MODEL_CONFIG).is_file():
        return folder
    with _locked(folder):
        if not (folder / _MODEL_CONFIG).is_file():
            _make(practice, folder)
    return folder


def _make(practice: str, folder: Path) -> None:
    logger.info("Making the demo's base model (some seconds, once): %s", folder)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    # One thread: the order of additions, and with it every byte, is then the same each time.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "echo_tasks.tiny_qwen3", practice, str(staging)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise UserError(f"The demo's base model could not be made: {last}", hint="It needs torch and transformers: make setup.")
        # A folder without a configuration is no model, for example one that was deleted in part.
        shutil.rmtree(folder, ignore_errors=True)
        staging.rename(folder)
    except BaseException:  # after any error, also an interrupt, no half-made model stays
        shutil.rmtree(staging, ignore_errors=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One maker at a time, on this machine; the others wait and find it made."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = (folder.parent / f".{folder.name}.lock").open("w")
    except OSError as exc:
        raise UserError(
            f"The demo's base model cannot be kept in {folder.parent}: {exc.strerror}.", hint=f"Name a cache folder with {_CACHE_VARIABLE}."
        ) from exc
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cache_folder() -> Path:
    own = os.environ.get(_CACHE_VARIABLE)
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echoswarm"
