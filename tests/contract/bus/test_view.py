"""A compacted topic as a dictionary: whole at `open`, following afterwards, loud when it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from echo_bus.client.profiles import LOOK, WATCHER
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded
from echo_bus.reading.view import CompactedView
from echo_schemas.errors import UserError
from echo_schemas.records import Drop, Progress
from echo_schemas.topics import DROPS, PROGRESS
from tests.contract.bus.conftest import PATIENCE_S

Until = Callable[[Callable[[], object], str], None]


@pytest.fixture
def open_view(kit: Any) -> Callable[..., CompactedView[Progress]]:
    def make(run_id: str | None = None) -> CompactedView[Progress]:
        view = CompactedView(kit.reader(PROGRESS, run_id=run_id), replace(kit.bus, run_id=run_id), PROGRESS, Progress)
        kit.opened.append(view)
        view.open(Deadline.after(PATIENCE_S))
        return view

    return make


def test_a_view_is_whole_when_it_opens_and_follows(
    kit: Any, progress: Callable[..., Progress], open_view: Callable[..., CompactedView[Progress]]
) -> None:
    kit.create(PROGRESS)
    publisher = kit.publisher()
    for version in range(5):
        publisher.publish(PROGRESS, progress(version))
    publisher.publish(PROGRESS, progress(9, "other"))
    publisher.flush(PATIENCE_S)
    view = open_view()
    assert view.get("demo") == progress(4)
    assert view.get("nobody") is None
    assert view.items() == {"demo": progress(4), "other": progress(9, "other")}
    publisher.publish(PROGRESS, progress(7))
    assert view.wait_for("demo", lambda seen: seen.version >= 7, Deadline.after(PATIENCE_S)) == progress(7)


def test_a_view_of_one_key_holds_and_tells_nothing_else(kit: Any, progress: Callable[..., Progress], until: Until) -> None:
    kit.create(PROGRESS)
    publisher = kit.publisher()
    for run in ("other", "demo", "third"):
        publisher.publish(PROGRESS, progress(1, run))
    publisher.flush(PATIENCE_S)
    view = kit.bus.view(PROGRESS, Progress, only="demo")
    kit.opened.append(view)
    assert view.items() == {"demo": progress(1)}
    heard: list[str] = []
    view.on_change(lambda key, _record: heard.append(key))
    for run in ("other", "demo", "fourth"):
        publisher.publish(PROGRESS, progress(2, run))
    publisher.publish_tombstone(PROGRESS, "third")
    publisher.publish_tombstone(PROGRESS, "demo")
    until(lambda: heard[1:], "the tombstone")
    assert heard == ["demo", "demo"]
    assert view.items() == {}
    assert kit.bus.newest(PROGRESS, Progress, only="other") == {"other": progress(2, "other")}


def test_the_newest_of_each_key_as_of_now(kit: Any, progress: Callable[..., Progress]) -> None:
    kit.create(PROGRESS)
    assert kit.bus.newest(PROGRESS, Progress) == {}
    publisher = kit.publisher()
    for version in range(3):
        publisher.publish(PROGRESS, progress(version))
    publisher.publish(PROGRESS, progress(9, "other"))
    publisher.publish_tombstone(PROGRESS, "gone")
    publisher.flush(PATIENCE_S)
    assert kit.bus.newest(PROGRESS, Progress) == {"demo": progress(2), "other": progress(9, "other")}


def test_a_tombstone_takes_an_entry_away_and_listeners_hear_it(
    kit: Any, progress: Callable[..., Progress], open_view: Callable[..., CompactedView[Progress]], until: Until
) -> None:
    kit.create(PROGRESS)
    publisher = kit.publisher()
    publisher.publish(PROGRESS, progress(1))
    publisher.flush(PATIENCE_S)
    view = open_view()
    heard: list[tuple[str, Progress | None]] = []
    view.on_change(lambda key, record: heard.append((key, record)))
    publisher.publish(PROGRESS, progress(2))
    publisher.publish_tombstone(PROGRESS, "demo")
    until(lambda: len(heard) == 2, "two changes")
    assert heard == [("demo", progress(2)), ("demo", None)]
    assert view.items() == {}


def test_a_view_of_one_run_does_not_hear_of_others(
    kit: Any, progress: Callable[..., Progress], open_view: Callable[..., CompactedView[Progress]], until: Until
) -> None:
    kit.create(PROGRESS, num_partitions=1)
    view = open_view(run_id="demo")
    heard: list[str] = []
    view.on_change(lambda key, _: heard.append(key))
    publisher = kit.publisher()
    publisher.publish(PROGRESS, progress(1, "other"))
    publisher.publish_tombstone(PROGRESS, "other")
    publisher.publish(PROGRESS, progress(1))
    until(lambda: heard, "our own change")
    assert heard == ["demo"]


def test_a_wait_ends_at_its_deadline_and_says_what_it_waited_for(kit: Any, open_view: Callable[..., CompactedView[Progress]]) -> None:
    kit.create(PROGRESS)
    view = open_view()
    with pytest.raises(DeadlineExceeded, match="The learner's first step did not come in time; it is None"):
        view.wait_for("demo", lambda seen: True, Deadline.after(0.05), what="The learner's first step")


def test_a_view_that_fails_says_so_to_everybody(
    kit: Any, progress: Callable[..., Progress], open_view: Callable[..., CompactedView[Progress]], until: Until
) -> None:
    kit.create(PROGRESS)
    view = open_view()

    def refuse(key: str, record: Progress | None) -> None:
        raise RuntimeError(f"The listener refused {key}.")

    view.on_change(refuse)
    publisher = kit.publisher()
    publisher.publish(PROGRESS, progress(1))
    with pytest.raises(RuntimeError, match="refused demo"):
        view.wait_for("demo", lambda seen: seen.version > 5, Deadline.after(PATIENCE_S))
    for call in (view.items, lambda: view.get("demo")):
        with pytest.raises(RuntimeError, match="refused demo"):
            call()


def test_only_compacted_topics_have_views(kit: Any) -> None:
    kit.create(DROPS)
    with pytest.raises(UserError, match="not compacted"):
        CompactedView(kit.reader(DROPS), kit.bus, DROPS, Drop)


def test_a_view_reads_up_in_a_hurry_and_then_asks_the_cluster_seldom(kit: Any, progress: Callable[..., Progress]) -> None:
    kit.create(PROGRESS)
    publisher = kit.publisher()
    publisher.publish(PROGRESS, progress(1))
    publisher.flush(PATIENCE_S)
    waits: list[int] = []

    class Recording:
        """A cluster that says how long its consumers' fetches may be held back."""

        def consumer(self, config: Mapping[str, Any]) -> Any:
            waits.append(config["fetch.wait.max.ms"])
            return kit.bus.cluster.consumer(config)

    view = replace(kit.bus, cluster=Recording()).view(PROGRESS, Progress)
    kit.opened.append(view)
    assert waits == [LOOK["fetch.wait.max.ms"], WATCHER["fetch.wait.max.ms"]]
    publisher.publish(PROGRESS, progress(2))
    assert view.wait_for("demo", lambda seen: seen.version == 2, Deadline.after(PATIENCE_S)) == progress(2)
