"""`echoswarm keys`: the keys that sign trajectories and rewards."""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from echo_ops.cli.context import read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import out, shown_time
from echo_runtime.trust import key_file, read_private_key, read_signers
from echo_schemas.errors import UserError
from echo_schemas.libraries import SIGNATURES, require_libraries
from echo_settings.trust import TrustSettings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from echo_bus.signatures import TrustedKey

_FOLDER = "keys"
_FILE = "signers.toml"
_WORKER = re.compile(r"[A-Za-z0-9*][A-Za-z0-9._*-]*")


def new(
    role: Annotated[Literal["worker", "reward", "offline", "rescore", "redrive"], typer.Argument(help="The role that signs with the key.")],
    name: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="The workers, or rewards, that it may speak for; by default any.")
    ] = None,
    config: Config = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the existing key; the old one stays trusted.")] = False,
) -> None:
    """Make a key. Raises UserError if one exists and `replace` is not given, for a name that nothing has, and for a file that cannot be
    read or written."""
    require_libraries("[trust]", "cryptography", install=SIGNATURES)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from echo_bus.signatures import key_id_of

    names = name or ["*"]
    for each in names:
        # The name of a worker becomes part of a file's name.
        if not each or (role == "worker" and not _WORKER.fullmatch(each)):
            raise UserError(f"{each!r} is no name of a {role}.", hint="Letters, digits, '.', '_' and '-'; '*' stands for any letters.")
    trust = read_settings(config).trust
    folder, signers = Path(trust.keys or _FOLDER), Path(trust.signers or _FILE)
    # A worker's process has the name of its worker. A reward's process does not have the name of its reward.
    path = key_file(folder, role, names[0] if role == "worker" and len(names) == 1 else "")
    if path.exists() and not replace:
        raise UserError(
            f"There is a key in {path}.", hint="With --replace another one takes its place; the old one stays trusted until you end it."
        )
    if signers.exists():
        # Raises for a broken file, before anything is appended to it.
        read_signers(signers)
    private = Ed25519PrivateKey.generate()
    public = private.public_key()
    entry = f'[[signer]]\nrole = "{role}"\nnames = {json.dumps(names)}\nkey = "{b64encode(public.public_bytes_raw()).decode()}"\n'
    try:
        draft = _draft(path, private)
        # A reader must know the key before a writer signs with it.
        _append(signers, entry)
        draft.replace(path)
    except OSError as exc:
        raise UserError(
            f"{exc.filename or path} cannot be written: {exc.strerror}.", hint="[trust] keys names a folder, signers a file."
        ) from exc
    out.print(f"{path}: the private key; it stays on this machine.")
    out.print(f"{signers}: the public key {key_id_of(public)} of {role} {', '.join(names)}; every process that reads needs this file.")
    if not (trust.keys and trust.signers):
        out.print(f'The run\'s file needs:\n\n\\[trust]\nkeys = "{folder}"\nsigners = "{signers}"\nsignatures = "required"')


def show(config: Config = None) -> None:
    """Print a table of the trusted keys."""
    require_libraries("[trust]", "cryptography", install=SIGNATURES)
    trust = read_settings(config).trust
    keys = read_signers(Path(trust.signers or _FILE))
    here = _private_keys(Path(trust.keys or _FOLDER))
    table = Table("key", "role", "speaks for", "from", "until", "private key", box=None, pad_edge=False)
    for key in keys.values():
        since, until = ("" if moment is None else shown_time(moment) for moment in (key.since_ms, key.until_ms))
        table.add_row(key.id, key.role, ", ".join(key.names), since, until, here.pop(key.id, ""))
    out.print(table)
    for key_id, file in here.items():
        out.print(f"{file}: its key {key_id} is not trusted: records signed with it are refused.")
    out.print(_said(trust, keys))


def _said(trust: TrustSettings, keys: Mapping[str, TrustedKey]) -> str:
    if trust.signatures == "off":
        return 'Signatures are not required; [trust] signatures = "required" makes them so.'.replace("[", r"\[")
    roles = {key.role for key in keys.values()}
    missing = [role for role in ("worker", "reward") if role not in roles]
    return f"Signatures are required, and no key of {' and '.join(missing)} is trusted." if missing else "Signatures are required."


def _private_keys(folder: Path) -> dict[str, str]:
    """The file of each key of this machine, by id."""
    from echo_bus.signatures import key_id_of

    return {key_id_of(read_private_key(path).public_key()): str(path) for path in sorted(folder.glob("*.key"))}


def _append(path: Path, entry: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if file.tell() else "") + entry)


def _draft(path: Path, private: Ed25519PrivateKey) -> Path:
    """The file that becomes `path`: never readable by others."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return draft
