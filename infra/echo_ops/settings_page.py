"""The page of all settings (docs/settings.md), made from the models that read them. Pure."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from echo_settings import Settings
from echo_settings.load import repeated_section
from echo_settings.section import Section

_HEAD = """\
# Every setting

Made by `echoswarm settings` from the models that read the file; do not edit it by hand. How they are used: [running.md](running.md).

One TOML file describes a run. Every key has a default, so a file says only what differs. Unknown sections and keys are refused with the
nearest known name, and values that do not go together with what to write instead. Later wins: the default, the file, the environment
(`ECHO_<SECTION>__<KEY>`, as in `ECHO_KAFKA__BOOTSTRAP` or `ECHO_POLICY__LORA__R`; numbers, lists and tables are written as JSON). Of a
password, `<key>_file` names a file that holds it.
"""
_KINDS = {str: "text", int: "whole number", float: "number", bool: "true or false", SecretStr: "secret text"}
_ROW_OF_A_REWARD = "| `<name of a reward>` | number | {} | Its weight in a sample's total. |"


def settings_page() -> str:
    """The whole page: a table a section, a row a key, in the order of the models."""
    return "\n".join([_HEAD, *(_section(name, field) for name, field in _sections(Settings, ""))])


def _sections(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """Every table of a file with its name; a repeated table follows the table that it belongs to."""
    for name, field in model.model_fields.items():
        if not prefix or repeated_section(field.annotation) is not None:
            yield f"{prefix}{name}", field
        below = _model_of(field)
        if not prefix and below is not None:
            yield from _sections(below, f"{name}.")


def _section(name: str, field: FieldInfo) -> str:
    title = name
    if (repeated := repeated_section(field.annotation)) is not None:
        rows, text, title = list(_rows(repeated, "")), repeated.__doc__, f"[{name}]"
    elif (below := _model_of(field)) is None:
        # A section whose keys are the user's own names.
        default = ", ".join(f"`{key} = {value}`" for key, value in field.get_default(call_default_factory=True).items())
        rows, text = [_ROW_OF_A_REWARD.format(default)], _texts(Settings).get(name)
    else:
        rows, text = list(_rows(below, "")), below.__doc__
    sentence = _sentence((text or "").partition(": ")[2])
    table = "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])
    return f"## [{title}]\n\n{sentence[0].upper()}{sentence[1:]}\n\n{table}\n"


def _texts(model: type[BaseModel]) -> dict[str, str]:
    """By key, the text below it in the source. Read here, not by pydantic, which would read it at each start of every process."""
    found: dict[str, str] = {}
    for each in model.__mro__[::-1]:
        if issubclass(each, Section):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(definition, ast.ClassDef)
            for key, text in pairwise(definition.body):
                if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                    found[ast.unparse(key.target)] = inspect.cleandoc(str(text.value.value))
    return found


def _rows(model: type[BaseModel], prefix: str) -> Iterator[str]:
    texts = _texts(model)
    for key, field in model.model_fields.items():
        below = _model_of(field)
        if below is not None:
            yield from _rows(below, f"{prefix}{key}.")
            continue
        if repeated_section(field.annotation) is not None:
            continue
        yield f"| `{prefix}{key}` | {_type(field)} | {_default(field)} | {_sentence(texts.get(key))} |"


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _type(field: FieldInfo) -> str:
    kind = _kind(field.annotation)
    bounds = " and ".join(text for constraint in field.metadata if (text := _bound(constraint)))
    return f"{kind} {bounds}" if bounds else kind


def _kind(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        choices = [f"`{json.dumps(choice)}`" for choice in arguments]
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if origin in {types.UnionType, typing.Union}:
        return _kind(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple:
        return f"list of {_kind(arguments[0])}s"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    return _KINDS[annotation]


def _bound(constraint: Any) -> str:
    match constraint:
        case annotated_types.Ge(ge=value):
            return f"≥ {value}"
        case annotated_types.Gt(gt=value):
            return f"> {value}"
        case annotated_types.Le(le=value):
            return f"≤ {value}"
        case annotated_types.Lt(lt=value):
            return f"< {value}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, SecretStr):
        value = value.get_secret_value()
    if isinstance(value, dict):
        return "`{}`"
    return f"`{json.dumps(value)}`"


def _sentence(text: str | None) -> str:
    """`text` on one line, for a cell of a table."""
    return " ".join((text or "").split()).replace("|", "\\|")
