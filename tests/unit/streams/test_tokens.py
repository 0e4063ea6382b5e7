"""Tokens for Faust's client: asked for once, again before they end, and never said."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from echo_bus.clock import ManualClock
from echo_schemas.errors import UserError
from echo_streams.security import login_of
from echo_streams.tokens import Issuer, TokenSource

CLIENT = {
    "security.protocol": "SASL_PLAINTEXT",
    "sasl.mechanism": "OAUTHBEARER",
    "sasl.oauthbearer.method": "oidc",
    "sasl.oauthbearer.client.id": "reward",
    "sasl.oauthbearer.client.secret": "hush",
    "sasl.oauthbearer.token.endpoint.url": "https://issuer/token",
    "sasl.oauthbearer.scope": "kafka",
    "https.ca.location": "probe",
}


class Asked(TokenSource):
    """Answers without a network."""

    def __init__(self, *answers: dict[str, Any] | OSError) -> None:
        self.clock = ManualClock()
        super().__init__(Issuer(url="https://issuer/token", client_id="reward", client_secret="hush"), self.clock)
        self.answers = list(answers)

    def _ask(self) -> dict[str, Any]:
        answer = self.answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def test_a_token_is_kept_until_its_end_is_near() -> None:
    source = Asked({"access_token": "a", "expires_in": 100}, {"access_token": "b", "expires_in": 100})
    assert [source.token(), source.token()] == ["a", "a"]
    source.clock.advance(79)
    assert source.token() == "a"
    source.clock.advance(2)
    assert source.token() == "b"


@pytest.mark.parametrize("answer", [OSError("HTTP Error 401"), {"error": "invalid_client"}])
def test_an_issuer_that_gives_none_is_named_without_the_secret(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    source = Asked(answer, {"access_token": "a"})
    with caplog.at_level(logging.WARNING), pytest.raises(OSError, match="no token from https://issuer/token"):
        source.token()
    assert "No token for reward from https://issuer/token" in caplog.text
    assert "hush" not in caplog.text
    assert source.token() == "a"


def test_an_address_that_is_none_of_the_webs_is_refused() -> None:
    source = TokenSource(Issuer(url="file:///etc/passwd", client_id="r", client_secret="s"))
    with pytest.raises(OSError, match="no token"):
        source.token()


def test_what_librdkafka_is_told_is_understood() -> None:
    login = login_of(CLIENT)
    assert login.issuer == Issuer(url="https://issuer/token", client_id="reward", client_secret="hush", scope="kafka")
    assert "hush" not in repr(login) + repr(login.issuer)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sasl.oauthbearer.method": "default"}, r'"sasl\.oauthbearer\.method" = "oidc"'),
        ({"sasl.oauthbearer.grant.type": "urn:ietf:params:oauth:grant-type:jwt-bearer"}, "client credentials only"),
        ({"sasl.oauthbearer.client.secret": ""}, r"lacks sasl\.oauthbearer\.client\.secret\..*client\.secret_file"),
    ],
)
def test_other_ways_are_refused_with_what_to_write(change: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        login_of({**CLIENT, **change})
