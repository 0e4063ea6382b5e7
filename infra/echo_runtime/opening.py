"""Opens a bus from the settings: the cluster, the schema ids, the limits on dead letters."""

from __future__ import annotations

from collections.abc import Callable

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Clock, SystemClock
from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.metrics import BusMetrics
from echo_runtime.logins import with_login
from echo_runtime.notices import Notices
from echo_runtime.trust import open_signer, open_verifier
from echo_schemas.codec import Codec, lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.registry import HttpRegistry, subjects_of
from echo_settings import Settings

# Shorter delays also occur under a wide quota.
_WORTH_SAYING_S = 0.1
_QUOTA = "quota of its "
_HELD_BACK = {"producer": ("writing", "producer_byte_rate"), "consumer": ("reading", "consumer_byte_rate")}


def open_cluster(settings: Settings, role: str = "operator", *, on_throttle: Callable[[str, float], None] | None = None) -> KafkaCluster:
    """The cluster of the settings, with the login of `role`. The state file of `echoswarm kafka up` gives the address of `embedded`."""
    bootstrap = settings.kafka.bootstrap
    if bootstrap == "embedded":
        # Imported only here: other clusters do not need the package.
        from echo_embedded import resolve_embedded

        bootstrap = resolve_embedded()
    return KafkaCluster(bootstrap, with_login(settings, role).kafka.client, on_throttle=on_throttle)


def open_codec(settings: Settings) -> Codec:
    """A codec with schema ids from the registry if one is configured, else from the lock file."""
    if not settings.registry.url:
        return lock_file_codec()
    subjects = subjects_of(Namespace(settings.kafka.namespace).topic)
    return Codec(HttpRegistry(settings.registry.url, subjects, settings.registry.client_properties()))


def open_bus(
    settings: Settings, role: str, *, metrics: BusMetrics | None = None, clock: Clock | None = None, notices: Notices | None = None
) -> Bus:
    """The bus of one process. `notices` gets a sentence while a quota delays it. Raises UserError if no embedded broker runs, or if keys of
    [trust] are missing. It connects later; `KafkaCluster.check` tests the connection.
    """
    letters = settings.dead_letters
    metrics = metrics or BusMetrics()
    return Bus(
        cluster=open_cluster(settings, role, on_throttle=throttle_report(metrics, notices)),
        namespace=Namespace(settings.kafka.namespace),
        codec=open_codec(settings),
        metrics=metrics,
        clock=clock or SystemClock(),
        role=role,
        run_id=settings.run.name,
        dead_letter_limits=DeadLetterLimits(per_writer=letters.per_writer, per_minute=letters.per_minute, stop_after=letters.stop_after),
        signer=open_signer(settings.trust, role),
        verifier=open_verifier(settings.trust, role),
    )


def throttle_report(metrics: BusMetrics, notices: Notices | None) -> Callable[[str, float], None]:
    """A callback for delays by quotas: updates the metric and adds a notice."""

    def held_back(kind: str, seconds: float) -> None:
        metrics.throttled_seconds.labels(kind).inc(seconds)
        if notices is not None and seconds >= _WORTH_SAYING_S:
            doing, quota = _HELD_BACK.get(kind, ("asking", "request_percentage"))
            notices.say(
                f"{_QUOTA}{kind}s",
                f"A client quota of the cluster holds this process's {doing} back, its newest request for {seconds:.1f} s. It goes on, "
                f"slower; if that is too slow, ask the cluster's operator for a larger {quota}.",
            )

    return held_back


def held_by_quota(notices: Notices) -> str | None:
    """The newest sentences of `throttle_report`; None if nothing was held back lately."""
    return " ".join(sentence for place, sentence in notices.current().items() if place.startswith(_QUOTA)) or None
