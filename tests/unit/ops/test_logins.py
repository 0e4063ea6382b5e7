"""A login for each role: which is taken, and what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_embedded.state import EmbeddedState, write_state
from echo_runtime.logins import ADMIN, parse_properties, with_login, write_login
from echo_schemas.errors import UserError
from echo_settings import Settings, load_settings


@pytest.fixture
def logins(tmp_path: Path) -> Path:
    for role in ("worker", "operator"):
        write_login(tmp_path / "logins", role, {"sasl.username": f"echo.a.{role}", "sasl.password": f"{role}=secret"})
    return tmp_path / "logins"


def settings_of(**kafka: str) -> Settings:
    return load_settings(None, {f"ECHO_KAFKA__{key.upper()}": value for key, value in kafka.items()})


def test_each_role_connects_as_itself(logins: Path) -> None:
    settings = settings_of(bootstrap="b:1", logins=str(logins))
    assert with_login(settings, "worker.w1").kafka.client["sasl.username"] == "echo.a.worker"
    assert with_login(settings, "operator").kafka.client["sasl.password"] == "operator=secret"
    assert with_login(with_login(settings, "worker"), "worker").kafka.client["sasl.username"] == "echo.a.worker"
    assert (logins / "worker.properties").stat().st_mode & 0o077 == 0


def test_what_the_file_says_of_the_client_wins(logins: Path) -> None:
    settings = settings_of(bootstrap="b:1", logins=str(logins), client='{"sasl.username": "me"}')
    assert with_login(settings, "worker").kafka.client["sasl.username"] == "me"


def test_who_has_no_login_of_an_administrator_looks_as_an_operator(logins: Path) -> None:
    settings = settings_of(bootstrap="b:1", logins=str(logins))
    assert with_login(settings, ADMIN).kafka.client["sasl.username"] == "echo.a.operator"


def test_a_role_without_a_login_is_refused_with_those_there_are(logins: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no login for learner") as caught:
        with_login(settings_of(bootstrap="b:1", logins=str(logins)), "learner")
    assert "operator, worker" in (caught.value.hint or "")
    with pytest.raises(UserError, match="no login for learner") as caught:
        with_login(settings_of(bootstrap="b:1", logins=str(tmp_path / "nowhere")), "learner")
    assert "--secure" in (caught.value.hint or "")


def test_a_login_that_cannot_be_read_is_named_and_its_content_is_not(logins: Path) -> None:
    (logins / "worker.properties").write_text("# a comment\n\nsecret-without-a-name\n")
    with pytest.raises(UserError, match="line 3 is no name=value") as caught:
        with_login(settings_of(bootstrap="b:1", logins=str(logins)), "worker")
    assert "secret-without" not in str(caught.value)


def test_a_secret_of_a_login_may_lie_in_a_file(logins: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    with (logins / "worker.properties").open("a", encoding="utf-8") as file:
        file.write(f"sasl.password_file={secret}\n")
    settings = settings_of(bootstrap="b:1", logins=str(logins))
    with pytest.raises(UserError, match=r"worker.properties: The secret file .* of sasl.password_file cannot be read: No such file"):
        with_login(settings, "worker")
    secret.write_bytes(b"\xff")
    with pytest.raises(UserError, match="it is no file of text"):
        with_login(settings, "worker")
    secret.write_text("from a file\n")
    found = with_login(settings, "worker").kafka.client
    assert found["sasl.password"] == "from a file"
    assert "sasl.password_file" not in found


def test_without_logins_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_STATE_FOLDER", str(tmp_path))
    for bootstrap in ("b:1", "embedded"):
        settings = settings_of(bootstrap=bootstrap)
        assert with_login(settings, "worker") is settings


def test_a_secured_embedded_kafka_has_its_logins_by_either_of_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_STATE_FOLDER", str(tmp_path / "state"))
    state = EmbeddedState("127.0.0.1:7", None, str(tmp_path / "kafka"), 1, 0, (), is_secure=True)
    write_state(state)
    folder = state.logins("echo.demo")
    assert folder is not None
    write_login(folder, "worker", {"sasl.username": "w"})
    for bootstrap in ("embedded", "127.0.0.1:7"):
        assert with_login(settings_of(bootstrap=bootstrap), "worker").kafka.client == {"sasl.username": "w"}
    other = settings_of(bootstrap="127.0.0.1:8")
    assert with_login(other, "worker") is other


def test_properties_keep_what_follows_the_first_equals_sign() -> None:
    assert parse_properties("a = b=c\n#x\n") == {"a": "b=c"}
