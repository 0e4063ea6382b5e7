"""Before anything starts: which rewards, which topics, which group, which login. Each refusal says what to do."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_memory import MemoryCluster
from echo_schemas.errors import UserError
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import ScoringPool
from echo_streams.run import attach, check_isolation, check_topics
from echo_streams.scoring import Attached
from echo_streams.security import login_of
from echo_tasks.rewards import reward
from tests.unit.streams.stage import NAMESPACE


def test_a_reward_is_attached_under_the_name_that_the_settings_give_it(tmp_path: Path) -> None:
    """The learner waits for this name, and the decorator's is another."""
    file = tmp_path / "judges_of_run.py"
    file.write_text("from echo_tasks.rewards import reward\n\n\n@reward(name='short')\ndef brevity(sample):\n    return 1.0\n")
    path = f"{file}:brevity"
    exact, brevity = attach(("exact", path))
    assert (exact.name, exact.function.name) == ("exact", "exact")
    assert (brevity.name, brevity.function.name, brevity.function.origin) == (path, "short", path)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ((), r"nothing to do: no reward is named\. Name one in \[rewards\], for example exact = 1\.0\."),
        (("exat",), r"There is no reward 'exat'\. Did you mean 'exact'\?"),
        (("exact", "retrun"), r"There is no reward 'retrun'\. Did you mean 'return'\?"),
        (("zzzzzz",), r"There is no reward 'zzzzzz'\. There are: exact, return"),
        (("no_such_judges.py:brevity",), r"There is no Python file no_such_judges\.py\."),
        (("no_such_judges:brevity",), r"there is no module 'no_such_judges'\. Is it installed, or on PYTHONPATH\?"),
        (("echo_tasks.rewards:exakt",), r"echo_tasks\.rewards has no attribute 'exakt'\. Did you mean 'exact'\?"),
        (("echo_tasks.catalogue:TASK_GROUP",), r"'echo_tasks\.catalogue:TASK_GROUP' is no reward function but str\."),
    ],
)
def test_a_reward_that_is_not_there_is_answered_with_what_is_near(names: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        attach(names)


def test_a_reward_that_computes_what_a_model_wrote_needs_a_process_that_can_be_ended() -> None:
    @reward(name="calculator", isolated=True)
    def calculator(_: Any) -> float:
        return 1.0

    entries = (*attach(("exact",)), Attached(name="calculator", function=calculator))
    with pytest.raises(UserError, match=r"The reward 'calculator' computes what a model wrote.*Set \[scoring\] processes = 1"):
        check_isolation(entries, 0)
    check_isolation(entries, 1)
    check_isolation(entries[:1], 0)


def test_a_function_that_no_other_process_could_find_is_refused() -> None:
    @reward(name="hidden")
    def hidden(_: Any) -> float:
        return 1.0

    with pytest.raises(UserError, match=r"'hidden' cannot run in another process.*set \[scoring\] processes = 0"):
        ScoringPool([hidden], num_processes=1, metrics=StreamsMetrics())


TOPICS = {NAMESPACE.topic(TRAJECTORIES): 4, NAMESPACE.topic(REWARDS): 4, NAMESPACE.dead_letters(TRAJECTORIES): 1}


@pytest.mark.parametrize(
    ("topics", "sentence"),
    [
        ({}, r"cannot see the topics unit\.trajectories, unit\.rewards, unit\.trajectories\.dlq.*echoswarm topics apply"),
        ({NAMESPACE.topic(REWARDS): 0}, r"cannot see the topics unit\.rewards\."),
        ({NAMESPACE.topic(REWARDS): 2}, r"unit\.rewards has 2 partitions and unit\.trajectories 4.*Give unit\.rewards 4 partitions"),
    ],
)
def test_topics_that_do_not_fit_are_named(topics: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_topics(bus_with({**TOPICS, **topics} if topics else {}))


def test_the_number_of_partitions_is_found() -> None:
    assert check_topics(bus_with({**TOPICS, NAMESPACE.topic(REWARDS): 6})) == 4


def bus_with(topics: dict[str, int]) -> Bus:
    cluster = MemoryCluster()
    for future in cluster.admin().create_topics([NewTopic(name, count, 1) for name, count in topics.items() if count]).values():
        future.result(60)
    return Bus(
        cluster=cluster,
        namespace=NAMESPACE,
        role="reward",
        run_id="demo",
    )


def test_no_security_is_no_login() -> None:
    login = login_of({})
    assert (login.context, login.mechanism) == (None, None)


def test_a_login_is_taken_over_and_its_password_kept_out_of_logs() -> None:
    login = login_of(
        {"security.protocol": "sasl_ssl", "sasl.mechanism": "scram-sha-512", "sasl.username": "judge", "sasl.password": "secret"}
    )
    assert (login.mechanism, login.username, login.password) == ("SCRAM-SHA-512", "judge", "secret")
    assert login.context is not None
    assert login.context.verify_mode is ssl.CERT_REQUIRED
    assert "secret" not in repr(login)


def test_certificates_are_not_checked_only_if_the_settings_say_so() -> None:
    unchecked = login_of({"security.protocol": "SSL", "enable.ssl.certificate.verification": "false"}).context
    any_host = login_of({"security.protocol": "SSL", "ssl.endpoint.identification.algorithm": "none"}).context
    assert unchecked is not None
    assert any_host is not None
    assert (unchecked.verify_mode, unchecked.check_hostname) == (ssl.CERT_NONE, False)
    assert (any_host.verify_mode, any_host.check_hostname) == (ssl.CERT_REQUIRED, False)


@pytest.mark.parametrize(
    ("client", "sentence"),
    [
        ({"security.protocol": "TLS"}, r"security\.protocol = 'TLS' is unknown\. Use one of PLAINTEXT, SSL"),
        (
            {"security.protocol": "SASL_SSL", "sasl.mechanism": "GSSAPI"},
            r"cannot log in with sasl\.mechanism = 'GSSAPI'\. Use one of PLAIN",
        ),
        ({"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}, r"sasl\.username or sasl\.password is missing"),
        ({"security.protocol": "SSL", "ssl.ca.location": "/no/such/ca.pem"}, r"certificate or key of \[kafka\.client\] cannot be read"),
    ],
)
def test_a_login_that_cannot_be_is_explained(client: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        login_of(client)


def test_properties_without_a_counterpart_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    login_of({"socket.keepalive.enable": "true", "security.protocol": "PLAINTEXT"})
    (record,) = caplog.records
    assert record.getMessage().endswith("properties: socket.keepalive.enable")
