"""Loads `Settings` from file and environment, with errors that name the file, the key, and what to write instead.

A later one wins: the model's default, the TOML file, `ECHO_<SECTION>__<KEY>` in the environment. A secret's key followed by `_file` names
a file that holds the secret, so that neither the configuration nor the process list contains it.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from echo_schemas.errors import UserError
from echo_settings.section import Section
from echo_settings.sections import Settings

_SectionT = TypeVar("_SectionT", bound=Section)

_PREFIX = "ECHO_"
_NESTING = "__"
_FILE_SUFFIX = "_file"
# librdkafka's secret properties.
_SECRET_PROPERTIES = (
    "sasl.password",
    "sasl.oauthbearer.assertion.private.key.passphrase",
    "sasl.oauthbearer.assertion.private.key.pem",
    "sasl.oauthbearer.client.secret",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.password",
)


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """The settings of a run. `path` None: defaults and environment only. Raises UserError, which says what to correct."""
    content = _read(path)
    where = "the environment" if path is None else str(path)
    _overlay(content, environ)
    read_secret_files(content)
    return _checked(content, Settings, where)


def load_sections(path: Path, model: type[_SectionT]) -> _SectionT:
    """Load another file than a run's, with the same errors. Raises UserError."""
    return _checked(_read(path), model, str(path))


def _checked(content: Mapping[str, Any], model: type[_SectionT], where: str) -> _SectionT:
    _refuse_unknown(content, model, where, ())
    try:
        return model.model_validate(content)
    except ValidationError as exc:
        raise UserError(_explain(exc, where)) from None


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no configuration file {path}.", hint="Name one with --config FILE.") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise UserError(f"The configuration file {path} cannot be read: {getattr(exc, 'strerror', exc)}.") from exc
    except tomllib.TOMLDecodeError as exc:
        raise UserError(f"{path} is not valid TOML: {exc}.") from exc
    except RecursionError as exc:
        raise UserError(f"{path} is not valid TOML: it is nested too deeply.") from exc


def _overlay(content: dict[str, Any], environ: Mapping[str, str]) -> None:
    """`ECHO_KAFKA__BOOTSTRAP=…` sets [kafka] bootstrap. Names without a double underscore are ignored."""
    for name, value in environ.items():
        if not name.startswith(_PREFIX) or _NESTING not in name:
            continue
        *sections, key = name.removeprefix(_PREFIX).lower().split(_NESTING)
        node = content
        for section in sections:
            below = node.setdefault(section, {})
            if not isinstance(below, dict):
                raise UserError(f"{name} sets something below [{section}], which is not a section.")
            node = below
        if sections[-1:] == ["client"]:
            # Environment names cannot hold dots: SASL_PASSWORD is sasl.password.
            stem, suffix = (key.removesuffix(_FILE_SUFFIX), _FILE_SUFFIX) if key.endswith(_FILE_SUFFIX) else (key, "")
            key = stem.replace("_", ".") + suffix
        node[key] = _parse(value)


def _parse(value: str) -> Any:
    """The value as JSON (a number, boolean, list or object), else as text."""
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value


def read_secret_files(node: dict[str, Any]) -> None:
    """Replace `password_file = "/path"` by `password = <content>`, in every section. Raises UserError."""
    for key in list(node):
        value = node[key]
        if isinstance(value, dict):
            read_secret_files(value)
        elif key.endswith(_FILE_SUFFIX) and key.removesuffix(_FILE_SUFFIX) in {"password", "secret", *_SECRET_PROPERTIES}:
            del node[key]
            try:
                node[key.removesuffix(_FILE_SUFFIX)] = Path(value).read_text(encoding="utf-8").rstrip("\n")
            except (OSError, UnicodeDecodeError, TypeError) as exc:
                why = getattr(exc, "strerror", None) or "it is no file of text"
                raise UserError(f"The secret file {value} of {key} cannot be read: {why}.") from exc


def _refuse_unknown(content: Mapping[str, Any], model: type[BaseModel], where: str, path: tuple[str, ...]) -> None:
    fields = model.model_fields
    for key, value in content.items():
        if key not in fields:
            section = f"[{'.'.join(path)}] " if path else ""
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known here: {', '.join(fields)}."
            kind = "key" if path else "section"
            raise UserError(f"{where}: {section}has no {kind} {key!r}.", hint=hint)
        below = fields[key].annotation
        if isinstance(value, dict) and isinstance(below, type) and typing.get_origin(below) is None and issubclass(below, BaseModel):
            _refuse_unknown(value, below, where, (*path, key))
        item = repeated_section(below)
        if item is not None and isinstance(value, dict):
            name = ".".join((*path, key))
            raise UserError(f"{where}: [{name}] is a section that can be repeated.", hint=f"Write [[{name}]], with two brackets.")
        if item is not None and isinstance(value, list):
            for number, each in enumerate(value):
                if isinstance(each, dict):
                    _refuse_unknown(each, item, where, (*path, f"{key} {each.get('name', number + 1)}"))


def repeated_section(annotation: Any) -> type[BaseModel] | None:
    """The model of a section that a file may hold several times, as `[[name]]`; None for other annotations."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is not tuple or not (isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel)):
        return None
    return arguments[0]


def _explain(exc: ValidationError, where: str) -> str:
    """One sentence per problem, without the value, because it may be a secret."""
    problems = []
    for error in exc.errors(include_url=False, include_input=False):
        place = [str(part + 1) if isinstance(part, int) else part for part in error["loc"]]
        key = f"[{'.'.join(place[:-1])}] {place[-1]}: " if len(place) > 1 else (f"[{place[0]}]: " if place else "")
        problems.append(f"{key}{error['msg'].removeprefix('Value error, ')}")
    return f"{where}: {'; '.join(problems)}."
