"""`Cluster` on a real Kafka: confluent-kafka's clients with the cluster's address and security."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from echo_bus.client.cluster import RawConsumer, RawProducer
from echo_bus.client.kafka_errors import LOGIN_HINT, LOGIN_REFUSED, translate
from echo_bus.client.profiles import FAILOVER
from echo_bus.errors import NotAuthorized, TransportError

logger = logging.getLogger(__name__)

CLIENT_LOG = f"{__name__}.librdkafka"
"""The logger of the clients' own lines, most of them about connections. Commands without a log do not show them."""
_client_logger = logging.getLogger(CLIENT_LOG)
_client_logger.addHandler(logging.NullHandler())


class KafkaCluster:
    """Opens clients on one cluster. Thread-safe. `client_properties`: any librdkafka properties; they win over all others.

    `on_throttle(kind, seconds)`: called on any thread when a quota delays a `producer`, `consumer` or `admin`.
    """

    def __init__(
        self, bootstrap: str, client_properties: Mapping[str, Any] | None = None, *, on_throttle: Callable[[str, float], None] | None = None
    ) -> None:
        self.bootstrap = bootstrap
        self._on_throttle = on_throttle
        self._own = dict(client_properties or {})
        self._lock = threading.Lock()
        self._last_error: KafkaError | None = None

    def producer(self, config: Mapping[str, Any]) -> RawProducer:
        return cast("RawProducer", self._open(Producer, config))

    def consumer(self, config: Mapping[str, Any]) -> RawConsumer:
        merged = dict(config)
        if "group.id" not in merged:
            # librdkafka requires a group also for a reader; nothing is ever committed under this name.
            merged["group.id"] = f"{merged.get('client.id', 'echoswarm')}.reader"
        return cast("RawConsumer", self._open(Consumer, merged))

    def admin(self) -> AdminClient:
        return cast("AdminClient", self._open(AdminClient, FAILOVER))

    def check(self, timeout_s: float = 10.0) -> int:
        """The number of brokers that answer. Raises ClusterUnreachable or NotAuthorized, each with what to do."""
        try:
            return len(self.admin().list_topics(timeout=timeout_s).brokers)
        except KafkaException as exc:
            raise self.explain(exc) from exc

    def explain(self, error: KafkaException) -> TransportError:
        """The error to show. The call reports a refused login only as a time-out; the client's error callback says more."""
        return self._refused_login() or translate(error, self.bootstrap)

    def check_login(self) -> None:
        """Raise NotAuthorized if a client has reported a refused login. Never blocks."""
        if (refused := self._refused_login()) is not None:
            raise refused

    def _refused_login(self) -> NotAuthorized | None:
        last = self._last_error
        if last is None or last.code() not in LOGIN_REFUSED:
            return None
        return NotAuthorized(f"The cluster at {self.bootstrap} refused the login: {last.str()}", hint=LOGIN_HINT)

    def _open(self, client: Any, config: Mapping[str, Any]) -> Any:
        merged = {**config, "bootstrap.servers": self.bootstrap, "error_cb": self._on_error, "logger": _client_logger, **self._own}
        if self._on_throttle is not None:
            merged["throttle_cb"] = partial(self._throttled, client.__name__.removesuffix("Client").lower())
        try:
            return client(merged)
        except KafkaException as exc:
            raise TransportError(
                f"The Kafka client refused its configuration: {exc.args[0].str()}.", hint="Check the properties in [kafka.client]."
            ) from exc

    def _throttled(self, kind: str, event: Any) -> None:
        """Called by librdkafka on a polling thread; once with 0 when the delay is over."""
        if self._on_throttle is not None and event.throttle_time > 0:
            self._on_throttle(kind, event.throttle_time)

    def _on_error(self, error: KafkaError) -> None:
        """Called by librdkafka on a polling thread. These errors are informational: the client retries by itself."""
        with self._lock:
            if self._last_error is None or error.code() in LOGIN_REFUSED:
                self._last_error = error
        logger.debug("Kafka client: %s", error)
