"""Waiting until a cluster, or a web server, answers."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.client import HTTPException

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from echo_bus.clock import Deadline
from echo_bus.errors import ClusterUnreachable, DeadlineExceeded

# While we wait, librdkafka would log that the brokers are not reachable yet.
SILENT = logging.getLogger(f"{__name__}.librdkafka")
SILENT.addHandler(logging.NullHandler())
SILENT.propagate = False

_ASK_EVERY_S = 0.2
# Time-out of one request; a broker that starts is noticed at once.
_ANSWER_S = 1.0
_IMPATIENT: Mapping[str, str | int] = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 100, "log_level": 0}


def wait_for_brokers(
    client: Mapping[str, str], num_brokers: int, deadline: Deadline, *, check_alive: Callable[[], None] = lambda: None
) -> None:
    """Block until the metadata names `num_brokers` brokers. `client`: librdkafka properties.

    Calls `check_alive` at least once a second and raises its errors; raises ClusterUnreachable at the deadline.
    """
    admin = AdminClient({**_IMPATIENT, **client}, logger=SILENT)
    num_seen = 0
    while not deadline.expired():
        check_alive()
        num_seen = len(_ask(admin))
        if num_seen == num_brokers:
            return
    raise ClusterUnreachable(f"Only {num_seen} of {num_brokers} broker(s) answered at {client['bootstrap.servers']} in time.")


def brokers_named(client: Mapping[str, str], timeout_s: float) -> frozenset[int]:
    """The node ids that the metadata names now; none if no broker answers within `timeout_s`."""
    admin = AdminClient({**_IMPATIENT, **client}, logger=SILENT)
    deadline = Deadline.after(timeout_s)
    seen: frozenset[int] = frozenset()
    while not seen and not deadline.expired():
        seen = _ask(admin)
    return seen


def _ask(admin: AdminClient) -> frozenset[int]:
    try:
        return frozenset(admin.list_topics(timeout=_ANSWER_S).brokers)
    except KafkaException:
        return frozenset()


def wait_for_http(url: str, deadline: Deadline, *, check_alive: Callable[[], None] = lambda: None) -> None:
    """Block until a GET of `url` succeeds. Raises DeadlineExceeded, and the errors of `check_alive`."""
    while not deadline.expired():
        check_alive()
        if answers_http(url):
            return
        time.sleep(_ASK_EVERY_S)
    raise DeadlineExceeded(f"Nothing answered at {url} in time.")


def answers_http(url: str, timeout_s: float = _ANSWER_S) -> bool:
    """Whether a GET of this http:// address succeeds."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310 - always our own http://127.0.0.1
            return bool(response.status == HTTPStatus.OK)
    except (HTTPException, OSError):
        return False
