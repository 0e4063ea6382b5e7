"""Who could take part, for machines that stay on, that are ended and started, and that an autoscaler rents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from echo_schemas.records import Control, WorkerControl, WorkerState, WorkerStatus
from echo_settings import Settings
from echo_streams.coordinator.machines import LocalProcesses, Machines, Offer, ScaledKinds, Standby, machines_of

NOW_MS = 1_000_000_000


def word(name: str, state: WorkerState = WorkerState.READY, *, kind: str = "k", rate: float = 10.0, price: float = 1.0) -> WorkerStatus:
    return WorkerStatus(
        run_id="r", worker_id=name, host="h", engine="e", state=state, kind=kind, rollouts_per_s=rate, price_per_hour=price, time_ms=0
    )  # fmt: skip


def orders(*, seconds_ago: float = 1000.0, **wanted: bool) -> dict[str, Control]:
    return {
        name.replace("_", "."): Control(
            run_id="r",
            epoch=1,
            worker_id=name.replace("_", "."),
            worker=WorkerControl(active=active),
            issued_by="c",
            time_ms=NOW_MS - int(1000 * seconds_ago),
        )
        for name, active in wanted.items()
    }


def offered(
    machines: Machines, *heard: WorkerStatus, told: Mapping[str, Control] = {}, known: tuple[WorkerStatus, ...] = ()
) -> dict[str, bool]:
    found = machines.offers(heard, {each.worker_id: each for each in (*known, *heard)}, told, NOW_MS)
    return {each.status.worker_id: each.is_active for each in found}


def test_on_standby_everybody_who_is_heard_and_has_an_engine_is_offered() -> None:
    heard = [word("a"), word("b", WorkerState.STANDBY), word("c", WorkerState.STARTING), word("d", WorkerState.DRAINING)]
    assert offered(Standby(), *heard, told=orders(b=False), known=(word("dead"),)) == {"a": True, "b": False}


def test_a_process_that_was_ended_by_an_order_can_be_called_again_and_one_that_died_cannot() -> None:
    gone = (word("ended", WorkerState.GONE), word("died"), word("died_active"))
    told = orders(ended=False, died_active=True)
    assert offered(LocalProcesses(), word("a"), told=told, known=gone) == {"a": True, "ended": False}


def test_a_process_that_was_called_counts_while_it_starts_and_not_for_ever() -> None:
    starting = word("w", WorkerState.STARTING)
    assert offered(LocalProcesses(), starting, told=orders(w=True, seconds_ago=20)) == {"w": True}
    assert offered(LocalProcesses(), starting, told=orders(w=True, seconds_ago=200)) == {}


def scaled(**most: int) -> ScaledKinds:
    return ScaledKinds(most, lambda kind: 7.0)


def test_places_beyond_the_workers_that_are_heard_wait_and_make_what_the_others_make() -> None:
    found = scaled(k=3).offers([word("pod-x", rate=8.0), word("pod-y", rate=12.0)], {}, {}, NOW_MS)
    assert [(each.status.worker_id, each.is_active) for each in found] == [("k.0", True), ("k.1", True), ("k.2", False)]
    assert {(each.status.rollouts_per_s, each.status.price_per_hour) for each in found} == {(10.0, 1.0)}


def test_of_a_kind_of_which_nothing_is_known_there_is_one_place_to_try_at_the_price_of_the_file() -> None:
    (only,) = scaled(new=5).offers([], {}, {}, NOW_MS)
    assert only.status.worker_id == "new.0"
    assert (only.is_active, only.status.rollouts_per_s, only.status.price_per_hour) == (False, 0.0, 7.0)


def test_a_kind_that_was_scaled_to_none_is_still_known() -> None:
    found = offered(scaled(k=2), told=orders(k_0=False, k_1=False), known=(word("pod-x", WorkerState.GONE),))
    assert found == {"k.0": False, "k.1": False}


def test_a_place_that_was_wanted_and_did_not_come_is_not_counted_on() -> None:
    heard = word("pod-x")
    assert offered(scaled(k=2), heard, told=orders(k_1=True, seconds_ago=20)) == {"k.0": True, "k.1": True}
    assert offered(scaled(k=2), heard, told=orders(k_1=True, seconds_ago=200)) == {"k.0": True}


def test_without_a_most_there_are_as_many_places_as_workers() -> None:
    assert offered(scaled(), word("a", kind=""), word("b", kind="")) == {"worker.0": True, "worker.1": True}


@pytest.mark.parametrize(("name", "made"), [("standby", Standby), ("local", LocalProcesses), ("metric", ScaledKinds)])
def test_the_setting_chooses(name: str, made: type[Any]) -> None:
    pool = [{"name": "k", "price_per_hour": 2.0, "most_workers": 2}]
    machines = machines_of(Settings.model_validate({"coordinator": {"machines": name}, "rollout": {"pool": pool}}))
    assert isinstance(machines, made)
    if isinstance(machines, ScaledKinds):
        assert machines.offers([], {}, {}, NOW_MS)[0] == Offer(machines.offers([], {}, {}, NOW_MS)[0].status, is_active=False)
        assert machines.offers([], {}, {}, NOW_MS)[0].status.price_per_hour == 2.0
