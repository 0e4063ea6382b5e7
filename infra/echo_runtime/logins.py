"""A login for each role: the folder `[kafka] logins` holds a file of client properties per role, `<role>.properties`. A secret's property
followed by `_file` names the file that holds the secret, as in [kafka.client].

A secured embedded Kafka has such a folder for each namespace; the settings need not name it.
"""

from __future__ import annotations

from pathlib import Path

from echo_schemas.errors import UserError
from echo_settings import Settings
from echo_settings.load import read_secret_files

ADMIN = "admin"
"""The login that may create topics, users and access lists; it is no role of the pipeline."""


def with_login(settings: Settings, role: str) -> Settings:
    """`settings` with the client properties of `role`; `[kafka.client]` wins. Unchanged without a folder of logins.

    Raises UserError if the folder has no login of that role, or one that cannot be read.
    """
    folder = _folder_of(settings)
    if folder is None:
        return settings
    role = role.partition(".")[0]
    path = folder / f"{role}.properties"
    if role == ADMIN and not path.exists():
        # Without the admin's login a person may read with the operator's; the cluster refuses all else.
        path = folder / "operator.properties"
    try:
        properties = parse_properties(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = sorted(file.stem for file in folder.glob("*.properties"))
        raise UserError(
            f"There is no login for {role} in {folder}.",
            hint=f"It has {', '.join(known)}." if known else "`echoswarm kafka up --secure -c FILE` makes them for its namespace.",
        ) from None
    except (OSError, ValueError) as exc:
        raise UserError(f"The login {path} cannot be read: {exc}.") from exc
    try:
        read_secret_files(properties)
    except UserError as exc:
        raise UserError(
            f"{path}: {exc.message}",
            hint=f"It must be readable for {role}; a relative path starts at the working folder.",
        ) from exc
    kafka = settings.kafka.model_copy(update={"client": {**properties, **settings.kafka.client}})
    return settings.model_copy(update={"kafka": kafka})


def parse_properties(text: str) -> dict[str, str]:
    """Parse lines `name=value`; ignores empty lines and lines that begin with #. Raises ValueError."""
    found = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip() and not line.startswith("#"):
            name, equals, value = line.partition("=")
            if not equals:
                raise ValueError(f"line {number} is no name=value")
            found[name.strip()] = value.strip()
    return found


def write_login(folder: Path, role: str, properties: dict[str, str]) -> None:
    """Write a role's file, readable by its owner only. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{role}.properties"
    path.touch(mode=0o600)
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()), encoding="utf-8")


def _folder_of(settings: Settings) -> Path | None:
    if settings.kafka.logins:
        return Path(settings.kafka.logins)
    from echo_embedded import resolve_logins

    return resolve_logins(settings.kafka.bootstrap, settings.kafka.namespace)
