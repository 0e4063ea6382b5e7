"""The settings of a run for one kind of its workers. Pure."""

from __future__ import annotations

import difflib

from echo_schemas.errors import UserError
from echo_settings.pool import PoolSettings
from echo_settings.section import Section
from echo_settings.sections import Settings


def settings_of_kind(settings: Settings, kind: str) -> Settings:
    """The settings of a worker of `kind`: [rollout] with that kind's engine, price, number of groups and options; "" changes nothing.

    Raises UserError for a kind that the file does not describe.
    """
    if not kind:
        return settings
    kinds = {each.name: each for each in settings.rollout.pool}
    found = kinds.get(kind)
    if found is None:
        if not kinds:
            hint = "The file has no [[rollout.pool]]; leave --kind out, or describe the kind there."
        else:
            hint = f"Did you mean {difflib.get_close_matches(kind, kinds, n=1, cutoff=0.0)[0]!r}?"
        raise UserError(f"There is no kind of worker {kind!r}.", hint=hint)
    changed: dict[str, Section] = {"rollout": settings.rollout.model_copy(update=_changes(settings, found))}
    if found.drain_s is not None:
        changed["run"] = settings.run.model_copy(update={"drain_s": found.drain_s})
    return settings.model_copy(update=changed)


def kinds_of(settings: Settings) -> tuple[tuple[str, Settings], ...]:
    """Name and settings of every kind that `echoswarm up` starts; one without a name if the file describes no pool."""
    if not settings.rollout.pool:
        return (("", settings),)
    return tuple((each.name, settings_of_kind(settings, each.name)) for each in settings.rollout.pool)


def _changes(settings: Settings, kind: PoolSettings) -> dict[str, object]:
    rollout = settings.rollout
    engine = rollout.engine if kind.engine is None else kind.engine
    # Another engine has other arguments than those of [rollout.options].
    shared = rollout.options if engine == rollout.engine else {}
    return {
        "engine": engine,
        "workers": kind.workers,
        "price_per_hour": rollout.price_per_hour if kind.price_per_hour is None else kind.price_per_hour,
        "price_file": _price_file(settings, kind),
        "groups_in_flight": rollout.groups_in_flight if kind.groups_in_flight is None else kind.groups_in_flight,
        "options": {**shared, **kind.options},
        "devices": (rollout.devices if engine == rollout.engine else ()) if kind.devices is None else kind.devices,
    }


def _price_file(settings: Settings, kind: PoolSettings) -> str:
    """The kind's own price wins over the file of [rollout]."""
    if kind.price_file is not None:
        return kind.price_file
    return settings.rollout.price_file if kind.price_per_hour is None else ""
