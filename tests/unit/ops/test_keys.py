"""Keys as files: who signs with which, whom a reader believes, and what is said where one is missing."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from echo_bus.clock import ManualClock
from echo_ops.cli.main import app
from echo_ops.cli.output import out
from echo_runtime.trust import SignersList, open_signer, open_verifier, read_signers
from echo_schemas.errors import UserError
from echo_settings import load_settings
from echo_settings.trust import TrustSettings


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(out, "width", 200)
    return tmp_path


def keys(*words: str) -> str:
    found = CliRunner().invoke(app, ["keys", *words])
    assert found.exit_code == 0, found.output
    return found.output


def trust(**changes: Any) -> TrustSettings:
    return TrustSettings(**{"keys": "keys", "signers": "signers.toml", "signatures": "required", **changes})


def test_a_key_is_made_and_trusted_and_nobody_else_may_read_it(here: Path) -> None:
    said = keys("new", "worker", "gpu-7")
    assert 'signatures = "required"' in said
    assert (here / "keys" / "worker.gpu-7.key").stat().st_mode & 0o077 == 0
    (key,) = read_signers(here / "signers.toml").values()
    assert (key.role, key.names, key.since_ms) == ("worker", ("gpu-7",), None)
    signer = open_signer(trust(), "worker.gpu-7")
    assert signer is not None
    assert signer.key_id == key.id
    shown = keys("show")
    assert key.id in shown
    assert "keys/worker.gpu-7.key" in shown


def test_a_process_has_its_own_key_or_its_roles(here: Path) -> None:
    keys("new", "worker")
    keys("new", "worker", "gpu-7")
    own, shared = (open_signer(trust(), f"worker.{name}") for name in ("gpu-7", "gpu-8"))
    assert own is not None
    assert shared is not None
    assert own.key_id != shared.key_id
    assert read_signers(here / "signers.toml")[shared.key_id].names == ("*",)


def test_a_second_key_replaces_the_first_only_when_told_and_both_are_trusted(here: Path) -> None:
    keys("new", "reward", "exact")
    found = CliRunner().invoke(app, ["keys", "new", "reward", "exact"])
    assert found.exit_code == 2
    assert "--replace" in found.output
    keys("new", "reward", "exact", "--replace")
    assert len(read_signers(here / "signers.toml")) == 2


@pytest.mark.parametrize("role", ["worker.gpu-7", "reward", "offline"])
def test_a_writer_without_a_key_is_told_how_to_make_one(here: Path, role: str) -> None:
    with pytest.raises(UserError, match=f"no key for {role}") as caught:
        open_signer(trust(), role)
    assert "echoswarm keys new" in (caught.value.hint or "")


@pytest.mark.parametrize("role", ["learner", "feeder", "operator", "redrive"])
def test_who_writes_nothing_that_is_signed_needs_no_key(here: Path, role: str) -> None:
    assert open_signer(trust(), role) is None


def test_only_readers_look_for_signers(here: Path) -> None:
    for role in ("worker.gpu-7", "feeder"):
        assert open_verifier(trust(), role) is None
    for role in ("learner", "reward", "replay", "operator"):
        with pytest.raises(UserError, match="no file of signers"):
            open_verifier(trust(), role)
        assert open_verifier(trust(signatures="off"), role) is None


def test_a_key_that_is_none_is_named(here: Path) -> None:
    keys("new", "worker")
    path = here / "keys" / "worker.key"
    path.write_text("rubbish")
    with pytest.raises(UserError, match=r"worker\.key cannot be read"):
        open_signer(trust(), "worker")
    path.write_bytes(Ed448PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(UserError, match="none of Ed25519"):
        open_signer(trust(), "worker")


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('role = "worker"\nnames = ["*"]\nkey = "abc"', "no public key"),
        ('role = "learner"\nnames = ["*"]\nkey = ""', "role"),
        ('role = "worker"\nnames = []\nkey = ""', "sign for no name"),
        ('role = "worker"\nnames = ["*"]\nkey = ""\nsince = 2026-01-01T00:00:00', "since"),
        ('role = "worker"\nnames = ["*"]\nkey = ""\nsince = 2026-01-02T00:00:00Z\nuntil = 2026-01-01T00:00:00Z', "never count"),
        ('role = "worker"\nnames = ["*"]\nkye = ""', "Did you mean 'key'"),
    ],
)
def test_an_entry_that_makes_no_sense_is_named(here: Path, entry: str, says: str) -> None:
    (here / "signers.toml").write_text(f"[[signer]]\n{entry}\n")
    with pytest.raises(UserError) as caught:
        read_signers(here / "signers.toml")
    assert says in str(caught.value)


def test_one_key_has_one_entry(here: Path) -> None:
    keys("new", "worker")
    path = here / "signers.toml"
    path.write_text(path.read_text() + path.read_text())
    with pytest.raises(UserError, match="the same key"):
        read_signers(path)


def test_a_key_has_its_time(here: Path) -> None:
    keys("new", "worker")
    path = here / "signers.toml"
    since = datetime(2026, 1, 1, tzinfo=UTC)
    path.write_text(f"{path.read_text()}since = {since.isoformat()}\nuntil = {(since + timedelta(days=1)).isoformat()}\n")
    (key,) = read_signers(path).values()
    assert key.since_ms == since.timestamp() * 1000
    assert key.until_ms is not None
    assert key.until_ms - key.since_ms == 86_400_000
    assert "2026-01-02 00:00:00" in keys("show")


def test_the_file_is_read_anew_when_it_has_changed_and_kept_when_it_is_broken(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys("new", "worker", "a")
    clock, path = ManualClock(), here / "signers.toml"
    known = SignersList(path, clock)
    first = known()
    assert known() is first
    keys("new", "worker", "b")
    assert known() is first
    clock.advance(10)
    assert len(known()) == 2
    path.write_text("[[signer]]\nrubbish")
    clock.advance(10)
    with caplog.at_level(logging.ERROR):
        assert len(known()) == 2
    assert "keys that were trusted before stay" in caplog.text


def test_required_signatures_need_signers() -> None:
    with pytest.raises(UserError, match="needs signers"):
        load_settings(None, {"ECHO_TRUST__SIGNATURES": "required"})
