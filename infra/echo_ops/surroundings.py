"""Questions of several commands to this machine and to the registry."""

from __future__ import annotations

import os
from pathlib import Path

from echo_schemas.naming import Namespace
from echo_settings import Settings


def existing_part(folder: Path) -> Path:
    """`folder`, or the nearest existing one above it."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ask_registry(settings: Settings) -> None:
    """Raise UserError or TransportError if the registry of the settings does not know our schemas, or does not answer."""
    from echo_schemas.registry import HttpRegistry, subjects_of
    from echo_schemas.schemas import newest

    subjects = subjects_of(Namespace(settings.kafka.namespace).topic)
    HttpRegistry(settings.registry.url, subjects, settings.registry.client_properties()).id_of(newest("trajectory"))
