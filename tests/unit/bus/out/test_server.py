"""/metrics, /healthz and /readyz."""

from __future__ import annotations

import json
import math
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from prometheus_client import PlatformCollector, ProcessCollector, generate_latest

from echo_bus.clock import Deadline
from echo_bus.metrics import BusMetrics
from echo_learner.metrics import LearnerMetrics
from echo_runtime.server import Check, MetricsServer, exposition
from echo_schemas.errors import UserError

problems: dict[str, str | None] = {}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    problems.clear()
    metrics = BusMetrics()
    metrics.records_read.labels("requests").inc(3)
    checks = {"kafka": lambda: problems.get("kafka")}
    with MetricsServer(metrics.registry, healthy=checks, ready={"weights": lambda: problems.get("weights")}) as running:
        yield running


def leave_before_the_answer(server: MetricsServer) -> None:
    with socket.create_connection(server.address) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        asking.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(server.url + path, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_are_served_in_prometheus_form(server: MetricsServer) -> None:
    status, body = get(server, "/metrics")
    assert status == 200
    assert 'echo_bus_records_read_total{topic="requests"} 3.0' in body


def test_some_series_are_served_without_the_others(server: MetricsServer) -> None:
    status, body = get(server, "/metrics?name[]=echo_bus_records_read_total&name[]=echo_bus_unheard_of")
    assert status == 200
    assert [line for line in body.splitlines() if not line.startswith("#")] == ['echo_bus_records_read_total{topic="requests"} 3.0']


def test_health_and_readiness_name_what_is_wrong(server: MetricsServer) -> None:
    assert get(server, "/healthz")[0] == get(server, "/readyz")[0] == 200
    problems["weights"] = "No version is installed yet."
    assert get(server, "/healthz")[0] == 200
    status, body = get(server, "/readyz")
    assert (status, json.loads(body)["problems"]) == (503, {"weights": "No version is installed yet."})
    problems["kafka"] = "No broker answers."
    assert get(server, "/healthz")[0] == 503
    assert json.loads(get(server, "/readyz")[1])["problems"].keys() == {"kafka", "weights"}


def test_a_check_that_is_added_later_is_asked_too() -> None:
    healthy: dict[str, Check] = {}
    with MetricsServer(BusMetrics().registry, healthy=healthy) as server:
        assert get(server, "/readyz")[0] == 200
        healthy["loop"] = lambda: "It hangs."
        assert get(server, "/healthz")[0] == get(server, "/readyz")[0] == 503


def test_other_paths_say_what_is_served(server: MetricsServer) -> None:
    status, body = get(server, "/")
    assert status == 404
    assert "/readyz" in body


def test_it_listens_on_loopback_and_a_taken_port_is_a_users_mistake(server: MetricsServer) -> None:
    host, port = server.address
    assert host == "127.0.0.1"
    with pytest.raises(UserError, match=rf"{port} cannot be opened"):
        MetricsServer(BusMetrics().registry, port=port)


def test_a_scraper_that_left_is_no_error(server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(20):
        leave_before_the_answer(server)
    assert get(server, "/metrics")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def scrape(server: MetricsServer) -> None:
    """As Prometheus; returns once the server has noted it, which it does after its answer."""
    before_s, deadline = server._scraped_s, Deadline.after(60.0)
    asked = urllib.request.Request(server.url + "/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "1"})
    urllib.request.urlopen(asked, timeout=60).close()
    while server._scraped_s == before_s:
        assert not deadline.expired(), "the scrape is not noted"


def test_who_fails_waits_until_prometheus_has_asked_once_more(server: MetricsServer) -> None:
    told: list[Callable[[], object]] = []
    with ThreadPoolExecutor() as pool:
        get(server, "/metrics")
        pool.submit(server.await_scrape, 600.0, told.append).result(60)
        assert not told, "nobody waits for a screen, or for nobody"
        scrape(server)

        def begin() -> Future[None]:
            already = len(told)
            waiting = pool.submit(server.await_scrape, 600.0, told.append)
            while len(told) == already:
                assert not waiting.done(), "it does not wait"
            return waiting

        waiting = begin()
        get(server, "/metrics")
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        scrape(server)
        waiting.result(60)
        waiting = begin()
        told[-1]()
        waiting.result(60)


def test_the_text_is_what_the_client_library_would_say() -> None:
    learner = LearnerMetrics()
    bus = BusMetrics(learner.registry)
    ProcessCollector(registry=learner.registry)
    PlatformCollector(registry=learner.registry)
    bus.records_read.labels('a "quoted" \\ name\nof two lines, ü').inc(12_345_678)
    bus.publish_seconds.labels("requests").observe(0.01)
    learner.step.labels("loss").set(math.nan)
    learner.step.labels("entropy").set(-math.inf)
    # The process's own figures change between the two.
    kept = [line for line in exposition(learner.registry).splitlines() if not line.startswith(b"process_")]
    assert kept == [line for line in generate_latest(learner.registry).splitlines() if not line.startswith(b"process_")]
