"""The user's function that mends a letter, by file or module: `mends.py:shorten`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from echo_ops.redrive.letters import Letter
from echo_schemas.errors import UserError
from echo_schemas.records import Record

Mend = Callable[[Letter], Record | bytes | None]
"""The record or the bytes that a letter should have been; None leaves it where it is. `letter.value` is what was written."""


def load_mend(name: str) -> Mend:
    """The function `name` (`file.py:function` or `package.module:function`). Raises UserError for what is not there or no function."""
    source, _, attribute = name.partition(":")
    if not source or not attribute:
        raise UserError(f"{name!r} names no function.", hint="Write file.py:function, or package.module:function.")
    try:
        module = _from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError:
        raise UserError(f"There is no file {source}.", hint="The path is taken from the folder that the command runs in.") from None
    except Exception as exc:  # whatever importing the user's code raises
        raise UserError(f"{source} cannot be imported: {type(exc).__name__}: {exc}.") from exc
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UserError(f"{source} has no function {attribute!r}.", hint="It takes a letter and returns a record, bytes or None.")
    mend: Mend = found
    return mend


def _from_file(path: Path) -> object:
    if not path.is_file():
        raise FileNotFoundError(path)
    spec = importlib.util.spec_from_file_location(f"echo_mend_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses of the file look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
