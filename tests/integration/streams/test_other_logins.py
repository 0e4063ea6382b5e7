"""Logins by token (OAUTHBEARER) and by certificate (mTLS): every client of a role, Faust's too; no secret where others could read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_bus.clock import Deadline
from echo_bus.errors import NotAuthorized
from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_embedded.ports import free_ports
from echo_ops.access import as_binding
from echo_runtime.opening import open_bus
from echo_runtime.rights import check_rights
from echo_schemas.errors import EchoError
from echo_schemas.naming import Namespace
from echo_schemas.records import Progress
from echo_schemas.rights import acls_of
from echo_schemas.topics import PROGRESS, TRAJECTORIES
from echo_settings import load_settings
from echo_settings.public import public_config
from tests.integration.streams.issuer import AUDIENCE, Clients, Issuer
from tests.integration.streams.stage import WAIT_S, Stage
from tests.unit.core.records import trajectory

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
SECRET = "hush-7f3a91"
HOST = "127.0.0.1"
_OAUTH = "org.apache.kafka.common.security.oauthbearer"


class Cluster:
    """A broker that takes tokens on one listener and certificates on the other."""

    def __init__(self, kafka: EmbeddedKafka, issuer: Issuer, clients: Clients, certificates_at: int) -> None:
        self.kafka, self.issuer, self._clients = kafka, issuer, clients
        self._certificates_at = f"{HOST}:{certificates_at}"

    def login(self, way: str, principal: str, folder: Path) -> tuple[str, dict[str, str]]:
        """Where and with what `principal` connects; the secret stands in a file."""
        (folder / "secret").write_text(SECRET + "\n")
        common = {"ssl.ca.location": self.kafka.client_properties["ssl.ca.location"]}
        if way == "token":
            oauth = {"method": "oidc", "client.id": principal, "token.endpoint.url": f"{self.issuer.url}/token"}
            oauth["client.secret_file"] = str(folder / "secret")
            return self.kafka.bootstrap, {
                **common,
                "security.protocol": "SASL_SSL",
                "sasl.mechanism": "OAUTHBEARER",
                **{f"sasl.oauthbearer.{name}": value for name, value in oauth.items()},
            }
        certificate = str(self._clients.certificate(principal, SECRET))
        return self._certificates_at, {
            **common,
            "security.protocol": "SSL",
            "ssl.certificate.location": certificate,
            "ssl.key.location": certificate,
            "ssl.key.password_file": str(folder / "secret"),
        }


@pytest.fixture(scope="module")
def cluster(jars: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One broker for the module."""
    clients = Clients(tmp_path_factory.mktemp("clients"))
    broker, controller, certificates = free_ports(3)
    with Issuer(SECRET).serving() as issuer:
        listeners = {"SASL_SSL": broker, "CERTIFICATES": certificates, "CONTROLLER": controller}
        addresses = {name: f"{name}://{HOST}:{port}" for name, port in listeners.items()}
        jwks = f"{issuer.url}/jwks"
        properties = {
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listeners": ",".join(addresses.values()),
            "advertised.listeners": f"{addresses['SASL_SSL']},{addresses['CERTIFICATES']}",
            "listener.security.protocol.map": "CONTROLLER:SSL,SASL_SSL:SASL_SSL,CERTIFICATES:SSL",
            "sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
            "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": f"{_OAUTH}.OAuthBearerLoginModule required;",
            "listener.name.sasl_ssl.oauthbearer.sasl.server.callback.handler.class": f"{_OAUTH}.OAuthBearerValidatorCallbackHandler",
            "sasl.oauthbearer.jwks.endpoint.url": jwks,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "listener.name.certificates.ssl.client.auth": "required",
            "listener.name.certificates.ssl.truststore.type": "PEM",
            "listener.name.certificates.ssl.truststore.location": str(clients.authority),
            "listener.name.certificates.ssl.principal.mapping.rules": "RULE:^CN=(.*)$/$1/",
        }
        jvm = Jvm(jit=Jit.QUICK, extra_flags=(f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={jwks}",))
        kafka = EmbeddedKafka(secure=True, jvm=jvm, ports=(broker,), properties=properties)
        try:
            kafka.start()
        except EchoError as exc:
            pytest.skip(f"No embedded Kafka: {exc}")
        yield Cluster(kafka, issuer, clients, certificates)
        kafka.stop()


@pytest.mark.parametrize("way", ["token", "certificate"])
def test_every_client_of_a_role_logs_in_and_the_secret_is_nowhere(cluster: Cluster, namespace: Namespace, tmp_path: Path, way: str) -> None:
    principal = f"{namespace.name}.reward"
    bootstrap, login = cluster.login(way, principal, tmp_path)
    stage = Stage(
        tmp_path, bootstrap, namespace, {"my_rewards.py:brevity": 1.0}, login=login, administrator=cluster.kafka.client_properties,
        administered_at=cluster.kafka.bootstrap,
    )  # fmt: skip
    try:
        admin = stage.bus.cluster.admin()
        for created in admin.create_acls([as_binding(acl) for acl in acls_of(namespace)]).values():
            created.result(WAIT_S)
        settings = load_settings(tmp_path / "run.toml", {})
        deadline = Deadline.after(WAIT_S)
        while not check_rights(settings, "reward"):
            assert not deadline.expired(), "waited for the cluster to answer"
        refused = open_bus(settings, "reward").publisher()
        with pytest.raises(NotAuthorized, match="WRITE on the topic"):
            refused.publish(TRAJECTORIES, trajectory(1)).wait(WAIT_S)
        with pytest.raises(NotAuthorized):
            refused.close()
        # A reader asks after partitions before it reads anything.
        assert open_bus(settings, "reward").newest(PROGRESS, Progress) == {}

        places = stage.publish(trajectory(seq, completion="four") for seq in range(4))
        child = stage.start("1")
        stage.wait_for(places)
        command = Path(f"/proc/{child.process.pid}/cmdline").read_bytes() + Path(f"/proc/{child.process.pid}/environ").read_bytes()
        child.terminate()
        assert child.ended() == 0
        for text in (child.log, command.decode(errors="replace"), str(public_config(settings)), repr(settings)):
            assert SECRET not in text
    finally:
        stage.close()


def test_an_issuer_that_refuses_is_named(cluster: Cluster, namespace: Namespace, tmp_path: Path) -> None:
    bootstrap, login = cluster.login("token", f"{namespace.name}.worker", tmp_path)
    (tmp_path / "secret").write_text("another")
    lines = [f'"{name}" = "{value}"' for name, value in login.items()]
    (tmp_path / "run.toml").write_text(f'[kafka]\nbootstrap = "{bootstrap}"\n[kafka.client]\n' + "\n".join(lines))
    with pytest.raises(NotAuthorized, match="refused the login") as caught:
        check_rights(load_settings(tmp_path / "run.toml", {}), "worker")
    assert cluster.issuer.num_refused > 0
    assert "another" not in str(caught.value)
