"""What a command may ask of the machine and of the registry that are there."""

from __future__ import annotations

import os
from pathlib import Path

from echo_schemas.naming import Namespace
from echo_settings import Settings


def existing_part(folder: Path) -> Path:
    """`folder`, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def memory_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ask_registry(settings: Settings) -> None:
    """Raise what the registry of the settings says where it does not know our schemas, or does not answer: UserError, TransportError."""
    from echo_schemas.registry import HttpRegistry, subjects_of
    from echo_schemas.schemas import newest

    subjects = subjects_of(Namespace(settings.kafka.namespace).topic)
    HttpRegistry(settings.registry.url, subjects, settings.registry.client_properties()).id_of(newest("trajectory"))
